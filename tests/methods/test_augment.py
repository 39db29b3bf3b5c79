"""AugMix as Pillow and Fed-AugMix's equations say; augmentation of local training by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    RAGGED,
    each,
    engine_of,
    examples,
    experiment,
    images,
    same_up_to_rounding,
    setup,
    slow_after_first,
    slow_except,
)
from hypothesis import given
from hypothesis import strategies as st
from objectives_helpers import step_of_sgd
from PIL import Image, ImageOps
from PIL.Image import Resampling, Transform
from torch.nn import functional as F

import fedblend
from fedblend._kernels import build
from fedblend.core.engine import TrainTask
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.data.loaders.small import Digits, Mnist5k
from fedblend.data.scale import Scaler
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import as_table, resolve
from fedblend.methods.augment.augmix import NOTHING, OPERATIONS, apply, augmix, blend_images, blended, draw_augmix
from fedblend.methods.augment.pictures import HorizontalFlip, RandomCrop, augmented, draw
from fedblend.report.description import describe_runs
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import group

Draw = dict[str, torch.Tensor]


@functools.cache
def pictures(name: str) -> torch.Tensor:
    """Real images, uint8 [24, C, H, W]: digits of two sizes, and pieces of two colour photographs."""
    if name == "photographs":
        from sklearn.datasets import load_sample_images  # a second's import

        pieces = [
            photo[top : top + 32, left : left + 40]
            for photo in load_sample_images().images
            for top in (30, 150, 260)
            for left in (40, 200, 360, 500)
        ]
        return torch.from_numpy(np.stack(pieces)).permute(0, 3, 1, 2).contiguous()
    data = {"digits": Digits, "mnist": Mnist5k}[name]().load()
    return data.train.x[:: len(data.train) // 24][:24].contiguous()


def coloured() -> torch.Tensor:
    """Digits in three channels of their own, in [0, 1]."""
    grey = pictures("mnist")
    return torch.cat([grey, 255 - grey, grey // 2], 1) / 255


KINDS = ("digits", "mnist", "photographs")


def as_image(picture: torch.Tensor) -> Image.Image:
    array = picture.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def as_tensor(image: Image.Image) -> torch.Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def by_pillow(image: Image.Image, operation: str, level: float) -> Image.Image:
    """The operation as AugMix's own code asks Pillow for it, at this SampLevel, negative for the other direction."""
    size, sign = abs(level), -1 if level < 0 else 1
    width, height = image.size

    def moved(*matrix: float) -> Image.Image:
        return image.transform(image.size, Transform.AFFINE, matrix, resample=Resampling.BILINEAR)

    made: dict[str, Callable[[], Image.Image]] = {
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "posterize": lambda: ImageOps.posterize(image, 4 - int(size * 4 / 10)),
        "rotate": lambda: image.rotate(sign * int(size * 30 / 10), resample=Resampling.BILINEAR),
        "solarize": lambda: ImageOps.solarize(image, 256 - int(size * 256 / 10)),
        "shear_x": lambda: moved(1, sign * (size * 0.3 / 10), 0, 0, 1, 0),
        "shear_y": lambda: moved(1, 0, 0, sign * (size * 0.3 / 10), 1, 0),
        "translate_x": lambda: moved(1, 0, sign * int(size * (width / 3) / 10), 0, 1, 0),
        "translate_y": lambda: moved(1, 0, 0, 0, 1, sign * int(size * (height / 3) / 10)),
    }
    return made[operation]()


def levels(count: int, seed: int = 0) -> np.ndarray:
    """SampLevels of both signs over the whole range, float32."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(0.1, 9.999, count) * rng.choice([-1, 1], count)).astype(np.float32)


def by_kernel(images: torch.Tensor, operations: np.ndarray, level: np.ndarray) -> torch.Tensor:
    """The kernel's view that is one chain of these operations [N, depth] alone, as uint8."""
    drawn = (torch.from_numpy(a[:, None, None]) for a in (operations.astype(np.int8), level))
    alone = torch.tensor([0.0, 1.0]).expand(len(images), 1, 2)
    return (blend_images(images, *drawn, alone)[0] * 255).round().to(torch.uint8)


def by_tensors(images: torch.Tensor, operations: np.ndarray, level: np.ndarray) -> torch.Tensor:
    """The same in plain PyTorch."""
    made = images.double()
    for step in range(operations.shape[1]):
        made = apply(made, torch.from_numpy(operations[:, step]), torch.from_numpy(level[:, step]))
    return made.to(torch.uint8)


WAYS = {"kernel": by_kernel, "tensors": by_tensors}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_gives_pillows_grey_levels(operation: str, kind: str, way: str) -> None:
    images = pictures(kind)
    level = levels(len(images))

    made = WAYS[way](images, np.full((len(images), 1), OPERATIONS.index(operation)), level[:, None])

    wanted = torch.stack(
        [as_tensor(by_pillow(as_image(x), operation, float(s))) for x, s in zip(images, level, strict=True)]
    )
    assert int((made.int() - wanted.int()).abs().max()) == 0
    assert kind != "photographs" or not torch.equal(made, images)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", slow_after_first(KINDS))
