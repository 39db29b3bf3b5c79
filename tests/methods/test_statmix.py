"""StatMix: the channel statistics that clients share, and images that get those of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, federation_of, images, local, run, setup
from torch.nn import functional as F

from fedblend.analysis.privacy import membership
from fedblend.core.context import Batch, Context, StepPlan
from fedblend.core.dataset import Dataset
from fedblend.core.setup import Setup, model_spec
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.statmix import StatMix
from fedblend.methods.sharing.channel_statistics import ChannelStatistics, channel_statistics

MLP = {"name": "mlp", "hidden": [6]}


def coloured(n: int = 40) -> Dataset:
    """Images of three channels, each of its own brightness and contrast."""
    grey = images(n)
    halves = (
        replace(half, x=torch.cat([half.x, half.x // 2 + 9, 255 - half.x], 1)) for half in (grey.train, grey.test)
    )
    return Dataset("coloured", "image", *halves, grey.classes)


def share(sharing: ChannelStatistics, made: Setup, minimum: int = 1) -> Any:
    train = made.data.train
    return sharing.share(local(train.x, train.y, made.task, made.scale, minimum=minimum))


def test_statistics_of_an_image_by_hand() -> None:
    """Pixels 1, 3, 5, 7: mean 4, deviations 3, 1, 1, 3, so sqrt(5); a channel of one value deviates by 0."""
    x = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]], [[2.0, 2.0], [2.0, 2.0]]]])
    mean, std = channel_statistics(x)
    assert mean.tolist() == [[4.0, 2.0]]
    assert std[0].tolist() == pytest.approx([5**0.5, 0.0])


@pytest.mark.parametrize("data", [images, coloured])
@pytest.mark.parametrize("samples", [7, "all"])
def test_a_client_shares_those_of_some_of_its_images_each_once(data: Any, samples: Any) -> None:
    made = setup(data(), model=MLP)
    payload = share(ChannelStatistics(samples=samples), made)

    inputs = made.scale(made.data.train.x).numpy()
    all_of = {
        (*np.round(image.mean((1, 2)), 4), *np.round(image.std((1, 2)), 4)) for image in inputs.astype(np.float64)
    }
    rows = np.concatenate([payload["mean"], payload["std"]], 1).round(4)
    channels = made.data.train.x.shape[1]
    assert rows.shape == (40 if samples == "all" else 7, 2 * channels)
    near = [min(np.abs(np.array(one) - row).max() for one in all_of) for row in rows]
    assert max(near) < 2e-4
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("data", [images, coloured])
def test_overall_statistics_are_those_of_all_pixels_of_all_images(data: Any) -> None:
    made = setup(data(), model=MLP)
    payload = share(ChannelStatistics(of="client"), made)
    pixels = made.scale(made.data.train.x).double().numpy().swapaxes(0, 1).reshape(made.data.train.x.shape[1], -1)
    np.testing.assert_allclose(payload["mean"], pixels.mean(1)[None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(payload["std"], pixels.std(1)[None], rtol=1e-5)


def test_overall_statistics_need_as_many_images_as_the_policy_demands() -> None:
    made, overall = setup(images(), model=MLP), ChannelStatistics(of="client")
    assert share(overall, made, minimum=41) is None
    assert share(overall, made, minimum=40) is not None
    assert (overall.most_entries(40, 41), overall.most_entries(40, 40)) == (0, 1)
    assert (ChannelStatistics().most_entries(40, 41), ChannelStatistics(samples="all").most_entries(90, 2)) == (40, 90)


def test_bytes_are_two_numbers_a_channel_and_image() -> None:
    made = setup(coloured(), method={"name": "statmix", "sharing": {"samples": 4}}, model=MLP)
    _, (record, again) = run(federation_of(made), 2)

    entries = 4 * 4
    assert record["bytes_up"]["statistics"] == entries * 2 * 3 * 4
    new = set(again["cohort"]) - set(record["cohort"])
    assert record["bytes_down"]["statistics"] == 2 * entries * 2 * 3 * 4
    assert again["bytes_down"].get("statistics", 0) == len(new) * entries * 2 * 3 * 4
    assert "statistics" not in again["bytes_up"]


@each(
    ("payload", "words"),
    [
        ({"mean": torch.zeros(2, 3), "std": torch.tensor([[1.0, 0, 0], [1.0, -0.1, 1.0]])}, "'std' is negative"),
        ({"mean": torch.zeros(2, 3), "std": torch.zeros(1, 3)}, "valid: mean and std, each of images and 3 channels"),
        ({"mean": torch.zeros(2, 1), "std": torch.zeros(2, 1)}, "tensors of shapes"),
        ({"mean": torch.zeros(2, 3)}, "tensors of shapes"),
        ({"std": torch.zeros(2, 3)}, "tensors of shapes"),
        ({"mean": torch.zeros(2, 3), "std": torch.zeros(2, 3)}, None),
    ],
)
def test_statistics_that_no_images_have_are_refused(payload: dict[str, torch.Tensor], words: str | None) -> None:
    made = setup(coloured(), model=MLP)
    fault = ChannelStatistics().fault(payload, 10, model_spec(made, made.model))
    assert fault is None if words is None else words in str(fault)


@pytest.mark.parametrize("data", [images, coloured])
def test_images_get_the_drawn_statistics_and_keep_their_shape(data: Any) -> None:
    made = setup(data(), model=MLP)
    batch = Batch(made.scale(made.data.train.x[:4]), made.data.train.y[:4])
    pool = share(ChannelStatistics(samples=6), made)
    drawn = {"style": torch.tensor([5, 0, 2, 2, 1]), "styled": torch.tensor([True, False, True, True, True])}
    context = Context(made.task, made.scale, pool)

    value = StatMix().loss(EagerNet(made.model), batch, drawn, context)

    changed = batch.x.double().numpy().copy()
    for i, (entry, styled) in enumerate([(5, True), (0, False), (2, True), (2, True)]):
        for c in range(changed.shape[1]) if styled else ():
            pixels = changed[i, c]
            normal = (pixels - pixels.mean()) / pixels.std()
            changed[i, c] = float(pool["std"][entry, c]) * normal + float(pool["mean"][entry, c])
    assert value.item() == pytest.approx(
        F.cross_entropy(made.model(torch.from_numpy(changed).float()), batch.y).item(), rel=1e-4
    )


def test_a_channel_of_one_value_stays_of_one_value() -> None:
    made = setup(images(), model=MLP)
    batch = Batch(torch.full((1, 1, 4, 4), 3.0), torch.tensor([0]))
    drawn = {"style": torch.tensor([0]), "styled": torch.tensor([True])}
    pool = {"mean": torch.tensor([[0.5]]), "std": torch.tensor([[2.0]])}
    made_of = StatMix().changed(batch, drawn, Context(made.task, made.scale, pool))
    assert made_of.x.unique().tolist() == [0.5]


def plan(own: list[bool]) -> StepPlan:
    return StepPlan(np.full(3000, 2), 2, 0, np.array(own), len(own))


def test_statistics_are_of_others_with_the_probability() -> None:
    drawn = StatMix(probability=0.3).draw(np.random.default_rng(0), plan([True, False, False, True]))
    assert set(drawn["style"].ravel()) == {1, 2}
    assert abs(drawn["styled"].mean() - 0.3) < 0.03
    anyone = StatMix(exclude_own=False).draw(np.random.default_rng(0), plan([True, False, False, True]))
    assert set(anyone["style"].ravel()) == {0, 1, 2, 3}
    assert not StatMix(probability=1.0).draw(np.random.default_rng(0), plan([True, True]))["styled"].any()


def test_statistics_of_all_images_give_their_members_away() -> None:
    made = setup(images(n=60), [list(range(0, 20)), list(range(20, 40))], model=MLP)
    rows = torch.from_numpy(made.population.order)

    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(channel_statistics(made.scale(x)), 1)

    entries = read(made.data.train.x[rows])

    assert membership.of_entries(made, entries, read) == 1.0
