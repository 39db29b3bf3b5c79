"""FedPer and FedBN: what stays at clients, what is sent, and how each client is tested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from baselines_helpers import Reference, near
from federation_helpers import BATCH_NORM
from helpers import each, federation_of, images, run, same, setup, slow_after_first
from torch.nn import functional as F

from fedblend.core.callbacks import Callback
from fedblend.core.engine import TrainTask
from fedblend.core.loop import RoundLoop
from fedblend.core.state import ClientState
from fedblend.core.trees import bytes_of
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.methods.personal import FedRep

DEEP = {"name": "mlp", "hidden": [5]}
HEAD = ("stages.1.weight", "stages.1.bias")
BODY = ("stages.0.1.0.weight", "stages.0.1.0.bias")
Tensors = list[torch.Tensor]


def shared_body(of: Reference, head_share: float | None = None) -> tuple[Tensors, dict[int, Tensors]]:
    """The body and the heads after FedPer's rounds in float64 (Arivazhagan et al. 2019, Algorithm 1).

    With ``head_share`` FedRep's (Collins et al. 2021, Algorithm 1).
    """
    first = [tensor.double() for tensor in of.setup.weights().values()]
    body, heads = first[:2], {}
    for number, lr, cohort in of.cohorts():
        models = []
        for k in cohort:
            x, y = (torch.from_numpy(half) for half in of.samples(k))
            w = [*body, *heads.get(k, first[2:])]
            batches = of.batches(k, number)
            for step, rows in enumerate(batches):
                w = [p.detach().requires_grad_() for p in w]
                logits = F.relu(x[rows, :-1] @ w[0].T + w[1]) @ w[2].T + w[3]
                gradients = torch.autograd.grad(F.cross_entropy(logits, y[rows]), w)
                rate = [lr] * 4
                if head_share is not None:
                    rate = [0, 0, lr, lr] if step < round(head_share * len(batches)) else [lr, lr, 0, 0]
                w = [p.detach() - r * g for p, g, r in zip(w, gradients, rate, strict=True)]
            models.append(w)
            heads[k] = w[2:]
        mean = [sum(s * w[i] for s, w in zip(of.shares(cohort), models, strict=True)) for i in range(4)]
        body = mean[:2]
    return body, heads


@pytest.mark.parametrize("share", [None, 0.0, 0.4, 1.0])
def test_fedper_and_fedrep_are_the_papers(share: float | None) -> None:
    method = "fedper" if share is None else {"name": "fedrep", "personal": {"head_share": share}}
    of = Reference(method=method, model=DEEP, holdout=0.2)
    body, heads = shared_body(of, head_share=share)

    state = of.trained()

    assert [*state.weights] == [*BODY, *HEAD]
    near(state.weights[BODY[0]].double().numpy(), body[0].numpy())
    assert state.client_states.keys() == heads.keys()
    for k, head in heads.items():
        assert [*state.client_states[k].to_tensors()] == [f"own/{name}" for name in sorted(HEAD)]
        for name, wanted in zip(HEAD, head, strict=True):
            near(state.client_states[k].layers[name].double().numpy(), wanted.numpy())


@each(("share", "steps", "head"), [(0.5, 2, 1), (0.9, 2, 1), (0.1, 2, 1), (0.5, 5, 2), (1.0, 2, 2), (0.0, 3, 0)])
def test_both_phases_of_fedrep_have_a_step_where_there_are_two(share: float, steps: int, head: int) -> None:
    assert FedRep(head_share=share).own_steps(steps) == head


def test_a_client_of_a_single_step_trains_head_and_body_in_it() -> None:
    made = setup(images(), [list(range(3))], method="fedrep", model=DEEP, holdout=0.2, train={"cohort": 1})
    first, (state, _) = made.weights(), run(made, 1)
    assert LoopEngine(made).assign(TrainTask(0, first, None, made.sizes(0)), 0).steps == 1
    assert not torch.equal(state.client_states[0].layers[HEAD[0]], first[HEAD[0]])
    assert not torch.equal(state.weights[BODY[0]], first[BODY[0]])


def test_fednova_keeps_the_model_where_no_step_was_on_shared_layers() -> None:
    method = {"name": "fedrep", "personal": {"head_share": 1.0}, "aggregator": "fednova"}
    made = setup(images(), method=method, model=DEEP, holdout=0.2)
    assert same(run(made, 1)[0].weights, made.weights())


@pytest.mark.parametrize("train", [{"momentum": 0.9, "weight_decay": 0.1}, {"clip_norm": 0.1}])
def test_layers_that_wait_for_their_turn_do_not_move(train: dict[str, Any]) -> None:
    method = {"name": "fedrep", "personal": {"head_share": 1.0}, "terms": ["proximal"]}
    made = setup(images(), method=method, model=DEEP, holdout=0.2, train=train)
    for engine in (LoopEngine(made), StackedEngine(made, stack=2)):
        state, _ = run(RoundLoop(made, engine), 2)
        assert all(torch.equal(state.weights[name], made.weights()[name]) for name in BODY)


def test_the_server_keeps_the_first_head_and_clients_that_have_not_trained_keep_nothing() -> None:
    made = setup(images(), method="fedper", model=DEEP, holdout=0.2, train={"cohort": 1})
    state, _ = run(made, 1)
    assert len(state.client_states) == 1
    assert all(torch.equal(state.weights[name], made.weights()[name]) for name in HEAD)
    assert not torch.equal(state.weights[BODY[0]], made.weights()[BODY[0]])


class Seen(Callback):
    """What aggregation saw of the uploads."""

    def on_updates(self, task: Any, result: Any) -> None:
        partial = result.partial
        self.names = [*partial.tensors] if hasattr(partial, "tensors") else [*partial[0][0]]
        self.sent, self.extras = result.sent, result.extras


@each("aggregator", ["mean", "median", {"name": "secure-mean", "fewest": 2}, "fednova"])
@each("protection", ["none", {"name": "noise", "clip": 1.0, "multiplier": 0.1}])
def test_only_shared_layers_are_sent_protected_and_aggregated(aggregator: Any, protection: Any) -> None:
    method = {"name": "fedper", "aggregator": aggregator}
    made = setup(images(), method=method, model=DEEP, holdout=0.2, protection=protection)
    size, seen = bytes_of({name: made.weights()[name] for name in BODY}), Seen()

    state, (record,) = run(RoundLoop(made, LoopEngine(made), [seen]), 1)

    assert seen.names == [*BODY]
    assert record["bytes_up"] == record["bytes_down"] == {"weights": 2 * size}
    assert [*state.weights] == [*BODY, *HEAD]
    assert torch.equal(state.weights[HEAD[0]], made.weights()[HEAD[0]])


def test_terms_that_send_something_send_nothing_of_own_layers() -> None:
    method = {"name": "scaffold", "personal": "fedper"}
    made, seen = setup(images(), method=method, model=DEEP, holdout=0.2), Seen()
    state, _ = run(RoundLoop(made, LoopEngine(made), [seen]), 1)
    assert {name.removeprefix("terms.0/") for name in seen.extras} == {*BODY}
    assert state.server_part("terms.0").keys() == {*BODY}


@pytest.mark.parametrize("method", ["fedper", {"name": "ditto", "personal": {"lambda": 0.0}}], ids=["layers", "models"])
def test_each_client_is_tested_and_validated_with_its_own_layers_or_model(method: Any) -> None:
    settings: dict[str, Any] = {"holdout": 0.3, "validation": {"clients": 0.2}, "metrics": ["f1", "ece"]}
    made = setup(images(), method=method, model=DEEP, evaluate_model="each", **settings)
    loop = federation_of(made)

    state, records = run(loop, 2)

    of, record = made.population, records[-1]
    rights: dict[str, list[np.ndarray]] = {"holdout": [], "validation": []}
    for client in range(4):
        kept = state.client_states.get(client, ClientState())
        for split, found in rights.items():
            scores = loop.engine.score({**state.weights, **(kept.personal or {}), **kept.layers}, split)
            found.append(scores.right[of.owners(split) == client])
    assert record["clients"]["mean"] == pytest.approx(np.mean([right.mean() for right in rights["holdout"]]))
    assert record["accuracy"] == pytest.approx(np.concatenate(rights["holdout"]).mean())
    validated = record["validation"]["clients"]["accuracy"]
    assert validated == pytest.approx(np.concatenate(rights["validation"]).mean())
    assert len(record["per_class"]) == 3
    assert set(record["metrics"]) == set(record["client_metrics"]) == {"f1", "ece"}
    assert record["client_metrics"]["f1"]["tested"] == 4


def test_fedbn_keeps_weights_and_statistics_of_normalisation_layers() -> None:
    made = setup(images(), method="fedbn", model=BATCH_NORM, holdout=0.2, train={"batch_size": 3})
    norm = [name for name in made.weights() if name.startswith("norm.")]

    state, records = run(made, 2)

    first = made.weights()
    assert len(norm) == 5
    assert made.own_layers == set(norm)
    assert all(torch.equal(state.weights[name], first[name]) for name in norm)
    for kept in state.client_states.values():
        assert kept.layers.keys() == set(norm)
        assert not torch.equal(kept.layers["norm.running_mean"], first["norm.running_mean"])
    assert records[0]["bytes_up"]["weights"] == 2 * bytes_of({n: first[n] for n in ("last.weight", "last.bias")})


def test_fedbn_keeps_group_norms() -> None:
    model = {"name": "cnn", "channels": [4, 4], "norm": "group", "groups": 2}
    made = setup(images(side=8), method="fedbn", model=model, holdout=0.2)
    assert made.own_layers
    assert {made.weights()[name].dim() for name in made.own_layers} == {1}


STEPS: list[dict[str, Any]] = [{}, {"clip_norm": 0.1, "momentum": 0.9}, {"optimizer": "adam", "clip_norm": 0.1}]


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
@pytest.mark.parametrize("train", slow_after_first([*STEPS, {"accumulate": 2}]))
def test_without_own_layers_fedrep_is_fedavg(train: dict[str, Any], engine: type[LoopEngine]) -> None:
    methods = ({"name": "fedrep", "personal": {"layers": 0}}, "fedavg")
    both = [setup(images(), method=method, model=DEEP, holdout=0.2, train=train) for method in methods]
    made, wanted = (run(RoundLoop(of, engine(of)), 2)[0].weights for of in both)
    assert same(made, wanted)


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
@pytest.mark.parametrize(("personal", "optimizer"), [("fedper", {"momentum": 0.9}), ("fedrep", {"optimizer": "adam"})])
def test_optimisers_keep_what_they_have_of_own_layers(personal: str, optimizer: Any, engine: type[LoopEngine]) -> None:
    train = {"cohort": 4, "optimizer_state": "keep", **optimizer}
    made = setup(method={"personal": personal}, model=DEEP, holdout=0.2, train=train)
    state, _ = run(RoundLoop(made, engine(made)), 2)
    kept = [tensor for name, tensor in state.client_states[0].optimizer.items() if name.endswith(HEAD)]
    assert kept
    assert all(tensor.any() for tensor in kept)
