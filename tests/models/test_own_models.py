"""Users' models: stacks and programs at the server equal the loop, or refuse the model."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, federation_of, images, run, same, setup, slow_except
from own_models import Dense

from fedblend._kernels import operators, simplify
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.core.state import ClientState
from fedblend.engines.autotune import unstackable
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine

GROUPS = [range(10), [10], range(11, 23), range(23, 30)]
HARD = {"momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 0.5}
AGREE = ("SubclassOfLayer", "Hooked", "SubclassOfRow", "LayerByLayer", "InBlocks", "ReadTwice", "WrittenZeros")
ALSO = ("Frozen", "Buffered", "Unreached", "TwoOfOneGradient", "DroppingTwice", "DroppingAcross", "DroppingInARow")


def world_of(model: str, train: dict[str, Any] | None = None, **changes: Any) -> Setup:
    settings = {"cohort": 4, "epochs": 2, "batch_size": 4, "lr": 0.1, **(train or {})}
    module, groups = {"name": "module", "path": f"own_models:{model}"}, [list(group) for group in GROUPS]
    return setup(images(30, side=8), groups, train=settings, model=module, **changes)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest distance of two models' tensors, as a share of the second's."""
    return max(float((a[n].double() - b[n]).norm() / b[n].double().norm().clamp(min=1e-9)) for n in b)


@pytest.mark.parametrize(
    ("model", "train"),
    slow_except(
        [*((model, "plain") for model in ("Hooked", "InBlocks", "Buffered", "Frozen")), ("DroppingTwice", "hard")],
        itertools.product((*AGREE, *ALSO), ("plain", "hard")),
    ),
)
def test_a_stack_equals_the_loop(model: str, train: str) -> None:
    made = world_of(model, HARD if train == "hard" else {})
    assert unstackable(made) == ""
    stacked = StackedEngine(made, stack=3)

    alone, _ = run(RoundLoop(made, LoopEngine(made)), 2)
    together, _ = run(RoundLoop(made, stacked), 2)

    assert apart(together.weights, alone.weights) < 1e-5
    assert np.allclose(stacked.score(alone.weights).loss, LoopEngine(made).score(alone.weights).loss, atol=1e-5)


@each(
    ("model", "words"),
    [
        ("Counting", "changes its weights or buffers itself"),
        ("Clamping", "changes its weights or buffers itself"),
        ("Tied", "'second.weight' and 'third.weight' are one tensor"),
        ("Padded", "'words' has a padding_idx"),
        ("Recurrent", "'first' is a fused LSTM"),
    ],
)
def test_a_model_that_a_stack_would_train_otherwise_is_left_to_the_loop(model: str, words: str) -> None:
    made = world_of(model)

    assert words in unstackable(made)

    # The loop trains it, and a round is the mean of its clients.
    state, _ = run(federation_of(made), 1)
    assert all(bool(tensor.isfinite().all()) for tensor in state.weights.values())


def test_a_trial_finds_differences_between_stack_and_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operators.Convolution.forward
    monkeypatch.setattr(operators.Convolution, "forward", lambda *given, **named: 1.1 * right(*given, **named))

    message = unstackable(world_of("InBlocks"))

    assert message == "" if not _has_kernels() else "'row.0.weight' would train differently in a stack" in message


def _has_kernels() -> bool:
    return any(isinstance(m, operators.Convolution) for m in StackedEngine(world_of("InBlocks")).stacked.modules())


def trained_alike(made: Setup, task: TrainTask) -> None:
    together, alone = (engine.train(task, [0, 2]) for engine in (StackedEngine(made), LoopEngine(made)))
    for one, other in zip(together, alone, strict=True):
        assert apart(one.weights, other.weights) < 1e-5


@each("model", ["Frozen", "Buffered"])
def test_untrained_tensors_are_the_rounds(model: str) -> None:
    made = world_of(model)
    weights = {name: 1.7 * tensor for name, tensor in made.weights().items()}
    trained_alike(made, TrainTask(0, weights, None, made.sizes(0)))


def test_a_model_without_trained_weights_is_refused() -> None:
    with pytest.raises(FedblendError, match="model: module has no weights that are trained; valid: a model of which"):
        world_of("AllFrozen")