def test_chains_compose_in_order(kind: str, way: str) -> None:
    images = pictures(kind)
    rng = np.random.default_rng(1)
    operations = rng.integers(len(OPERATIONS) + 1, size=(len(images), 3))
    level = levels(operations.size, 2).reshape(operations.shape)

    made = WAYS[way](images, operations, level)

    for x, numbers, sizes, one in zip(images, operations, level, made, strict=True):
        image = as_image(x)
        for number, size in zip(numbers, sizes, strict=True):
            image = image if number == NOTHING else by_pillow(image, OPERATIONS[number], float(size))
        assert torch.equal(one, as_tensor(image))


@each("way", WAYS)
@each("operation", OPERATIONS)
@each("grey", [0, 1, 128, 255])
def test_flat_images_are_as_pillow_leaves_them(grey: int, operation: str, way: str) -> None:
    images = torch.full((2, 1, 9, 7), grey, dtype=torch.uint8)
    images[1, 0, 0, 0] = 200
    made = WAYS[way](images, np.full((2, 1), OPERATIONS.index(operation)), np.full((2, 1), -7.3, np.float32))
    for x, one in zip(images, made, strict=True):
        assert torch.equal(one, as_tensor(by_pillow(as_image(x), operation, float(np.float32(-7.3)))))


def drawn_for(shape: tuple[int, ...], seed: int = 0, severity: float = 8.0, chains: int = 3) -> Draw:
    made = draw_augmix(np.random.default_rng(seed), shape, severity, chains, 3, 1.0)
    return {name: torch.from_numpy(array) for name, array in made.items()}


def with_mix(drawn: Draw, mix: torch.Tensor) -> Draw:
    return {**drawn, "mix": mix.expand_as(drawn["mix"]).contiguous()}


@pytest.mark.parametrize("kind", slow_except(KINDS[:2], KINDS))
def test_a_view_is_the_mixture_of_the_image_and_its_chains(kind: str) -> None:
    unit = pictures(kind)[:6] / 255
    drawn = drawn_for((6,))

    made = augmix(unit, drawn)

    # Each weight alone gives the image itself, or one of the chains.
    alone = torch.stack([augmix(unit, with_mix(drawn, row)) for row in torch.eye(4)])
    assert torch.allclose(alone[0], unit.expand_as(made), atol=1e-6)
    weights = drawn["mix"].permute(2, 1, 0)[..., None, None, None]
    assert made.shape == (2, *unit.shape)
    torch.testing.assert_close(made, (weights * alone).sum(0), atol=1e-6, rtol=0)
    # So it lies in their convex hull.
    assert bool((made <= alone.amax(0) + 1e-6).all())
    assert bool((made >= alone.amin(0) - 1e-6).all())
    assert float((made[0] - made[1]).abs().max()) > 0.05


@pytest.mark.parametrize("kind", slow_except(KINDS[:2], KINDS))
def test_kernel_and_plain_tensors_agree(kind: str) -> None:
    greys = pictures(kind)
    drawn = drawn_for((len(greys),), severity=10.0)
    given = (drawn["operation"], drawn["level"], drawn["mix"])
    by_library, plainly = blend_images(greys, *given), blended(greys.double(), *given)
    torch.testing.assert_close(by_library.double(), plainly, atol=1e-6, rtol=0)


def test_without_a_compiler_the_views_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, drawn = pictures("mnist")[:5] / 255, drawn_for((5,))
    wanted = augmix(unit, drawn)
    monkeypatch.setattr(build, "library", lambda source: None)
    torch.testing.assert_close(augmix(unit, drawn), wanted, atol=1e-6, rtol=0)


def test_a_stack_of_clients_is_augmented_as_each_alone() -> None:
    unit = coloured().view(4, 6, 3, 28, 28)
    drawn = drawn_for((4, 6))

    together = augmix(unit, drawn)
    mapped = torch.vmap(augmix)(unit, drawn)
    same_images = torch.vmap(augmix, in_dims=(None, 0))(unit[0], drawn)

    assert together.shape == (4, 2, 6, 3, 28, 28)
    assert torch.equal(mapped, together)
    for k in range(4):
        alone = {name: values[k] for name, values in drawn.items()}
        assert torch.equal(together[k], augmix(unit[k], alone))
        assert torch.equal(same_images[k], augmix(unit[0], alone))


def test_no_images_make_no_views() -> None:
    assert augmix(torch.zeros(0, 1, 8, 8), drawn_for((0,))).shape == (2, 0, 1, 8, 8)


