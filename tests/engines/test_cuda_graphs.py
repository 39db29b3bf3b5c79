"""Recorded steps on tensors with fixed addresses give the plain steps' weights bit for bit, also when replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import RAGGED, NoRecorder, images, run, same, same_up_to_rounding, setup, slow_except
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedblend._kernels import build
from fedblend.core.engine import TrainTask
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.core.state import ClientState, RunState, to_tensors
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.sgd import StackedSGD
from fedblend.engines.stacked.cuda_graphs import WARM_UP, CudaRecorder, RecordedWork, Work
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.stacked.schedule import Stack

POWER = {"lr": 0.0625, "lr_decay": 0.5}
"""Products with powers of two are exact, so a learning rate in a tensor changes no bit."""
HARD = {"momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 0.5}

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default}
"""Operations that make the host wait for the device."""


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off fedblend's CPU kernels: a GPU has none, and :class:`Capture` does not record their calls."""
    monkeypatch.setattr(build, "library", lambda source=None: None)


def ragged(method: Any = "fedavg", model: dict[str, Any] | None = None, **train: Any) -> Setup:
    """Six clients of different sizes, all in each round; two epochs of batches of four."""
    settings = {"cohort": 6, "epochs": 2, "batch_size": 4, **POWER, **train}
    network = model or {"name": "mlp", "hidden": [7, 5]}
    return setup(images(), RAGGED, method=method, unsafe=True, train=settings, model=network)


class Capture(TorchDispatchMode):
    """Emulates CUDA's capture on a CPU: records each operation with its tensors.

    Capturing changes no tensor. A replay runs only the operations: numbers and addresses keep the capture's values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError(f"{func} would wait for the device")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
                    storage = tensor.untyped_storage()
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        made = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, made))
        return made

    def undo(self) -> None:
        for storage, before in self.before.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if (
                    isinstance(old, torch.Tensor)
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
                    old.copy_(new)


class EmulatedRecorder:
    """A recorder that captures as CUDA does, and counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def warm(self, work: Work) -> None:
        work()

    def record(self, work: Work) -> Work:
        capture = Capture()
        with capture:
            work()
        capture.undo()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            capture.replay()

        return replay


def after(made: Setup, engine: StackedEngine | LoopEngine, rounds: int = 3) -> RunState:
    return run(RoundLoop(made, engine), rounds)[0]


CASES: dict[str, Callable[[], Setup]] = {
    "fedavg": ragged,
    "fedprox": lambda: ragged("fedprox"),
    "naivemix": lambda: ragged("naivemix"),
    "fedmix": lambda: ragged("fedmix"),
    "momentum": lambda: ragged("fedmix", **HARD),
    "dropout": lambda: ragged("fedmix", {"name": "mlp", "hidden": [9, 9], "dropout": 0.4}),
    "two phases": lambda: ragged("fedprox+fedmix-hidden"),
    "mean outputs, clients' own models": lambda: ragged("fd"),
}


@pytest.mark.parametrize("case", slow_except(["momentum"], CASES))
def test_replayed_steps_give_the_plain_steps_weights_to_the_last_bit(case: str) -> None:
    made = CASES[case]()
    plain = StackedEngine(made, stack=4)
    recorder = EmulatedRecorder()
    fixed = StackedEngine(made, stack=4, recorder=recorder)

    wanted, got = after(made, plain), after(made, fixed)

    assert same(got.weights, wanted.weights)
    assert same(got.global_outputs, wanted.global_outputs)
    assert same(to_tensors(got.client_states), to_tensors(wanted.client_states))
    # Steps of several clients, and of a single client, were both replayed.
    steps = [item for trainer in fixed.trainers.values() for item in trainer.recorded.items()]
    assert {key[1] for key, one in steps if one[2].replay} == {False, True}
    assert recorder.replays > recorder.captures > 0


@pytest.mark.slow
def test_a_learning_rate_in_a_tensor_gives_the_plain_steps_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ragged("fedmix", lr=0.03, lr_decay=0.9)
    fixed = after(made, StackedEngine(made, stack=4, recorder=EmulatedRecorder()))
    as_number = after(made, StackedEngine(made, stack=4))
    original = StackedSGD.__init__
    monkeypatch.setattr(StackedSGD, "__init__", lambda self, train, rate=None: original(self, train, torch.zeros(())))

    as_tensor = after(made, StackedEngine(made, stack=4))

    assert same(fixed.weights, as_tensor.weights)
    same_up_to_rounding(fixed.weights, as_number.weights, steps=50)