def test_a_model_that_ends_in_a_softmax_is_told() -> None:
    told = "model: module gives probabilities, as of a softmax, but the loss takes logits, so that training is slow"
    with pytest.warns(UserWarning, match=told):
        world_of("Softmaxed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world_of("OneConvolution")


@each("persistent", [False, True])
@each("anew", [False, True])
def test_what_a_model_remembers_passes_to_no_other_client(anew: bool, persistent: bool) -> None:
    arguments = {"anew": anew, "persistent": persistent}
    model = {"name": "module", "path": "own_models:Remembering", "arguments": arguments}
    made = setup(images(30, side=8), model=model)
    engine, task = LoopEngine(made), TrainTask(0, made.weights(), None, made.sizes(0))

    *_, after_others = engine.train(task, [0, 2, 1])
    alone = next(LoopEngine(made).train(task, [1]))

    assert same(after_others.weights, alone.weights)
    assert ("seen" in alone.weights) == persistent
    assert not persistent or alone.weights["seen"].all()
    assert persistent or not engine.server_model().get_buffer("seen").any()
    assert [*engine.train(task, [0])]
    assert np.array_equal(engine.score(alone.weights).loss, LoopEngine(made).score(alone.weights).loss)


@each("model", ["Frozen", "Buffered"])
def test_clients_with_their_own_models_are_stacked_where_these_differ_in_what_is_trained(model: str) -> None:
    made = world_of(model)
    own = {
        k: ClientState({n: (1 + 0.2 * k) * t for n, t in made.weights().items() if n not in made.frozen})
        for k in (0, 2)
    }
    task = TrainTask(0, made.weights(), None, made.sizes(0), client_states=own)
    trained_alike(made, task)
    engine = StackedEngine(made)
    stacks: list[int] = []
    trained = engine._train_stack
    engine._train_stack = lambda task, some: stacks.append(len(some)) or trained(task, some)  # type: ignore
    assert [*engine.train(task, [0, 2])]
    assert stacks == ([2] if model == "Frozen" else [1, 1])


def test_two_weights_of_one_gradient_are_clipped_to_the_norm() -> None:
    made = world_of("TwoOfOneGradient", {"clip_norm": 0.01, "epochs": 1, "batch_size": 12})
    weights = made.weights()
    task = TrainTask(0, weights, None, made.sizes(0))

    for engine in (LoopEngine(made), StackedEngine(made)):
        (one,) = engine.train(task, [2])
        steps = torch.stack([(one.weights[name] - weights[name]).norm() for name in weights])
        assert float(steps.norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


class OfTypes(Dense):
    """A frozen body of one type, and a head of another; it counts how often it is built."""

    built = 0

    def __init__(self, body: str, head: str, outputs: str = "float32") -> None:
        super().__init__()
        OfTypes.built += 1
        self.first.to(getattr(torch, body)).requires_grad_(False)
        self.last.to(getattr(torch, head))
        self.made = getattr(torch, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.flatten(1).to(self.first.weight.dtype))
        return self.last(hidden.to(self.last.weight.dtype).relu()).to(self.made)


def of_types(*types: str) -> dict[str, Any]:
    arguments = dict(zip(("body", "head", "outputs"), types, strict=False))
    return {"name": "module", "path": "test_own_models:OfTypes", "arguments": arguments}


@each(
    ("types", "name"),
    [
        (("float32", "bfloat16"), "'last.weight' of module is of type torch.bfloat16"),
        (("float32", "complex64"), "'last.weight' of module is of type torch.complex64"),
        (("complex64", "float32"), "'first.weight' of module is of type torch.complex64"),
    ],
)
def test_types_that_clients_cannot_train_and_send_are_refused(types: tuple[str, ...], name: str) -> None:
    with pytest.raises(FedblendError, match=f"model: {name}, which clients cannot train and send; valid: float32"):
        setup(images(side=8), model=of_types(*types))


@each("engine", [LoopEngine, StackedEngine])
def test_a_frozen_body_and_outputs_may_be_of_bfloat16(engine: type[LoopEngine]) -> None:
    made = setup(images(side=8), model=of_types("bfloat16", "float32", "bfloat16"))
    state, records = run(RoundLoop(made, engine(made)), 2)
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    assert state.weights["first.weight"].dtype == torch.bfloat16


def test_a_model_of_ones_own_is_built_once() -> None:
    """It may load a file of a gigabyte in its constructor."""
    OfTypes.built = 0
    setup(images(side=8), model=of_types("float32", "float32"))
    assert OfTypes.built == 1


STEPS = ("aggenhance", "prior-samples", "mix2fld")
AT_THE_SERVER = [(model, step) for model in ("ReadTwice", "WrittenZeros", "Unreached", "Frozen") for step in STEPS]


@pytest.mark.parametrize(
    ("model", "step"),
    slow_except(
        [("Frozen", "aggenhance"), ("Unreached", "prior-samples"), ("Recurrent", "mix2fld")],
        [*AT_THE_SERVER, ("Recurrent", "prior-samples"), ("Recurrent", "mix2fld")],
    ),
)
def test_programs_at_the_server_equal_the_model(model: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"aggenhance": {"steps": 3}, "prior-samples": {}, "mix2fld": {"steps": 20}}[step]
    method: dict[str, Any] = {"name": step} if step == "mix2fld" else {"name": "fedavg"}
    name = "distill-to-model" if step == "mix2fld" else step
    made = world_of(model, method={**method, "server_step": {"name": name, **short}}, unsafe=True)

    traced, _ = run(RoundLoop(made, LoopEngine(made)), 2)
    monkeypatch.setattr(simplify.TracedFunction, "__call__", lambda flat, *tensors: flat.function(*tensors))
    plain, _ = run(RoundLoop(made, LoopEngine(made)), 2)

    assert apart(traced.weights, plain.weights) < 1e-4


@each(
    ("model", "step", "words"),
    [
        ("Tied", "aggenhance", "'second.weight' and 'third.weight' of this model are the same"),
        ("Tied", "prior-samples", "'second.weight' and 'third.weight' of this model are the same"),
        ("Recurrent", "aggenhance", "a fused LSTM"),
    ],
)
def test_models_that_the_server_cannot_use_are_errors(model: str, step: str, words: str) -> None:
    made = world_of(model, method={"name": "fedavg", "server_step": step}, unsafe=True)

    with pytest.raises(FedblendError, match=words):
        federation_of(made).begin()
