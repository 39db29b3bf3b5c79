"""Optimisers, schedules and accumulation of gradients: equal to torch.optim's, the same in all engines, and resumed."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    NoRecorder,
    each,
    engine_of,
    examples,
    federation_of,
    images,
    run,
    same,
    same_up_to_rounding,
    setup,
    slow_except,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import fedblend
from fedblend.core.engine import TrainTask, first_client_state
from fedblend.core.errors import FedblendError
from fedblend.core.registry import build
from fedblend.core.setup import Setup, cohort_of, model_spec
from fedblend.core.state import to_tensors
from fedblend.engines.adam import Adam, StackedAdam
from fedblend.engines.assignment import group_ends
from fedblend.engines.autotune import plan_engine, unstackable
from fedblend.engines.sgd import StackedSGD, clipped_by_client
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.config import as_table, resolve
from fedblend.experiment.fields import Train
from fedblend.runs import checkpoint
from fedblend.runs.runner import execute

EPS = 0.1
"""So large that a step of Adam does not turn the rounding error of a small gradient into a large step."""

ADAM = {"name": "adam", "eps": EPS, "beta1": 0.8, "beta2": 0.95}
ADAMW = {**ADAM, "name": "adamw"}
GROUPS = [range(0, 7), range(7, 11), range(11, 12), range(12, 21)]
"""7, 4, 1 and 9 samples: other numbers of steps, and smaller last batches."""

ALL = {
    "adam": {"optimizer": ADAM, "weight_decay": 0.1},
    "adamw": {"optimizer": ADAMW, "weight_decay": 0.1, "clip_norm": 0.5},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "in round": {"schedule_in_round": {"name": "cosine", "warmup": 2}},
    "adam in round": {"optimizer": ADAM, "schedule_in_round": {"name": "exponential", "gamma": 0.9}},
    "accumulate": {"accumulate": 3},
    "accumulate adamw": {"accumulate": 2, "optimizer": ADAMW, "clip_norm": 0.5, "weight_decay": 0.1},
    "accumulate in round": {"accumulate": 2, "momentum": 0.5, "schedule_in_round": {"name": "step", "every": 2}},
}


def of_torch(params: list[torch.Tensor], settings: Train) -> torch.optim.Optimizer:
    """The optimiser of ``torch.optim`` with the settings."""
    if settings.optimizer.steps == "sgd":
        return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=settings.weight_decay)
    kind = torch.optim.AdamW if settings.optimizer.decoupled else torch.optim.Adam
    return kind(params, lr=0.3, betas=(0.8, 0.95), eps=EPS, weight_decay=settings.weight_decay)


def step_of_torch(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], gradients: list[Any]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else gradient.clone()
    optimizer.step()


@each("train", [{"optimizer": ADAM}, {"optimizer": ADAMW}, {"momentum": 0.9}])
@each("decay", [0.0, 0.1])
def test_a_stack_steps_as_torch_does_for_each_client(train: dict[str, Any], decay: float) -> None:
    settings = Train(lr=0.3, weight_decay=decay, **train)
    stack, generator = 3, torch.Generator().manual_seed(0)
    start = [torch.randn(stack, *shape, generator=generator).double() for shape in ((4, 3), (5,))]
    params = [p.clone() for p in start]
    mine = (StackedSGD if settings.optimizer.steps == "sgd" else StackedAdam)(settings)
    mine.begin(0)
    state = [
        torch.zeros(stack) if key == "step" else torch.zeros_like(p) for key in settings.state_keys for p in params
    ]
    alone = [[p[k].clone().requires_grad_() for p in start] for k in range(stack)]
    wanted = [of_torch(ps, settings) for ps in alone]
    for step in range(7):
        # Client 1 misses every second step, and the second tensor is not used in step 3.
        active = torch.tensor([True, step % 2 == 0, True])
        grads = [torch.randn(p.shape, generator=generator).double() for p in params]
        used: list[Any] = [grads[0], None if step == 3 else grads[1]]
        mine.step(params, state, used, None if active.all() else active)
        for k in range(stack):
            if active[k]:
                step_of_torch(wanted[k], alone[k], [None if g is None else g[k] for g in used])
    for i, param in enumerate(params):
        torch.testing.assert_close(param, torch.stack([ps[i].detach() for ps in alone]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", [ADAM, ADAMW])
def test_one_client_steps_as_torch_does(optimizer: dict[str, Any]) -> None:
    settings = Train(lr=0.3, weight_decay=0.1, optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = ([torch.ones(4, 3), torch.ones(5)] for _ in range(2))
    wanted, ours = of_torch(theirs, settings), Adam(mine, settings, 0)
    for step in range(6):
        grads = [None if step == 2 else torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)]
        step_of_torch(wanted, theirs, grads)
        ours.step(grads)
        if step == 3:
            again = Adam(mine, settings, 0)
            again.load(ours.state())
            ours = again
    same_up_to_rounding(dict(enumerate(mine)), dict(enumerate(theirs)), 60)


def task_of(made: Setup) -> TrainTask:
    weights = made.weights()
    engine = engine_of(made)
    train = made.experiment.train
    spec = model_spec(made, engine.model)
    states = {k: first_client_state(made.experiment.method, train, spec, weights) for k in range(4)}
    return TrainTask(3, weights, None, made.sizes(0), client_states={k: s for k, s in states.items() if s})


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "torch.optim:RMSprop", "torch.optim:Adagrad"])
def test_the_loop_trains_as_torch_optim_does(optimizer: str) -> None:
    made = setup(images(40), train={"epochs": 2, "lr": 0.01, "optimizer": optimizer})
    engine, task = engine_of(made), task_of(made)
    (update,) = engine.train(task, [1])
    model, one = copy.deepcopy(made.model).train(), engine.assign(task, 1)
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(optimizer) or getattr(
        torch.optim, optimizer.partition(":")[2]
    )
    options = {"weight_decay": 0.0} if optimizer == "adamw" else {}
    theirs = cls(model.parameters(), lr=0.01, **options)
    x, y = made.samples(1, one.samples)
    for a, b in zip(one.bounds[:-1], one.bounds[1:], strict=True):
        rows = torch.from_numpy(one.order[a:b])
        theirs.zero_grad()
        made.task.loss(model(made.scale(x[rows])), y[rows]).backward()
        theirs.step()
    same_up_to_rounding(update.weights, {n: p.detach() for n, p in model.state_dict().items()}, 100)


@pytest.mark.parametrize(
    ("name", "keeps", "recorder"),
    [
        *((name, False, None) for name in ("momentum", "adam")),
        *(pytest.param(name, False, None, marks=pytest.mark.slow) for name in ALL if name not in ("momentum", "adam")),
        pytest.param("momentum", True, None, marks=pytest.mark.slow),
        ("adam", True, None),
        ("accumulate adamw", True, NoRecorder()),
        pytest.param("accumulate in round", False, NoRecorder(), marks=pytest.mark.slow),
    ],
)
def test_a_stack_trains_as_the_loop_does(name: str, keeps: bool, recorder: NoRecorder | None) -> None:
    train = {"epochs": 2, "batch_size": 3, "lr": 0.2, **ALL[name], "optimizer_state": "keep" if keeps else "reset"}
    made = setup(images(40), GROUPS, train=train)
    task = task_of(made)
    first = list(engine_of(made).train(task, range(4)))
    if keeps:
        # A second round, in which clients go on from other states.
        task = replace(task, round=4, client_states={one.client: one.state for one in first})
    wanted = list(engine_of(made).train(task, range(4)))
    steps = 10 * max(len(engine_of(made).assign(task, k).sizes) for k in range(4))
    stacked = StackedEngine(made, stack=3, recorder=recorder)
    for _ in range(2 if recorder else 1):
        updates = list(stacked.train(task, range(4)))
    for mine, theirs in zip(updates, wanted, strict=True):
        same_up_to_rounding(mine.weights, theirs.weights, steps)
        assert bool(mine.state) == keeps
        same_up_to_rounding(mine.state.to_tensors(), theirs.state.to_tensors(), 10 * steps)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_scalar_parameters_count_in_the_norm_that_clips() -> None:
    grads = [torch.tensor([3.0, 0.3]), torch.tensor([[4.0], [0.4]])]
    clipped = clipped_by_client(grads, 1.0)
    torch.testing.assert_close(clipped, [torch.tensor([0.6, 0.3]), torch.tensor([[0.8], [0.4]])])


def test_optimizers_that_only_the_loop_has_are_not_stacked() -> None:
    made = setup(train={"optimizer": {"name": "torch.optim:RMSprop", "alpha": 0.5}}, engine="stacked")
    assert "one of the loop engine's" in unstackable(made)
    assert plan_engine(setup(train={"optimizer": "torch.optim:RMSprop"}), 1, 2).engine == "loop"
    with pytest.raises(
        FedblendError, match=r"engine: 'stacked' cannot be used here: the optimizer 'torch\.optim:RMSprop'"
    ):
        fedblend.engines.make(made, plan_engine(made, 1, 2))


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_batches_are_one_large_batch(accumulate: int) -> None:
    few = setup(images(40), GROUPS, train={"epochs": 2, "batch_size": 3, "accumulate": accumulate, "momentum": 0.5})
    large = setup(images(40), GROUPS, train={"epochs": 2, "batch_size": 3 * accumulate, "momentum": 0.5})
    for client in range(4):
        made, wanted = (next(iter(engine_of(one).train(task_of(one), [client]))) for one in (few, large))
        same_up_to_rounding(made.weights, wanted.weights, 100)


@examples(60)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6))
def test_groups_of_batches_end_with_their_epoch(of_epoch: int, epochs: int, accumulate: int) -> None:
    ends = group_ends(of_epoch * epochs, epochs, accumulate)
    assert int(ends.sum()) == epochs * -(-of_epoch // accumulate)
    assert ends.reshape(epochs, of_epoch)[:, -1].all()


def test_scaffolds_control_variate_measures_gradients_at_every_rate() -> None:
    schedule = {"name": "exponential", "gamma": 0.5}
    train = {"epochs": 1, "batch_size": 4, "lr": 0.1, "schedule_in_round": schedule, "accumulate": 2}
    made = setup(images(40), method="scaffold", train=train)
    start = made.weights()
    zeros = {f"terms.0/{n}": torch.zeros_like(t) for n, t in start.items()}
    (update,) = engine_of(made).train(replace(task_of(made), server_state=zeros), [0])
    # 10 samples: 3 batches, 2 steps, at 0.1 and 0.05.
    for name, control in update.state.parts.items():
        moved = start[name.removeprefix("terms.0/")] - update.weights[name.removeprefix("terms.0/")]
        torch.testing.assert_close(control, moved / 0.15)


def torch_rates(make: Any, steps: int = 20) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@each(
    ("spec", "make"),
    [
        ("constant", lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        ({"name": "exponential", "gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        ({"name": "step", "gamma": 0.5, "every": 4}, lambda o: lr_scheduler.StepLR(o, 4, 0.5)),
        ({"name": "cosine", "length": 20, "floor": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.1)),
        (
            {"name": "cosine", "length": 15, "warmup": 5},
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 1 / 6, total_iters=5), lr_scheduler.CosineAnnealingLR(o, 15)], [5]
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_schedules_equal_torchs(spec: Any, make: Any) -> None:
    schedule = build("schedule", spec)
    assert [schedule.factor(i) for i in range(20)] == pytest.approx(torch_rates(make), abs=1e-6)
    train = Train(lr=0.2, schedule=spec)
    assert [train.lr_in(i) for i in range(20)] == pytest.approx([0.2 * f for f in torch_rates(make)], abs=1e-6)


def test_a_cosine_within_the_round_has_the_clients_own_length() -> None:
    train = Train(schedule_in_round={"name": "cosine", "warmup": 1})
    assert train.factors(3) == pytest.approx([0.5, 1.0, 0.5])
    assert train.factors(1) == [0.5]
    assert Train().factors(3) is None
    assert Train(lr=0.1, lr_decay=0.5).lr_in(2) == 0.1 * 0.5**2


def test_state_is_kept_by_client_and_only_where_asked_for() -> None:
    kept, reset = (
        setup(images(40), train={"optimizer": ADAM, "optimizer_state": how, "cohort": 1}) for how in ("keep", "reset")
    )
    state, _ = run(federation_of(kept), 3)
    # The memory follows those that trained.
    cohorts = {int(c) for r in range(3) for c in cohort_of(kept, r)}
    assert set(state.client_states) == cohorts
    names = {n for n, p in kept.model.named_parameters() if p.requires_grad}
    for kept_by in state.client_states.values():
        assert kept_by.optimizer.keys() == {f"{key}/{n}" for key in ("exp_avg", "exp_avg_sq", "step") for n in names}
    assert not run(federation_of(reset), 3)[0].client_states


@pytest.mark.parametrize(
    ("train", "engine"),
    slow_except(
        [({"momentum": 0.9}, "loop")],
        itertools.product([{"optimizer": "adam"}, {"momentum": 0.9}], ["loop", "stacked"]),
    ),
)
def test_a_resumed_run_with_kept_state_has_the_same_bits(train: Any, engine: str, tmp_path: Path) -> None:
    base = {"data": "digits", "fraction": 0.05, "partition": {"name": "iid", "clients": 4}, "engine": engine}
    base |= {"model": {"name": "mlp", "hidden": [6]}}
    base["train"] = {"cohort": 2, "epochs": 1, "batch_size": 4, "lr": 0.01, "optimizer_state": "keep", **train}
    whole = execute(resolve({**base, "rounds": 4}), tmp_path / "whole").state
    execute(resolve({**base, "rounds": 2}), tmp_path / "resumed")
    resumed = execute(resolve({**base, "rounds": 4}), tmp_path / "resumed", resume=True).state
    assert same(whole.weights, resumed.weights)
    assert whole.client_states.keys() == resumed.client_states.keys()
    assert same(to_tensors(whole.client_states), to_tensors(resumed.client_states))
    on_disk = checkpoint.read(tmp_path / "resumed")
    assert on_disk is not None
    assert same(to_tensors(on_disk.client_states), to_tensors(whole.client_states))


def test_personal_models_begin_with_no_state() -> None:
    fields = {"cohort": 4, "optimizer": ADAM}
    keep, reset = (
        setup(images(40), method="ditto", train={**fields, "optimizer_state": how}) for how in ("keep", "reset")
    )
    first, _ = run(federation_of(keep), 1)
    other, _ = run(federation_of(reset), 1)
    for client, kept in first.client_states.items():
        assert kept.optimizer
        assert same(replace(kept, optimizer={}).to_tensors(), other.client_states[client].to_tensors())


BASE = {"data": "digits", "partition": {"name": "iid", "clients": 10}}
ON_GRADIENTS = {"name": "noise", "on": "gradients", "scale": 0.1}


@each(
    ("changes", "words"),
    [
        ({"train": {"optimizer": "adan"}}, "train.optimizer.name: unknown optimizer 'adan'.*'adam'"),
        ({"train": {"optimizer": {"name": "adam", "beta": 0.9}}}, "train.optimizer.beta: unknown key.*did you mean"),
        ({"train": {"optimizer": {"name": "adam", "beta1": 1.0}}}, "train.optimizer.beta1: 1"),
        ({"train": {"optimizer": {"name": "adam", "beta2": -0.1}}}, "train.optimizer.beta2: -0.1"),
        ({"train": {"optimizer": {"name": "adam", "eps": 0.0}}}, "train.optimizer.eps: 0"),
        ({"train": {"optimizer": "adam", "momentum": 0.9}}, "train.momentum: 0.9 is of SGD"),
        ({"train": {"optimizer": "torch.optim:SGD", "weight_decay": 0.1}}, "train.weight_decay: 0.1: give it in"),
        ({"train": {"optimizer_state": "keep"}}, "train.optimizer_state: 'keep', but the optimizer 'sgd' has no"),
        ({"train": {"optimizer": "torch.optim:SGD", "optimizer_state": "keep"}}, "'torch' has no state here"),
        ({"train": {"optimizer": {"name": "torch", "path": "os:system"}}}, "it is the path of an optimiser of PyTorch"),
        ({"train": {"schedule": "cosine"}}, "train.schedule.length: must be given for 'cosine' over rounds"),
        ({"train": {"schedule": "step", "lr_decay": 0.9}}, "train.lr_decay: 0.9 and train.schedule are both given"),
        ({"train": {"schedule": "cosin"}}, "train.schedule.name: unknown schedule 'cosin'.*'cosine'"),
        ({"train": {"accumulate": 0}}, "train.accumulate: 0 is not valid"),
        (
            {"train": {"optimizer": "adam"}, "method": "scaffold"},
            "train.optimizer: the steps of 'adam' are no multiples",
        ),
        ({"train": {"optimizer": "adam"}, "protection": ON_GRADIENTS}, "protection.on: 'gradients' is noise in units"),
    ],
)
def test_bad_fields_end_in_one_message(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FedblendError, match=words):
        resolve({**BASE, **changes})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("torch.optim:Adan", "cannot import 'torch.optim:Adan'"),
        ("torch.optim.lr_scheduler:StepLR", "is no subclass of torch.optim.Optimizer"),
        ("torch.optim:LBFGS", "evaluates a loss several times a step"),
        ({"name": "torch.optim:RMSprop", "beta": 1}, "refuses its options: .*beta"),
    ],
)
def test_what_is_no_optimizer_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(FedblendError, match=words):
        next(iter(engine_of(made := setup(train={"optimizer": spec})).train(task_of(made), [0])))


def test_a_path_of_torch_is_a_name() -> None:
    made = resolve({**BASE, "train": {"optimizer": {"name": "torch.optim:RMSprop", "alpha": 0.9}}})
    table = as_table(made)["train"]["optimizer"]
    assert table == {"name": "torch", "path": "torch.optim:RMSprop", "options": {"alpha": 0.9}}
    assert resolve(as_table(made)) == made
