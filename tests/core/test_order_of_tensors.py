"""Noise is drawn tensor by tensor: a resume, a file or a message between ranks must not change their order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import CHECKPOINT, here, records, same_end, succeeded, write
from helpers import same, same_up_to_rounding
from safetensors.torch import load_file

from fedblend.core.engine import TrainTask, corrupted
from fedblend.core.state import ClientState
from fedblend.core.trees import in_order
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup

LOSING: dict[str, Any] = {
    "name": "losing",
    "rounds": 4,
    "min_uploads": 0,
    "data": "toy",
    "partition": "natural",
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"cohort": 3, "epochs": 1, "batch_size": 40, "lr": 0.05},
    "channel": {"name": "wireless", "t_max": 0.001, "power_up": 25.0, "power_down": 22.0},
    "protection": {"name": "noise", "clip": 0.5, "multiplier": 0.5},
    "engine": "stacked",
}
"""Three clients, some of which miss the round's model and go on from their own weights, with noise on what they send;
the names of the model's tensors are not in alphabetical order."""

RUN = "fedavg-seed0"


def test_the_models_order_is_not_the_files() -> None:
    names = list(make_setup(resolve(LOSING)).weights())
    assert names != sorted(names), "or the tests below would show nothing"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_with_losses_and_noise_goes_on_as_if_never_stopped(engine: str, tmp_path: Path) -> None:
    file = write(tmp_path / "losing.toml", {"engine": engine}, base=LOSING)
    succeeded(here("run", file, "--out", tmp_path / "whole"))
    succeeded(here("run", file, "--set", "rounds=2", "--out", tmp_path / "out"))
    assert any("client/" in name for name in load_file(tmp_path / "out" / RUN / CHECKPOINT))
    succeeded(here("run", file, "--resume", "--out", tmp_path / "out"))
    same_end(tmp_path / "out" / RUN, tmp_path / "whole" / RUN)


NOISY: dict[str, Any] = {
    **{key: value for key, value in LOSING.items() if key not in ("channel", "protection")},
    "method": "scaffold",
    "adversary": {"name": "noise", "share": 0.4},
}
"""A client of the three sends noise in place of its model, and of what goes beside it."""


@pytest.mark.slow
def test_a_run_with_noise_beside_the_model_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    file = write(tmp_path / "noise.toml", {}, base=NOISY)
    succeeded(here("run", file, "--out", tmp_path / "whole"))
    succeeded(here("run", file, "--set", "rounds=2", "--out", tmp_path / "out"))
    succeeded(here("run", file, "--resume", "--out", tmp_path / "out"))
    same_end(tmp_path / "out" / "scaffold-seed0", tmp_path / "whole" / "scaffold-seed0")


def test_noise_beside_the_model_does_not_depend_on_the_order_of_a_message() -> None:
    setup = make_setup(resolve(NOISY))
    (client,) = np.flatnonzero(setup.adversaries).tolist()
    weights = setup.weights()
    turned = {name: weights[name] for name in sorted(weights)}

    _, one = corrupted(setup, 0, client, weights, weights, weights)
    _, two = corrupted(setup, 0, client, weights, weights, turned)

    assert same(one, two)


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
def test_what_training_makes_is_in_the_models_order_wherever_a_client_begins(engine: type[LoopEngine]) -> None:
    setup = make_setup(resolve(LOSING))
    weights = setup.weights()
    turned = {name: weights[name] for name in sorted(weights)}
    own = {1: ClientState(turned)}
    made = engine(setup).train(TrainTask(0, weights, None, setup.sizes(0), client_states=own), [0, 1, 2])
    assert [list(one.weights) for one in made] == [list(weights)] * 3


def test_a_message_is_put_into_the_models_order() -> None:
    message = {name: torch.zeros(1) for name in ("a", "b", "c", "other")}
    assert list(in_order(message, ["c", "missing", "a", "b"])) == ["c", "a", "b", "other"]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as the other tests of ranks")
def test_two_ranks_draw_the_noise_that_one_draws(tmp_path: Path) -> None:
    # The median takes whole uploads, and its change is that of all tensors in a row.
    method = {"name": "fedavg", "label": "one", "aggregator": "median"}
    changes = {"method": method, "convergence_tol": 1e-9, "seed": 1}
    file = write(tmp_path / "losing.toml", changes, base=LOSING)

    succeeded(here("run", file, "--ranks", 2, "--out", tmp_path / "two"))
    succeeded(here("run", file, "--ranks", 1, "--out", tmp_path / "one"))

    one, two = (tmp_path / name / "one-seed1" for name in ("one", "two"))
    assert load_file(one / CHECKPOINT).keys() == load_file(two / CHECKPOINT).keys()
    same_up_to_rounding(load_file(two / CHECKPOINT), load_file(one / CHECKPOINT), steps=100)
    moved = [[json.loads(line)["change"] for line in records(run)[1:]] for run in (one, two)]
    assert moved[1] == pytest.approx(moved[0], rel=1e-4)
    lost = [json.loads(line).get("lost", []) for line in records(one)]
    assert any(0 in clients for clients in lost), "or the first upload is always rank 0's"
