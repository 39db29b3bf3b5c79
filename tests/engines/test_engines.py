"""Engines agree: the same experiment gives the same weights, whichever engine computes it (contract 1)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import (
    RAGGED,
    examples,
    federation,
    images,
    needs_of,
    numbers,
    run,
    same,
    setup,
    slow_after_first,
    slow_except,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedblend import engines
from fedblend._kernels import build, lowrank
from fedblend._kernels.kernel_layers import own_layers, own_ways
from fedblend._kernels.operators import Convolution, MaxPool
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.objective import Plain
from fedblend.core.record import EngineChoice, RoundRecord
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.core.trees import Tensors
from fedblend.engines.autotune import MEMORY_SHARE, EnginePlan, unstackable
from fedblend.engines.distributed.distributed_engine import balance
from fedblend.engines.loop_engine import LoopEngine, score_batch
from fedblend.engines.stacked import engine as stacked_engine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.trials import faster_kernels, make_trial
from fedblend.experiment import presets

needs_kernels = pytest.mark.skipif(build.library() is None, reason=build.missing() or "no kernels")

LENET = {"model": "lenet5", "scale": "standard"}
MLP = {"model": {"name": "mlp", "hidden": [7, 5]}}
DROPOUT = {"model": {"name": "mlp", "hidden": [9, 9], "dropout": 0.4}}
LENET_METHODS = ["fedavg", "naivemix", "fedmix", "global-mixup", "fedmix-hidden", "fed-augmix"]
LENET_METHODS += ["fedprox+fedmix", "fedprox+fed-augmix"]
HARD = {"momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 0.5, "lr_decay": 0.9}


WITHOUT_JUMPS: dict[str, dict[str, Any]] = {
    "fed-augmix": {"objective": {"loss_scaling": False}},
    "ccvr": {"sharing": {"min_samples": 1}, "server_step": {"per_class": 50}},
    "server-matched": {"sharing": {"steps": 3}},
    "feddm": {"sharing": {"steps": 3}, "server_step": {"epochs": 2}},
    "moon": {"terms": [{"name": "moon", "mu": 0.1}]},
    "virtual-xor": {"sharing": {"server": 3}},
}
"""Options with which rounding stays rounding, so that engines can be compared on any processor.

Loss scaling multiplies a batch's divergence by 100 from a threshold on: rounding at the threshold becomes another step.
MOON's gradient is a difference of nearly equal unit vectors, times mu / (tau |z|): mu = 5 enlarges rounding. The
server of XOR-ed seeds must lack samples of a label, or it requests none.
"""


def ragged(method: Any = "fedavg", model: dict[str, Any] | None = None, **train: Any) -> Setup:
    """Six clients of different sizes, all in each round; two epochs of batches of four."""
    if isinstance(method, str):
        method = {"name": method, **WITHOUT_JUMPS.get(method.rpartition("+")[2], {})}
    side = 14 if (model or {}).get("model") == "lenet5" else 4
    settings = {"cohort": 6, "epochs": 2, "batch_size": 4, "lr": 0.05, **train}
    needs = {**(model or MLP), **needs_of(method.get("name", ""))}
    return setup(images(side=side), RAGGED, method=method, unsafe=True, train=settings, **needs)


def task_of(made: Setup, round: int = 0) -> TrainTask:
    return TrainTask(round, made.weights(), None, made.sizes(round))


def difference(a: Tensors, b: Tensors) -> float:
    """The largest relative difference of two sets of weights, tensor by tensor."""
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-12)) for n in b)


def after(made: Setup, engine: engines.Engine, rounds: int = 3) -> tuple[RunState, list[dict[str, Any]]]:
    return run(RoundLoop(made, engine), rounds)


def agree(made: Setup, engine: LoopEngine | None = None, bound: float = 1e-5, rounds: int = 3) -> None:
    """Assert that an engine, by default stacks of four clients, gives the loop's weights."""
    loop, _ = after(made, LoopEngine(made), rounds)
    other, _ = after(made, engine or StackedEngine(made, stack=4), rounds)
    assert difference(other.weights, loop.weights) < bound


