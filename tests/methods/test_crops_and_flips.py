"""Augmentation of local training: each part by hand, as torchvision has it, and the same in every engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    engine_of,
    experiment,
    images,
    numbers,
    run,
    same_up_to_rounding,
    setup,
    slow_after_first,
    slow_except,
)
from torch.nn import functional as F

import fedblend
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.data.scale import Scaler
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.config import as_table, resolve
from fedblend.methods.augment.pictures import HorizontalFlip, RandomCrop, augmented, draw
from fedblend.report.description import describe_runs
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import group

BOTH = [{"name": "random-crop", "padding": 1}, "horizontal-flip"]
GROUPS = [range(0, 9), range(9, 10), range(10, 22), range(22, 30), range(30, 34), range(34, 40)]
"""Nine samples, one, twelve, eight, four and six: so batches of four are full, short or absent."""


def federation(**train: Any) -> Setup:
    settings = {"cohort": 6, "epochs": 2, "batch_size": 4, "lr": 0.05, "augment": BOTH, **train}
    return setup(images(), GROUPS, train=settings)


def test_a_picture_is_shifted_and_mirrored_by_hand() -> None:
    picture = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8).expand(3, 1, 3, 3)
    paper = torch.full((1, 1, 1), 99, dtype=torch.uint8)
    # First row and column of the crop from the padded picture, then whether it is mirrored.
    drawn = torch.tensor([[1, 1, 0], [2, 0, 0], [0, 1, 1]])

    as_it_is, up_and_right, down_mirrored = augmented([RandomCrop(1), HorizontalFlip()], picture, drawn, paper)

    assert as_it_is[0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert up_and_right[0].tolist() == [[99, 4, 5], [99, 7, 8], [99, 99, 99]]
    assert down_mirrored[0].tolist() == [[99, 99, 99], [3, 2, 1], [6, 5, 4]]


def test_a_crop_is_the_part_of_the_padded_picture_and_all_parts_are_drawn() -> None:
    x = torch.arange(1, 1 + 60 * 2 * 4 * 5, dtype=torch.float32).view(60, 2, 4, 5)
    background = torch.tensor([-1.0, -2.0])[:, None, None]
    crop = RandomCrop(2)
    drawn = torch.from_numpy(crop.draw(np.random.default_rng(0), 60))

    got = crop.apply(x, drawn, background)

    padded = F.pad(x - background, (2, 2, 2, 2)) + background
    wanted = [p[:, a : a + 4, b : b + 5] for p, (a, b) in zip(padded, drawn.tolist(), strict=True)]
    assert torch.equal(got, torch.stack(wanted))
    assert set(drawn.flatten().tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("probability", "share"), [(0.0, {0}), (1.0, {1}), (0.5, {0, 1})])
def test_pictures_are_mirrored_with_their_probability(probability: float, share: set[int]) -> None:
    drawn = HorizontalFlip(probability).draw(np.random.default_rng(0), 50)
    assert drawn.shape == (50, 1)
    assert set(drawn.flatten().tolist()) == share


@pytest.mark.parametrize(("invert", "stored"), [(True, 255), (False, 0)])
def test_pixels_from_outside_have_no_ink(invert: bool, stored: int) -> None:
    made = setup(images(), scale={"name": "standard", "invert": invert})
    assert isinstance(made.scale, Scaler)
    assert made.scale.background(made.data.train.x).flatten().tolist() == [stored]


def test_a_client_trains_on_the_pictures_of_its_keyed_stream() -> None:
    made = federation(epochs=1)
    task = TrainTask(3, made.weights(), None, made.sizes(0))

    (update,) = LoopEngine(made).train(task, [2])

    # The same training, step by step: one choice a sample, in the order of the batches.
    one = engine_of(made).assign(task, 2)
    choices = draw(made.experiment.train.augment, stream(made.experiment.seed, "augment", 3, 2), 12)
    x, y = made.samples(2, 12)
    model = made.model
    model.load_state_dict(made.weights())
    assert isinstance(made.scale, Scaler)
    for a, b in pairwise(one.bounds.tolist()):
        rows = one.order[a:b]
        seen = augmented(
            made.experiment.train.augment, x[rows], torch.from_numpy(choices[a:b]), made.scale.background(x)
        )
        loss = F.cross_entropy(model(made.scale(seen)), y[rows])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= made.experiment.train.lr_in(3) * p.grad
    same_up_to_rounding(update.weights, dict(model.state_dict()), steps=3)


@pytest.mark.parametrize("stack", slow_except([2], [2, 6]))
@pytest.mark.parametrize(
    "train", slow_after_first([{}, {"steps": 5}, {"accumulate": 2}]), ids=["epochs", "steps", "accumulated"]
)
def test_a_stack_trains_on_the_loops_pictures(train: dict[str, Any], stack: int) -> None:
    made = federation(**train)
    loop, _ = run(made, 2)
    stacked, _ = run(RoundLoop(made, StackedEngine(made, stack=stack)), 2)
    same_up_to_rounding(stacked.weights, loop.weights, steps=20)


def test_data_that_are_no_pictures_are_refused() -> None:
    with pytest.raises(FedblendError, match=r"train\.augment: 'random-crop' needs pictures, but 'numbers' holds"):
        setup(numbers(), train={"augment": BOTH})


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        ([{"name": "random-crop", "padding": 4}], r"random-crop\.padding: 4 is not valid for pictures of 4 x 4 pixels"),
        (["random-crob"], "did you mean 'random-crop'"),
        ([{"name": "horizontal-flip", "probability": 2.0}], r"train\.augment\[0\]\.probability: 2\.0 is not valid"),
    ],
)
def test_bad_augmentations_end_in_one_message(augment: Any, words: str) -> None:
    with pytest.raises(FedblendError, match=words):
        setup(images(), train={"augment": augment})


def test_an_experiment_keeps_its_augmentations() -> None:
    asked = federation().experiment
    assert resolve(as_table(asked)) == asked
    assert as_table(asked)["train"]["augment"] == [
        {"name": "random-crop", "padding": 1},
        {"name": "horizontal-flip", "probability": 0.5},
    ]


def test_the_report_names_the_augmentations(tmp_path: Path) -> None:
    for label, augment in (("with", BOTH), ("without", [])):
        one = experiment(rounds=0, method={"label": label}, train={"augment": augment})
        fedblend.run(one, tmp_path / label)
    training = describe_runs(group(find_runs([tmp_path]))).text
    assert "pictures augmented by random-crop and horizontal-flip or nothing" in training