def test_stacks_of_every_size_share_a_trainer_and_its_recorded_steps() -> None:
    made = ragged()
    engine = StackedEngine(made, stack=4, recorder=NoRecorder())

    wanted = after(made, StackedEngine(made, stack=4), 2)

    # Six clients make a stack of four and one of two.
    assert same(after(made, engine, 2).weights, wanted.weights)
    assert len(engine.trainers) == 1
    (trainer,) = engine.trainers.values()
    assert {len(p) for p in trainer.slots.params} == {4}


def test_a_stack_does_not_change_the_results_of_the_stack_before() -> None:
    made = ragged()
    engine = StackedEngine(made, stack=2, recorder=NoRecorder())
    task = TrainTask(0, made.weights(), None, made.sizes(0))

    results = iter(engine.train(task, range(6)))
    first = next(results)
    kept = {name: tensor.clone() for name, tensor in first.weights.items()}
    list(results)

    assert same(first.weights, kept)


def test_clients_that_go_on_from_their_own_model_have_a_trainer_of_their_own() -> None:
    made = ragged("fedprox")
    weights = made.weights()
    # As after a lost downlink: FedProx's term measures from one model in one stack, from each client's in the other.
    own = ClientState({name: 2 * tensor for name, tensor in weights.items()})
    task = TrainTask(0, weights, None, made.sizes(0), client_states={1: own, 3: own})
    engine = StackedEngine(made, stack=4, recorder=NoRecorder())

    got = list(engine.train(task, range(6)))

    assert len(engine.trainers) == 2
    for one, wanted in zip(got, StackedEngine(made, stack=4).train(task, range(6)), strict=True):
        assert same(one.weights, wanted.weights)


@pytest.mark.slow
def test_few_trainers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedblend.engines.stacked.trainer.MAX_TRAINERS", 1)
    made = ragged("fd")
    engine = StackedEngine(made, stack=4, recorder=NoRecorder())

    # The second round has global outputs, and so another kind of trainer.
    got = after(made, engine, 2)

    assert len(engine.trainers) == 1
    assert same(got.global_outputs, after(made, StackedEngine(made, stack=4), 2).global_outputs)


def test_work_runs_uncaptured_before_it_is_recorded_once() -> None:
    done: list[str] = []

    class Noted:
        def warm(self, work: Work) -> None:
            done.append("warm")

        def record(self, work: Work) -> Work:
            done.append("record")
            return lambda: done.append("replay")

    recorded = RecordedWork(lambda: None, Noted())
    for _ in range(WARM_UP + 2):
        recorded()

    assert done == ["warm"] * WARM_UP + ["record", "replay", "replay"]


def test_smaller_batches_of_one_size_are_one_step() -> None:
    settings = {"cohort": 4, "epochs": 1, "batch_size": 4, "lr": 0.1}
    made = setup(images(24), [list(range(6 * k, 6 * k + 6)) for k in range(4)], train=settings)
    engine = StackedEngine(made, stack=4)

    stacked, loop = after(made, engine, 2), after(made, LoopEngine(made), 2)

    # The shape of x is the third entry: four clients at once, batches of four and of two.
    assert {tuple(key[2][0][:2]) for key in engine.programs} == {(4, 4), (4, 2)}
    same_up_to_rounding(stacked.weights, loop.weights, steps=50)


@pytest.mark.parametrize("method", slow_except(["localmix"], ["fedprox+fedmix", "localmix", "fd"]))
def test_no_step_waits_for_the_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ragged(method, **HARD)
    engine = StackedEngine(made, stack=4)
    fed = RoundLoop(made, engine)
    state, _ = run(fed, 2)
    plain, captures = Stack._step, []

    def watched(stack: Stack, step: int) -> None:
        captures.append(Capture())
        with captures[-1]:  # fails where an operation waits
            plain(stack, step)

    monkeypatch.setattr(Stack, "_step", watched)
    run(fed, 1, state)

    assert captures


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures on a GPU")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_replays_captured_steps_and_never_waits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CASES[case]()
    made = replace(made, experiment=made.experiment.model_copy(update={"device": "cuda", "cuda_graphs": True}))
    engine = StackedEngine(made, "cuda", stack=4)
    assert isinstance(engine.recorder, CudaRecorder)
    plain = StackedEngine(made, "cuda", stack=4)
    plain.recorder = None
    fed = RoundLoop(made, engine)
    state, _ = run(fed, 3)
    as_it_is = after(made, plain, 4)
    step = Stack._step

    def watched(stack: Stack, number: int) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(stack, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Stack, "_step", watched)
    state, _ = run(fed, 1, state)

    assert engine.recorder.refused == ""
    assert any(one[2].replay for trainer in engine.trainers.values() for one in trainer.recorded.values())
    for name, tensor in as_it_is.weights.items():
        torch.testing.assert_close(state.weights[name].cpu(), tensor.cpu(), rtol=1e-5, atol=1e-6)