@pytest.mark.slow
@pytest.mark.parametrize("method", [*presets.SINGLE, "fedprox+fedmix", "fedprox+fd"])
def test_stacked_gives_the_loops_weights_for_every_method_and_clients_of_any_size(method: str) -> None:
    made = ragged(method)

    loop, records = after(made, LoopEngine(made))
    stacked, stacked_records = after(made, StackedEngine(made, stack=4))

    assert difference(stacked.weights, loop.weights) < 1e-5
    for a, b in zip(stacked_records, records, strict=True):
        assert ("train_loss" in a) == ("train_loss" in b) == made.experiment.method.upload.trains
        if "train_loss" in a:
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert all(a.get(key) == b.get(key) for key in ("cohort", "bytes_up", "bytes_down"))


LOW_RANK = ["fedavg", "fedmix", "fedmix-hidden", "fedprox+fedmix", "fed-augmix", "fd", "fedprox+fd"]


@pytest.mark.parametrize("method", slow_except(["fedmix"], LOW_RANK))
@pytest.mark.parametrize("stack", slow_except([4], [1, 4]))
def test_large_layers_as_low_rank_updates_give_the_loops_weights(
    method: str, stack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowrank, "LEAST", 64 * 64)
    made = ragged(method, {"model": {"name": "mlp", "hidden": [64, 64]}})  # with room for 16 samples

    engine = StackedEngine(made, stack=stack)
    agree(made, engine)
    assert {place for program in engine.programs.values() for place in program.low_rank} == {2}


SECOND = {"name": "fedmix", "objective": {"remedy": "second"}}


@pytest.mark.slow
@pytest.mark.parametrize("method", [*LENET_METHODS, SECOND])
def test_stacked_gives_the_loops_weights_after_three_rounds_of_lenet(method: Any) -> None:
    made = ragged(method, LENET)
    agree(made, StackedEngine(made, stack=6), 1e-4)


@pytest.mark.parametrize("method", slow_except(["fedmix"], ["fedmix", "fedmix-hidden", "fedprox+localmix"]))
@pytest.mark.parametrize("stack", slow_except([2], [1, 2, 5]))
def test_momentum_decay_and_clipping_are_each_clients_own(method: str, stack: int) -> None:
    made = ragged(method, **HARD)
    agree(made, StackedEngine(made, stack=stack))


PASSES = ["fedmix", "fed-augmix", SECOND, "virtual-means", "flea", "moon", "fedntd", "pfedme"]


@pytest.mark.parametrize("method", slow_after_first(PASSES))
def test_each_pass_draws_the_loops_dropout_masks(method: Any) -> None:
    agree(ragged(method, DROPOUT))


@pytest.mark.parametrize("method", slow_after_first(["localmix", "fedmix", "fedprox+localmix"]))
def test_short_batches_taken_together_leave_out_what_was_drawn_for_a_longer_one(method: str) -> None:
    has_pool = [list(range(0, 9)), list(range(9, 15)), list(range(15, 21))]
    agree(setup(images(side=4), has_pool, method=method, train={"cohort": 3, "epochs": 4, "batch_size": 4}, **MLP))


@pytest.mark.parametrize("model", [LENET, {"model": {"name": "module", "path": "helpers:RowsLSTM"}}, DROPOUT])
def test_stacked_scores_as_the_loop_does_whatever_the_weights(model: dict[str, Any]) -> None:
    made = ragged("fedavg", model)
    loop, stacked = LoopEngine(made), StackedEngine(made, stack=2)
    first = made.weights()
    for weights in (first, {name: tensor * 1.5 for name, tensor in first.items()}):
        wanted, scores = loop.score(weights), stacked.score(weights)
        np.testing.assert_allclose(scores.loss, wanted.loss, rtol=1e-5)
        assert np.array_equal(scores.right, wanted.right)
    # Weights from another rank may be in any order; the order makes no further program.
    made_before = len(stacked.forwards)
    again = stacked.score(dict(reversed(list(weights.items()))))
    assert np.array_equal(again.loss, scores.loss)
    assert len(stacked.forwards) == made_before


