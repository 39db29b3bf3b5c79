"""What holds for every run: its parts in order, its model's buffers, its state, its resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import BATCH_NORM, DROPOUT, train, with_parts
from helpers import (
    BatchNormNet,
    each,
    engine_of,
    federation,
    federation_of,
    images,
    run,
    same,
    same_state,
    setup,
    slow_except,
    without_machine,
)

from fedblend.core.aggregator import Aggregator
from fedblend.core.channel import Channel
from fedblend.core.errors import FedblendError
from fedblend.core.protection import Protection
from fedblend.core.random import stream
from fedblend.core.server_step import ServerContext, ServerStep
from fedblend.core.state import RunState
from fedblend.core.trees import bytes_of
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.channels import Ideal
from fedblend.methods.protections import NoProtection
from fedblend.runs import checkpoint

# Parts that do nothing, and channels that lose ------------------------------------------------------------


def test_none_and_ideal_are_the_identity() -> None:
    weights, start = {"w": torch.randn(3)}, {"w": torch.zeros(3)}

    protected = NoProtection().protect(weights, start, 0.1, np.random.default_rng(0))
    arrives = Ideal().delivers("up", np.array([1, 10**12]), np.random.default_rng(0))

    assert protected["w"] is weights["w"]
    assert arrives.tolist() == [True, True]


class Loses(Channel):
    """A channel that loses one client's transmissions in one direction."""

    def __init__(self, direction: str, place: int) -> None:
        self.direction, self.place, self.sizes = direction, place, {}

    def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        self.sizes[direction] = sizes.tolist()
        return (np.arange(len(sizes)) != self.place) | (direction != self.direction)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_what_a_channel_loses_is_left_out(direction: str) -> None:
    # What is shared before training would be lost on its way up as well.
    made = setup(train={"cohort": 4}, method="fedmix" if direction == "down" else "fedavg")
    channel = Loses(direction, 2)

    state, records = run(with_parts(made, channel=channel), 1)

    good = train(made, [0, 1, 3])
    assert same(state.weights, WeightedMean().aggregate((t.weights, float(t.samples)) for t in good.values()))
    assert records[0]["uploads"] == 3
    assert state.has_pool.tolist() == [True, True, direction == "up", True]
    weights, means = bytes_of(state.weights), bytes_of(state.entries.tensors)
    assert channel.sizes["down"] == [weights + means] * 4
    assert records[0]["bytes_up"]["weights"] == (4 if direction == "up" else 3) * weights


def test_a_client_that_misses_the_model_shares_no_hidden_means() -> None:
    layer = {"layer": 1}
    method = {"name": "naivemix-hidden", "objective": layer, "sharing": layer}
    made = setup(train={"cohort": 4}, method=method, rounds=1)
    model = bytes_of(made.weights())

    class LosesModels(Channel):
        def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            lost = (np.arange(len(sizes)) == 2) & (sizes == model) & (direction == "down")
            return ~lost

    state, records = run(with_parts(made, channel=LosesModels()), 1)

    assert records[0]["shared"]["lost"] == [2]
    assert (records[0]["shared"]["asked"], records[0]["shared"]["sent"]) == (4, 3)
    assert 2 not in state.entries.owner
    # The others have the model already; the third client gets it with the pool.
    assert records[0]["bytes_down"]["weights"] == (4 + 1) * model
    assert records[0]["uploads"] == 4


