"""Models of which a part is trained: what clients keep, send and store of them is that part."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import each, images, needs_of, run, same, same_state, setup, slow_except
from own_models import Adapted
from safetensors.torch import load_file

import fedblend
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.core.trees import bytes_of
from fedblend.engines.autotune import unstackable
from fedblend.engines.distributed.ranks import Ranks
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.config import resolve
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.predictor import Predictor

FFA = ["lora_B", "last"]
DIGITS: dict[str, Any] = {"data": "digits", "fraction": 0.1, "partition": {"name": "iid", "clients": 4}, "rounds": 4}
DIGITS["train"] = {"cohort": 3, "epochs": 1, "batch_size": 10, "lr": 0.1}


def module(path: str = "Adapted", trainable: list[str] | None = None, **arguments: Any) -> dict[str, Any]:
    """The table ``model`` of an experiment."""
    return {"name": "module", "path": f"own_models:{path}", "arguments": arguments, "trainable": trainable or []}


def world(model: dict[str, Any], method: str = "fedavg") -> Setup:
    changes = {**needs_of(method), "model": model, "train": {"cohort": 4, "batch_size": 4}}
    return setup(images(44, side=8), method=method, **changes)


def size_of_trained(made: Setup) -> int:
    weights = made.weights()
    return bytes_of({name: weights[name] for name in made.trained})


# What is trained -------------------------------------------------------------------------------------------


@each(
    ("patterns", "trained"),
    [
        (FFA, ["first.lora_B", "middle.lora_B", "last.weight", "last.bias"]),
        (["last"], ["last.weight", "last.bias"]),
        (["bias"], ["last.bias"]),  # the adapters' own layers are frozen by the class
        (["middle*B"], ["middle.lora_B"]),
    ],
)
def test_weights_with_other_names_are_frozen(patterns: list[str], trained: list[str]) -> None:
    made = world(module(trainable=patterns))
    assert sorted(made.trained) == sorted(trained)
    state, records = run(made, 2)
    first = made.weights()
    assert {n for n, t in state.weights.items() if not torch.equal(t, first[n])} == set(trained)
    assert records[0]["bytes_up"]["weights"] == records[0]["bytes_down"]["weights"] == 4 * size_of_trained(made)


def test_an_entry_that_names_nothing_is_told() -> None:
    told = "model.trainable: 'heads' is in no name of a weight that own_models:Adapted trains; valid: parts of first.l"
    with pytest.raises(FedblendError, match=re.escape(told)):
        world(module(trainable=["lora_B", "heads"]))


def test_both_factors_give_a_warning_and_one_gives_none() -> None:
    told = r"both factors of its adapters \('first.lora_A', 'first.lora_B'\).*FFA-LoRA.*model.trainable = \[\"lora_B\""
    with pytest.warns(UserWarning, match=told) as given:
        world(module())
    assert len(given) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trainable in (FFA, ["lora_A"]):
            world(module(trainable=trainable))
        world(module(), "fd")  # it averages outputs


# Engines ---------------------------------------------------------------------------------------------------


METHODS = ["fedavg", "fedprox", "fedadam", "moon", "ditto", "fedper", "pfedme"]


@pytest.mark.parametrize("method", slow_except(["moon", "ditto"], METHODS))
def test_a_stack_equals_the_loop_and_nobody_keeps_frozen_tensors(method: str) -> None:
    made = world(module(trainable=FFA), method)
    assert unstackable(made) == ""
    alone, _ = run(RoundLoop(made, LoopEngine(made)), 3)
    together, _ = run(RoundLoop(made, StackedEngine(made, stack=4)), 3)
    for name, tensor in alone.weights.items():
        torch.testing.assert_close(together.weights[name], tensor, rtol=1e-4, atol=1e-5)
    for state in (alone, together):
        assert same({n: state.weights[n] for n in made.frozen}, {n: made.weights()[n] for n in made.frozen})
        kept = [name for one in state.client_states.values() for name in one.to_tensors()]
        assert bool(kept) == (method in {"moon", "ditto", "fedper", "pfedme"})
        assert not [
            name for name in (*kept, *state.server_state) if name.partition("/")[2].endswith(tuple(made.frozen))
        ]


def test_a_stack_has_the_frozen_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stacked = world(module(trainable=FFA), "moon"), []
    monkeypatch.setattr(StackedEngine, "trainer_for", lambda engine, inputs: stacked.append(inputs) or 1 / 0)
    state, _ = run(RoundLoop(made, LoopEngine(made)), 1)
    with pytest.raises(ZeroDivisionError):
        RoundLoop(made, StackedEngine(made, stack=4)).round(state)
    (inputs,) = stacked
    trained = len(made.trained)
    assert (len(inputs.params), len(inputs.client_tensors), len(inputs.shared_tensors)) == (trained, trained, trained)


def test_frozen_tensors_are_sent_to_ranks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    broadcast = Ranks.broadcast
    monkeypatch.setattr(
        Ranks, "broadcast", lambda *given: (sent.extend(given[2] if len(given) > 2 else ()), broadcast(*given))[1]
    )
    asked = {**DIGITS, "method": "ditto", "holdout": 0.2, "model": module(trainable=FFA, outputs=10), "rounds": 2}
    fedblend.run(resolve({**asked, "ranks": 1}), tmp_path / "one")
    fedblend.run(resolve({**asked, "ranks": 2, "engine": "loop"}), tmp_path / "two")
    one, two = (checkpoint.read(tmp_path / folder) for folder in ("one", "two"))
    assert one is not None
    assert two is not None
    assert sorted(name for name in sent if name.endswith("base_layer.weight")) == [
        "first.base_layer.weight",
        "middle.base_layer.weight",
    ]
    for name, tensor in one.weights.items():
        torch.testing.assert_close(two.weights[name], tensor, rtol=1e-4, atol=1e-5)


# On disk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedadam", "ditto"])
def test_checkpoints_leave_frozen_tensors_out_and_resume_bit_for_bit(method: str, tmp_path: Path) -> None:
    asked = {**DIGITS, **needs_of(method), "method": method, "model": module(trainable=FFA, outputs=10, width=200)}
    fedblend.run(resolve(asked), tmp_path / "whole")
    fedblend.run(resolve({**asked, "rounds": 2}), tmp_path / "cut")
    fedblend.run(resolve(asked), tmp_path / "cut", resume=True)

    names = load_file(tmp_path / "cut" / checkpoint.NAME)
    frozen = load_file(tmp_path / "cut" / checkpoint.FROZEN)
    assert {"first.base_layer.weight", "first.lora_A"} < set(frozen)
    assert not [name for name in names if name.endswith(tuple(frozen))]
    read = checkpoint.read(tmp_path / "cut")
    whole = checkpoint.read(tmp_path / "whole")
    assert read is not None
    assert whole is not None
    assert same_state(read, whole)
    files = [(tmp_path / folder / checkpoint.NAME).read_bytes() for folder in ("whole", "cut")]
    assert files[0] == files[1]
    if method == "fedadam":
        model, x = Adapted(200, 10), torch.rand(2, 1, 8, 8)
        model.load_state_dict(whole.weights)
        predictor = Predictor.of_run(RunDirectory(tmp_path / "cut"), trust=True)
        assert torch.equal(predictor.module.net(x), model(x))


@pytest.mark.slow
def test_a_closed_head_stays_frozen_while_adapters_train_and_then_goes_on(tmp_path: Path) -> None:
    head = {**DIGITS, "rounds": 1, "method": "fedlda", "model": module(trainable=FFA, outputs=10)}
    fedblend.run(resolve(head), tmp_path / "head")
    frozen = {**DIGITS, "rounds": 2, "start": str(tmp_path / "head"), "model": module(trainable=["lora_B"], outputs=10)}
    for engine in ("loop", "stacked"):
        fedblend.run(resolve({**frozen, "engine": engine}), tmp_path / engine)
    fedblend.run(resolve({**frozen, "rounds": 1, "engine": "loop"}), tmp_path / "cut")
    fedblend.run(resolve({**frozen, "engine": "loop"}), tmp_path / "cut", resume=True)
    both = {**head, "method": "fedavg", "start": str(tmp_path / "loop")}
    fedblend.run(resolve(both), tmp_path / "both")

    read = {name: checkpoint.read(tmp_path / name) for name in ("head", "loop", "stacked", "cut", "both")}
    weights = {name: state.weights for name, state in read.items() if state is not None}
    last = {name: same({"w": of["last.weight"]}, {"w": weights["head"]["last.weight"]}) for name, of in weights.items()}
    assert last == {"head": True, "loop": True, "stacked": True, "cut": True, "both": False}
    assert same(weights["cut"], weights["loop"])
    torch.testing.assert_close(weights["stacked"], weights["loop"], rtol=1e-4, atol=1e-5)
    sent = [RunDirectory(tmp_path / name).truncate_metrics(1)[1].bytes_up["weights"] for name in ("loop", "both")]
    assert sent[1] - sent[0] == 3 * 4 * sum(weights["head"][f"last.{name}"].numel() for name in ("weight", "bias"))


def test_frozen_tensors_of_another_run_are_told(tmp_path: Path) -> None:
    for seed in (0, 1):
        asked = {**DIGITS, "rounds": 1, "seed": seed, "model": module(trainable=FFA, outputs=10)}
        fedblend.run(resolve(asked), tmp_path / str(seed))
    file = tmp_path / "0" / checkpoint.FROZEN
    file.write_bytes((tmp_path / "1" / checkpoint.FROZEN).read_bytes())
    with pytest.raises(FedblendError, match=r"frozen\.safetensors beside it is missing, or of another run"):
        checkpoint.read(tmp_path / "0")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(FedblendError, match="damaged"):
        checkpoint.read(tmp_path / "0")
    file.unlink()
    with pytest.raises(FedblendError, match=r"frozen\.safetensors beside it is missing"):
        checkpoint.read(tmp_path / "0")


# peft ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_on_a_transformer() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    sizes = []
    for trainable in (["lora"], ["lora_B"]):
        made = world(module("Transformer", trainable))
        assert unstackable(made) == ""
        assert all("base_layer" not in n and "original_module" not in n for n in made.trained)
        alone, records = run(RoundLoop(made, LoopEngine(made)), 2)
        together, _ = run(RoundLoop(made, StackedEngine(made)), 2)
        for name, tensor in alone.weights.items():
            torch.testing.assert_close(together.weights[name], tensor, rtol=1e-4, atol=1e-5)
        sizes.append(size_of_trained(made))
        assert records[-1]["bytes_up"]["weights"] == 4 * sizes[-1]
    assert sizes[0] == 2 * sizes[1]