@pytest.mark.slow
def test_regression_and_text_models_stack_too() -> None:
    fields = {"train": {"cohort": 4, "epochs": 2, "batch_size": 4}}
    agree(setup(numbers(), method="fedmix", model={"name": "mlp", "hidden": [4]}, scale="standard", **fields))
    agree(setup(images(side=4), method="fedavg", model={"name": "module", "path": "helpers:RowsLSTM"}, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [LoopEngine, partial(StackedEngine, stack=3)])
def test_fedmix_trains_fused_attention_as_attention_that_is_not_fused(engine: Any) -> None:
    def trained(fused: bool) -> dict[str, torch.Tensor]:
        model = {"name": "module", "path": "own_models:Attentive", "arguments": {"fused": fused}}
        made = setup(images(side=8), method="fedmix", train={"cohort": 3, "batch_size": 4}, model=model)
        return after(made, engine(made))[0].weights

    assert difference(trained(fused=True), trained(fused=False)) < 1e-5


def test_clients_of_one_stack_do_not_change_each_other() -> None:
    made = ragged("fedavg")
    task = task_of(made)
    alone = {t.client: t for t in StackedEngine(made, stack=1).train(task, range(6))}
    for trained in StackedEngine(made, stack=6).train(task, [4, 0, 5, 3, 1, 2]):
        assert difference(trained.weights, alone[trained.client].weights) < 1e-6
        assert trained.samples == alone[trained.client].samples


def test_a_client_that_diverges_does_not_change_others_of_its_stack() -> None:
    made = ragged("fedavg", lr=0.05)
    poisoned = made.data.train.x.clone().float()
    poisoned[34:] = torch.inf  # the samples of the last client
    data = replace(made.data, train=replace(made.data.train, x=poisoned))
    task = task_of(made)
    clean = {t.client: t.weights for t in StackedEngine(made, stack=6).train(task, range(6))}

    for trained in StackedEngine(replace(made, data=data), stack=6).train(task, range(6)):
        finite = all(bool(t.isfinite().all()) for t in trained.weights.values())
        assert finite == (trained.client != 5)
        if finite:
            assert difference(trained.weights, clean[trained.client]) < 1e-6


@pytest.mark.parametrize("large", slow_after_first(range(34, 40)))
def test_an_inactive_client_is_not_changed_by_its_overflowing_gradient(large: int) -> None:
    # A step on this one sample makes the weights so large that gradients of other samples overflow.
    made = ragged("fedavg", epochs=1)
    x = made.data.train.x.clone().float()
    x[34:] = 0.0
    x[large] = 1e18
    made = replace(made, data=replace(made.data, train=replace(made.data.train, x=x)))
    task, order = task_of(made), [5, 4, 3, 2, 1, 0]
    loop = next(LoopEngine(made).train(task, order)).weights
    stacked = next(StackedEngine(made, stack=6).train(task, order)).weights

    for name, tensor in loop.items():
        torch.testing.assert_close(stacked[name], tensor, rtol=1e-4, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("held_bytes", slow_except([1 << 30], [1, 1 << 30]))
def test_results_keep_the_order_of_the_clients(held_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_engine, "HELD_BYTES", held_bytes)
    made = ragged("local-means")
    fed = RoundLoop(made, StackedEngine(made, stack=2))
    start = fed.start()[0]
    state = fed.exchange.share_if_due(start, made.sizes(0))[0]
    task = TrainTask(0, state.weights, fed.exchange.pool_of(state), made.sizes(0))

    order = [5, 1, 3, 0, 5, 4, 2]  # a trial may train a client twice

    assert [t.client for t in fed.engine.train(task, order)] == order


@pytest.mark.slow
def test_a_stacked_run_gives_the_same_bits_again() -> None:
    made = ragged("fedmix", LENET)
    first, _ = after(made, StackedEngine(made, stack=3))
    again, _ = after(made, StackedEngine(made, stack=3))
    assert same(first.weights, again.weights)


class WritesBuffer(nn.Linear):
    """A model that writes into its own tensor, and so cannot be stacked."""

    def __init__(self) -> None:
        super().__init__(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(len(x), 16)
        buffer += x.flatten(1)
        return super().forward(buffer)


@pytest.mark.usefixtures("all_timed")
@pytest.mark.parametrize(
    ("path", "reason"), [("helpers:BatchNormNet", "batch norm"), ("test_engines:WritesBuffer", "cannot stack")]
)
def test_a_model_that_cannot_be_stacked_trains_in_the_loop_and_is_refused_elsewhere(path: str, reason: str) -> None:
    model = {"name": "module", "path": path}
    made = setup(model=model, engine="stacked")
    assert reason in unstackable(made)
    with pytest.raises(FedblendError, match="engine: 'stacked' cannot be used here"):
        engines.make(made, engines.plan_engine(made, 1, 10))
    assert engines.plan_engine(setup(model=model), 2, 10).engine == "loop"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"batch_size": 1}}, "batch norm cannot be trained on a batch of one sample"),
        ({"method": "pfedme", "holdout": 0.2}, "batch norm changes its running statistics in each pass"),
    ],
)
def test_batch_norm_where_it_cannot_be_trained_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FedblendError, match=message):
        run(federation(model={"name": "module", "path": "helpers:BatchNormNet"}, **changes), 1)