def test_protection_aggregator_and_server_step_are_used_in_this_order() -> None:
    class Shift(Protection):
        def protect(self, upload: Any, start: Any, lr: float, rng: Any) -> dict[str, torch.Tensor]:
            drawn.append(rng.random())
            return {n: start[n] + 1 for n in upload}

    class First(Aggregator):
        def aggregate(self, uploads: Any) -> dict[str, torch.Tensor]:
            first, *_ = [tensors for tensors, _ in uploads]
            return {n: t * 2 for n, t in first.items()}

    class Add(ServerStep):
        def refine(
            self, weights: Any, server: ServerContext
        ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            return {n: t + 3 for n, t in weights.items()}, {"seen": torch.tensor(server.round)}

    made, drawn = setup(), []

    state, records = run(with_parts(made, protection=Shift(), aggregator=First(), server_step=Add()), 1)

    assert same(state.weights, {n: (t + 1) * 2 + 3 for n, t in made.weights().items()})
    assert state.server_part("server_step") == {"seen": torch.tensor(0)}
    expected = [stream(0, "protection", 0, client).random() for client in records[0]["cohort"]]
    assert drawn == expected


# Models with buffers or masks -----------------------------------------------------------------------------


def test_batch_norms_buffers_are_averaged() -> None:
    made = setup(groups=[range(8), range(8, 20)], model=BATCH_NORM)

    state, _ = run(federation_of(made), 1)

    uploads = train(made, [0, 1])
    for name in ("norm.running_mean", "norm.running_var"):
        expected = (8 * uploads[0].weights[name].double() + 12 * uploads[1].weights[name].double()) / 20
        torch.testing.assert_close(state.weights[name], expected.float())
        assert not torch.equal(state.weights[name], made.weights()[name])
    # Batches of 4: two for the first client, three for the second, (8 * 2 + 12 * 3) / 20 = 2.6.
    counter = state.weights["norm.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.item() == 3


def test_each_client_starts_from_the_rounds_buffers() -> None:
    made = setup(model=BATCH_NORM)
    uploads = train(made, range(4))
    assert [uploads[k].weights["norm.num_batches_tracked"].item() for k in range(4)] == [3, 3, 3, 3]
    assert isinstance(made.model, BatchNormNet)


def test_scoring_changes_no_buffer() -> None:
    made = setup(model=BATCH_NORM)
    engine, weights = engine_of(made), made.weights()
    first, again = engine.score(weights), engine.score(weights)
    assert same(weights, {n: t.detach() for n, t in made.model.state_dict().items()})
    assert np.array_equal(first.loss, again.loss)


def test_scoring_uses_no_dropout() -> None:
    made = setup(model=DROPOUT)
    scores = engine_of(made).score(made.weights())
    outputs = made.model.eval()(made.scale(made.data.test.x))
    expected = torch.nn.functional.cross_entropy(outputs, made.data.test.y, reduction="none")
    np.testing.assert_allclose(scores.loss, expected.detach().numpy(), rtol=1e-5)


def test_a_round_leaves_the_state_it_began_with_alone() -> None:
    fed = federation(method="fedmix", model=BATCH_NORM)
    before, _ = run(fed, 1)
    copy = RunState(
        before.round,
        {n: t.clone() for n, t in before.weights.items()},
        before.has_pool.copy(),
        before.shared_sizes.copy(),
        replace(before.entries, tensors={n: t.clone() for n, t in before.entries.tensors.items()}),
        before.shared_round,
    )

    run(fed, 2, before)

    assert same_state(before, copy)


# Resumption -----------------------------------------------------------------------------------------------

RESUMED = {
    "fedavg": {},
    "fedmix": {"method": "fedmix"},
    "dropout": {"model": DROPOUT, "method": "naivemix"},
    "batch norm": {"model": BATCH_NORM},
    "local means": {"method": "local-means"},
    "hidden": {"method": "fedprox+fedmix-hidden", "model": {"name": "mlp", "hidden": [8, 6, 5]}},
    "raw": {"method": "global-mixup", "unsafe": True},
    "server average": {"method": {"name": "fedmix", "sharing": {"server_average": 2}}},
    "secure means": {"method": {"name": "fedmix", "sharing": "secure-means"}},
    "arrival": {
        "method": {"name": "fedmix", "sharing": {"refresh": 0.0}},
        "arrival": {"first": 0.3, "clients": 0.6, "portion": 0.2},
    },
}


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("at", slow_except([1], [0, 1, 2]))
def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(case: str, at: int, tmp_path: Path) -> None:
    whole, records = run(federation(**RESUMED[case]), 4)
    before, _ = run(federation(**RESUMED[case]), at)
    checkpoint.write(tmp_path, before)

    read = checkpoint.read(tmp_path)
    after, later = run(federation(**RESUMED[case]), 4 - at, read)

    assert same_state(read, before)
    assert same_state(after, whole)
    assert without_machine(later) == without_machine(records[at:])


def test_a_folder_without_checkpoint_gives_none(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path) is None


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, run(federation(), 1)[0])
    path = tmp_path / checkpoint.NAME
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FedblendError, match="damaged"):
        checkpoint.read(tmp_path)


TIED = {"model": {"name": "module", "path": "own_models:Tied"}}
STILL = {"name": "fedavgm", "server_step": {"name": "fedavgm", "lr": 1e-12}}


@each("method", ["fednova", "feddyn", "fedavgm", "fedadam", "moon", "fedntd"])
def test_a_tensor_that_layers_share_has_one_value(method: str) -> None:
    state, _ = run(federation(images(side=8), method=method, **TIED), 2)
    assert torch.equal(state.weights["second.weight"], state.weights["third.weight"])


def test_a_server_step_moves_a_tensor_that_layers_share_once() -> None:
    fed = federation(images(side=8), method=STILL, **TIED)
    state, _ = run(fed, 1)
    for name, first in fed.setup.weights().items():
        torch.testing.assert_close(state.weights[name], first, rtol=0, atol=1e-9)


def test_no_part_of_a_shared_tensor_stays_at_clients() -> None:
    with pytest.raises(FedblendError, match=r"keeps one of 'second\.weight' and 'third\.weight' at clients"):
        federation(images(side=8), method={"name": "fedper", "personal": {"layers": 1}}, holdout=0.2, **TIED)


@pytest.mark.parametrize("side", ["client", "server"])
def test_noise_does_not_move_what_is_not_trained(side: str) -> None:
    noise = {"name": "noise", "clip": 1.0, "multiplier": 0.5, "side": side}
    frozen = {"model": {"name": "module", "path": "own_models:Frozen"}}
    method = {"name": "fedavg", "aggregator": {"name": "mean", "by": "clients"}}
    fed = federation(images(side=8), method=method, protection=noise, **frozen)
    state, _ = run(fed, 1)
    for name, first in fed.setup.weights().items():
        assert torch.equal(state.weights[name], first) == name.startswith("first.")


def test_the_change_of_a_model_is_that_of_its_trained_weights() -> None:
    fed = federation(model=BATCH_NORM, convergence_tol=1e-3, train={"lr": 1e-9})
    _, records = run(fed, 1)
    assert records[0]["change"] < 1e-6
    assert records[0]["converged"]


@pytest.mark.parametrize(
    "changes",
    [{"method": "scaffold"}, {"protection": {"name": "noise", "on": "gradients", "clip": 1.0, "multiplier": 1.0}}],
    ids=["scaffold", "noise on gradients"],
)
def test_a_round_without_a_learning_rate_changes_nothing(changes: dict[str, Any]) -> None:
    still = {"schedule": {"name": "cosine", "length": 1}}
    state, records = run(federation(train=still, **changes), 2)
    after_one, _ = run(federation(train=still, **changes), 1)
    assert records[1]["uploads"]
    for name, weight in after_one.weights.items():
        torch.testing.assert_close(state.weights[name], weight, rtol=0, atol=0)