def test_draws_have_the_papers_distributions() -> None:
    drawn = draw_augmix(np.random.default_rng(0), (400, 10), 6.0, 3, 3, 1.0)
    operation, level, mix = drawn["operation"], drawn["level"], drawn["mix"]

    assert operation.shape == level.shape == (400, 10, 2, 3, 3)
    assert (operation.dtype, level.dtype, mix.dtype) == (np.int8, np.float32, np.float32)
    done = operation != NOTHING
    lengths = done.sum(-1)
    assert (done == (np.arange(3) < lengths[..., None])).all()  # nothing comes last
    near = {"rel": 0.05}
    assert np.bincount(lengths.ravel())[1:] / lengths.size == pytest.approx([1 / 3] * 3, **near)
    assert np.bincount(operation[done]) / done.sum() == pytest.approx([1 / 9] * 9, rel=0.06)
    assert (np.abs(level).min(), np.abs(level).max()) == pytest.approx((0.1, 6.0), abs=1e-2)
    assert np.abs(level).mean() == pytest.approx(3.05, **near)
    assert (level < 0).mean() == pytest.approx(0.5, **near)
    assert mix.shape == (400, 10, 2, 4)
    assert (mix >= 0).all()
    assert mix.sum(-1) == pytest.approx(1.0, abs=1e-6)
    # m is uniform, and so the three others share a half.
    assert mix.mean((0, 1, 2)) == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6], **near)
    assert mix[..., 0].var() == pytest.approx(1 / 12, **near)
    # b ~ Dirichlet(1, 1, 1): each share has variance 1/18.
    assert (mix[..., 1] / mix[..., 1:].sum(-1)).var() == pytest.approx(1 / 18, rel=0.06)


@examples(30)
@given(st.floats(0.01, 10), st.integers(1, 4), st.integers(1, 4), st.floats(0.2, 5), st.integers(0, 100))
def test_draws_are_in_range_for_all_settings(s: float, chains: int, depth: int, alpha: float, seed: int) -> None:
    drawn = draw_augmix(np.random.default_rng(seed), (3, 2), s, chains, depth, alpha)
    again = draw_augmix(np.random.default_rng(seed), (3, 2), s, chains, depth, alpha)

    assert drawn["operation"].shape == (3, 2, 2, chains, depth)
    assert (drawn["operation"][..., 0] < NOTHING).all()  # a chain has one operation at least
    low, high = sorted((0.1, s))
    assert (np.abs(drawn["level"]) >= np.float32(low) * (1 - 1e-6)).all()
    assert (np.abs(drawn["level"]) <= np.float32(high) * (1 + 1e-6)).all()
    assert drawn["mix"].sum(-1) == pytest.approx(1.0, abs=1e-5)
    assert all(np.array_equal(drawn[name], again[name]) for name in drawn)


def test_views_that_are_differentiated_are_the_same_views() -> None:
    unit, drawn = coloured()[:6], drawn_for((6,))
    torch.testing.assert_close(augmix(unit.clone().requires_grad_(), drawn), augmix(unit, drawn), atol=1e-6, rtol=0)


@each("operation", [name for name in OPERATIONS if "_" in name or name == "rotate"])
def test_the_gradient_of_a_geometric_operation_is_its_transpose(operation: str) -> None:
    images = pictures("mnist").double().requires_grad_()
    number = torch.full((len(images),), OPERATIONS.index(operation))
    weights = torch.rand(images.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    made = apply(images, number, torch.from_numpy(levels(len(images))))
    (gradient,) = torch.autograd.grad((weights * made).sum(), images)

    # It is linear but for the cut to whole levels, which takes less than one from each.
    gap = ((gradient * images).sum() - (weights * made).sum()).item()
    assert -1e-6 <= gap <= float(weights.sum())
    assert gap > 1 or "translate" in operation


def test_gradients_pass_tables_with_their_slopes() -> None:
    images = torch.tensor([10.0, 60.0, 110.0, 210.0], dtype=torch.float64).view(1, 1, 2, 2).repeat(4, 1, 1, 1)
    images.requires_grad_()
    numbers = torch.tensor([OPERATIONS.index(n) for n in ("autocontrast", "solarize", "posterize", "equalize")])

    made = apply(images, numbers, torch.full((4,), 5.0))
    (gradient,) = torch.autograd.grad(made.sum(), images)

    assert gradient[0].flatten().tolist() == pytest.approx([255 / 200] * 4)
    assert gradient[1].flatten().tolist() == [1, 1, 1, -1]  # 256 - 128 = 128: only 210 is turned over
    assert gradient[2].flatten().tolist() == [1] * 4
    assert gradient[3].flatten().tolist() == [1] * 4


BOTH = [{"name": "random-crop", "padding": 1}, "horizontal-flip"]


def federation(**train: Any) -> Setup:
    settings = {"cohort": 6, "epochs": 2, "batch_size": 4, "lr": 0.05, "augment": BOTH, **train}
    return setup(images(), RAGGED, train=settings)


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
        seen = augmented(made.training.augment, x[rows], torch.from_numpy(choices[a:b]), made.scale.background(x))
        step_of_sgd(model, F.cross_entropy(model(made.scale(seen)), y[rows]), made.experiment.train.lr_in(3))
    same_up_to_rounding(update.weights, dict(model.state_dict()), steps=3)


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