@pytest.mark.usefixtures("all_timed")
@pytest.mark.parametrize(("seconds", "engine"), [({1: 1.0, 2: 0.97}, "loop"), ({1: 1.0, 2: 0.5}, "stacked")])
def test_auto_chooses_a_clearly_faster_engine_and_states_why(
    seconds: dict[int, float], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(engine: LoopEngine, clients: int, **more: Any) -> float:
        return seconds.get(clients, 1.0)

    monkeypatch.setattr("fedblend.engines.autotune.seconds_per_step", measured)
    timed: list[str] = []
    plan = engines.plan_engine(setup(train={"cohort": 4}), 2, 1000, lambda *step: timed.append(step[0]))

    assert timed == [f"timing engines: {name}" for name in ("2 stacked without kernels", "1 stacked", "loop")]
    assert plan.engine == engine
    assert plan.ranks == 2
    assert "2 stacked" in plan.why


def timed_once_and_again(
    first: dict[tuple[str, ...], float], again: dict[tuple[str, ...], float]
) -> Callable[[LoopEngine, int], float]:
    """A stand-in for timing: seconds by engine and the layers in kernels, at the first time and at later ones."""
    times: dict[tuple[str, ...], int] = {}

    def measured(engine: LoopEngine, clients: int, **more: Any) -> float:
        own = (Convolution, MaxPool)
        layers = [n for n, m in engine.stacked.named_modules() if isinstance(m, own)] if clients > 1 else ["loop"]  # type: ignore[attr-defined]
        key = (str(clients), *layers)
        times[key] = times.get(key, 0) + 1
        return first.get(key, 1.0) if times[key] == 1 else again.get(key, 1.0)

    return measured


@needs_kernels
@pytest.mark.usefixtures("all_timed")
@pytest.mark.parametrize(
    ("first", "again", "kernels"),
    [
        ({("3", "stages.0.0"): 0.6, ("3",): 0.7}, {}, {"stages.0.0": "direct"}),
        ({("3", "stages.0.0"): 0.7, ("3",): 0.6}, {}, {}),
        ({("3", "stages.0.0"): 0.6, ("3",): 0.7}, {("1", "loop"): 0.5}, None),
    ],
    ids=["kernels are faster", "PyTorch is faster", "the loop is faster when it is timed again"],
)
def test_auto_chooses_kernels_or_pytorch_by_layer_and_confirms_the_choice(
    first: dict[tuple[str, ...], float],
    again: dict[tuple[str, ...], float],
    kernels: dict[str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first convolution's kernel takes half of PyTorch's time, every other layer's takes twice as long.
    layers = iter([[1.0, 0.5], *[[1.0, 2.0]] * 100])
    monkeypatch.setattr("fedblend.engines.trials._seconds_in_turn", lambda calls, device: next(layers))
    monkeypatch.setattr("fedblend.engines.autotune.TIMED_CLIENTS", 1)
    monkeypatch.setattr("fedblend.engines.autotune.seconds_per_step", timed_once_and_again(first, again))
    made = ragged("fedavg", LENET)

    plan = engines.plan_engine(made, 2, 1000)

    assert plan.kernels == kernels
    assert plan.engine == ("loop" if kernels is None else "stacked")
    assert kernels is None or "3 stacked without kernels" in plan.why
    engine = engines.inner_engine(made, json.loads(json.dumps(plan.table())))
    if isinstance(engine, StackedEngine):
        own = {n for n, m in engine.stacked.named_modules() if isinstance(m, Convolution | MaxPool)}
        assert own == set(kernels or ())


@pytest.mark.slow
@needs_kernels
def test_layers_are_timed_on_the_shapes_of_a_batch() -> None:
    made = ragged("fedavg", LENET)
    chosen = faster_kernels(made, 2)

    assert chosen is not None
    assert set(chosen) <= {"stages.0.0", "stages.0.2", "stages.1.0", "stages.1.2"}
    for kernels in (chosen, {}, {"stages.1.0": "direct"}):
        agree(made, StackedEngine(made, stack=4, kernels=kernels), 1e-4, rounds=1)


@needs_kernels
@pytest.mark.parametrize("method", slow_except(["fedavg"], ["fedavg", "fedmix"]))
@pytest.mark.parametrize("way", slow_after_first(["winograd", "winograd-4x4"]))
def test_winograds_layers_give_the_loops_weights(way: str, method: str) -> None:
    made = ragged(method, {"model": {"name": "cnn", "channels": [16, 20]}})
    layers = dict(made.model.named_modules())
    kernels = {name: way if way in own_ways(layers[name]) else "direct" for name in own_layers(made.model)}

    assert way in kernels.values()
    agree(made, StackedEngine(made, stack=4, kernels=kernels), 1e-4, rounds=1)


def test_auto_times_a_few_steps_however_many_a_client_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    step = LoopEngine._step

    def counted(engine: LoopEngine, *given: Any) -> Any:
        made.append(1)
        return step(engine, *given)

    monkeypatch.setattr(LoopEngine, "_step", counted)
    engines.plan_engine(ragged("fedavg", epochs=500), 1, 1)

    assert 1 <= len(made) <= 200


def test_nothing_is_timed_where_no_client_trains_or_the_engine_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedblend.engines.autotune.seconds_per_step", lambda *_: 1 / 0)
    for made, stack, why in (
        (ragged("xormixfl"), 1, "no client trains"),
        (setup(engine="stacked", stack=3), 3, "as asked for"),
    ):
        assert engines.plan_engine(made, 2, 1000) == EnginePlan("stacked", stack, 1, "contiguous", why)


POOLS = ["virtual-xor", "vhl", {"objective": "naivemix", "sharing": "secure-means"}]
POOLS += [{"objective": "virtual-samples", "sharing": {"name": "mixed-target-seeds", "server": 3}}]


@pytest.mark.parametrize("method", POOLS)
def test_a_trial_has_the_pool_that_clients_receive(method: Any) -> None:
    made = ragged(method)
    pool = make_trial(LoopEngine(made), 2, batches=1)[0].pool
    assert pool is not None
    assert len(pool)
    assert made.experiment.method.sharing.server not in pool.owner
    assert unstackable(made) == ""


@pytest.mark.parametrize(
    ("ranks", "room", "stack"), slow_except([], [(1, 2.5, 2), (2, 2.5, 1), (1, 100.0, 6), (1, 0.5, 1)])
)
def test_a_cohort_larger_than_memory_is_cut_by_the_measured_memory_of_a_step(
    ranks: int, room: float, stack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ragged("fedmix", {**MLP, "engine": "stacked", "ranks": ranks})
    one = StackedEngine(made, stack=1)
    wanted, _ = after(made, one, 1)
    free = int(room * one.step_bytes() / MEMORY_SHARE)
    monkeypatch.setattr("fedblend.engines.autotune.free_memory", lambda device: free)

    planned = engines.plan_engine(made, 2, 1000).stack
    engine = StackedEngine(made, stack=planned)
    in_stacks, _ = after(made, engine, 1)

    assert planned == stack
    assert difference(in_stacks.weights, wanted.weights) < 1e-5
    # The estimate from one client holds for the whole stack.
    assert stack == 1 or ranks * engine.step_bytes() <= MEMORY_SHARE * free


def test_a_choice_is_remembered_for_runs_that_allow_no_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []

    def measured(engine: LoopEngine, clients: int, batches: int = 3, **more: Any) -> float:
        seconds.append(1.0 if batches == 1 else 1.0 / clients)
        return seconds[-1]

    monkeypatch.setattr("fedblend.engines.autotune.seconds_per_step", measured)
    monkeypatch.setattr("fedblend.engines.autotune._plan_file", lambda made, ranks: tmp_path / "new" / f"{ranks}.json")
    made = setup(train={"cohort": 4})
    counts = []
    for rounds in (1000, 1000, 1500, 10_000, 1):
        seconds.clear()
        plan = engines.plan_engine(made, 2, rounds)
        counts.append(len(seconds))

    assert (plan.engine, plan.stack) == ("stacked", 2)
    assert counts == [counts[0], 1, 1, counts[0], 1]
    assert counts[0] > 2
    (tmp_path / "new" / "2.json").write_text("{", encoding="utf-8")
    assert engines.plan_engine(made, 2, 1000).engine == "stacked"


def test_what_cannot_be_timed_within_its_share_of_a_run_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedblend.engines.autotune._plan_file", lambda *_: Path(os.devnull, "none"))
    monkeypatch.setattr("fedblend.engines.autotune.seconds_per_step", lambda *_, **more: 20.0)
    timed: list[str] = []

    # One client with 20 s a step: a round of some minutes, of which a twentieth is no step.
    plan = engines.plan_engine(setup(train={"cohort": 1}), 2, 1, lambda *step: timed.append(step[0]))

    assert (timed, plan.engine, plan.ranks) == ([], "loop", 1)


def test_an_exception_names_clients_round_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "loss", lambda *_: 1 / 0)
    made = setup(train={"cohort": 2})
    task = task_of(made, 4)
    with pytest.raises(ZeroDivisionError) as caught:
        list(StackedEngine(made).train(task, [2, 0]))
    assert caught.value.__notes__ == ["while training clients 2, 0 in round 5, batch 1"]


@pytest.mark.slow
def test_channels_last_changes_no_result() -> None:
    made = ragged("fedmix", LENET)
    plain, _ = after(made, LoopEngine(made))
    other, _ = after(made, LoopEngine(made, memory_format="channels_last"))
    assert difference(other.weights, plain.weights) < 1e-4
    assert all(tensor.is_contiguous() for tensor in other.weights.values())


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))
@examples(30)
def test_balance_gives_each_rank_its_share_of_the_work(work: list[int], ranks: int) -> None:
    shares = balance(work, ranks)
    load = np.bincount(shares, weights=work, minlength=ranks) if work else np.zeros(ranks)
    assert len(shares) == len(work)
    # Graham's bound: no rank has more than the mean plus one piece of work.
    assert load.max(initial=0) <= sum(work) / ranks + max(work, default=0)


class Viewing(nn.Module):
    """A model that fails on a batch without samples, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.view(x.size(0), -1)).tanh())


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
def test_no_model_is_called_without_samples(engine: type[LoopEngine]) -> None:
    made = setup(
        model={"name": "module", "path": "test_engines:Viewing"},
        method="fedper",
        holdout=0.3,
        validation={"server": 0.05},
        metrics=["auc"],
        train={"cohort": 4},
    )
    state, records = after(made, engine(made), 1)

    assert len(state.client_states) == 4, "all clients have models of their own"
    assert records[-1]["clients"]["tested"] == 4
    parts = [engine(made).score(made.weights(), "server", (rank, 3)) for rank in range(3)]
    assert [len(part.samples) for part in parts] == [1, 1, 0]
    assert all(part.right is not None and len(part.right) == len(part.samples) for part in parts)
    assert all(part.outputs is not None and part.outputs.shape == (len(part.samples), 3) for part in parts)


def test_large_pictures_are_scored_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [score_batch(torch.empty(0, *shape)) for shape in ((28, 28), (3, 32, 32), (3, 224, 224), (10**7,))] == [
        500, 500, 10, 1,
    ]  # fmt: skip
    made = setup(images(side=6))
    at_once = LoopEngine(made).score(made.weights())
    monkeypatch.setattr("fedblend.engines.loop_engine.SCORE_NUMBERS", 5 * 36)

    few = LoopEngine(made).score(made.weights())

    assert score_batch(made.data.test.x) == 5 < len(made.data.test)
    np.testing.assert_allclose(few.loss, at_once.loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedmix"])
def test_bfloat16_is_near_float32_in_both_engines(method: str) -> None:
    exact, rounded = ragged(method, LENET), ragged(method, {**LENET, "precision": "bfloat16"})
    assert rounded.experiment.precision == "bfloat16"
    wanted, _ = after(exact, LoopEngine(exact), 1)

    for engine in (LoopEngine(rounded), StackedEngine(rounded, stack=4)):
        state, _ = after(rounded, engine, 1)
        assert 0 < difference(state.weights, wanted.weights) < 0.05
        assert all(tensor.dtype == torch.float32 for tensor in state.weights.values())


def test_the_record_of_a_run_takes_every_engine_plan() -> None:
    for kernels in (None, {"stages.0.0": "direct", "stages.0.2": "winograd"}):
        plan = EnginePlan("stacked", 5, 2, "contiguous", "timed", kernels)
        line = RoundRecord(0, machine={"engine": cast(EngineChoice, plan.table())}).as_dict()
        assert RoundRecord.from_dict(json.loads(json.dumps(line))).as_dict() == line
