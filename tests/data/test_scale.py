from functools import partial

import numpy as np
import torch
from helpers import each

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.registry import build, known
from fedblend.data.scale import OneHot, Scaler


def images(x: torch.Tensor, kind: str = "image") -> Dataset:
    samples = Samples(x, torch.zeros(len(x), dtype=torch.int64))
    return Dataset("some", kind, samples, samples, ("a", "b"), vocabulary=3)


features = partial(images, kind="features")


def fit(name: str, data: Dataset, **options) -> Scaler:
    made = build("scale", {"name": name, **options}).fit(data)
    assert isinstance(made, Scaler)
    return made


RNG = torch.Generator().manual_seed(0)
INK = torch.randint(0, 256, (50, 1, 6, 6), generator=RNG, dtype=torch.uint8) // 3
COLOUR = torch.randint(0, 256, (50, 3, 6, 6), generator=RNG, dtype=torch.uint8)
NUMBERS = torch.randn(50, 4, generator=RNG) * torch.tensor([1.0, 10.0, 0.1, 0.0]) + torch.tensor([0.0, 5.0, -3.0, 7.0])


@each("x", [INK, COLOUR])
def test_standard_has_mean_0_and_deviation_1_in_each_channel(x):
    scaled = fit("standard", images(x))(x)
    assert scaled.dtype == torch.float32
    assert torch.allclose(scaled.mean((0, 2, 3)), torch.zeros(x.shape[1]), atol=1e-5)
    assert torch.allclose(scaled.var((0, 2, 3), correction=0), torch.ones(x.shape[1]), atol=1e-4)


def test_standard_by_hand():
    scaled = fit("standard", images(torch.tensor([0, 0, 0, 51], dtype=torch.uint8).reshape(4, 1, 1, 1)))
    # In units of ink: 0, 0, 0, 0.2; mean 0.05, deviation 0.05 * sqrt(3).
    expected = torch.tensor([-1, -1, -1, 3]) / 3**0.5
    assert torch.allclose(scaled(torch.tensor([0, 0, 0, 51]).reshape(4, 1, 1, 1)).flatten(), expected)


def test_only_images_of_one_channel_are_inverted():
    assert fit("unit", images(255 - INK)).inverted
    assert not fit("unit", images(INK)).inverted
    assert not fit("unit", images(255 - COLOUR // 3)).inverted
    assert not fit("unit", images(255 - INK), invert=False).inverted
    assert fit("unit", images(COLOUR), invert=True).inverted
    assert torch.allclose(fit("unit", images(255 - INK))(255 - INK), fit("unit", images(INK))(INK), atol=1e-6)


def test_the_median_decides_about_inversion():
    for median in (127, 128):
        x = torch.tensor([0, median, 255], dtype=torch.uint8).reshape(-1, 1, 1, 1)
        assert fit("unit", images(x)).inverted == (median == 128)


def test_ranges_of_images():
    x = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    for name, ends in {"unit": [0, 1], "symmetric": [-1, 1], "none": [0, 255]}.items():
        assert fit(name, images(x))(x).flatten().tolist() == ends


@each("name", ["standard", "unit", "symmetric"])
def test_features_are_scaled_separately(name):
    scaled = fit(name, features(NUMBERS))(NUMBERS)
    assert torch.isfinite(scaled).all()
    if name == "standard":
        assert torch.allclose(scaled.mean(0), torch.zeros(4), atol=1e-4)
        assert torch.allclose(scaled.std(0, correction=0), torch.tensor([1.0, 1, 1, 0]), atol=1e-4)
    else:
        low = {"unit": 0.0, "symmetric": -1.0}[name]
        assert torch.allclose(scaled.amin(0), torch.full((4,), low), atol=1e-4)
        assert torch.allclose(scaled.amax(0)[:3], torch.ones(3), atol=1e-4)


def test_windows_of_channels_are_scaled_by_channel():
    x = torch.randn(20, 3, 7, generator=RNG) * torch.tensor([1.0, 2, 3])[:, None]
    scale = fit("standard", features(x))
    assert scale.factor.shape == (3, 1)
    assert torch.allclose(scale(x).std((0, 2), correction=0), torch.ones(3), atol=1e-5)


@each("name", list(known("scale")))
@each("data", [images(INK), images(255 - INK), images(COLOUR), features(NUMBERS)])
def test_to_unit_and_back(name, data):
    scale = fit(name, data)
    scaled = scale(data.train.x)
    unit = scale.to_unit(scaled)
    assert float(unit.min()) >= 0
    assert float(unit.max()) <= 1
    assert torch.allclose(scale.from_unit(unit), scaled, atol=1e-3, rtol=1e-4)
    if data.kind == "image":
        paper = data.train.x / 255
        assert torch.allclose(unit, 1 - paper if scale.inverted else paper, atol=1e-5)


def test_scaling_copies_and_takes_any_leading_axes():
    x = NUMBERS.clone()
    fit("standard", features(NUMBERS))(x)
    assert torch.equal(x, NUMBERS)
    scale = fit("standard", images(COLOUR))
    assert torch.equal(scale(COLOUR.reshape(5, 10, 3, 6, 6)).reshape(COLOUR.shape), scale(COLOUR))


def test_chunks_change_nothing(monkeypatch):
    whole = fit("standard", images(COLOUR)).describe()
    numbers = fit("standard", features(NUMBERS)).describe()
    monkeypatch.setattr("fedblend.data.scale.CHUNK", 100)
    assert fit("standard", images(COLOUR)).describe() == whole
    assert np.allclose(fit("standard", features(NUMBERS)).describe()["factor"], numbers["factor"])


def test_text_becomes_one_hot_at_every_scale():
    codes = torch.tensor([[0, 2], [1, 1]], dtype=torch.uint8)
    for name in known("scale"):
        scale = build("scale", name).fit(images(codes, "text"))
        assert isinstance(scale, OneHot)
    hot = scale(codes)
    assert hot.dtype == torch.float32
    assert hot.tolist() == [[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [0, 1, 0]]]
    # A mean of one-hot vectors is the mean of embeddings.
    table = torch.randn(3, 5, generator=RNG)
    assert torch.allclose(hot.mean(0) @ table, table[codes.long()].mean(0))
    assert scale.describe() == {"name": "one-hot", "vocabulary": 3}


def test_description_is_plain():
    message = fit("standard", images(255 - INK)).to("cpu").describe()
    assert (message["name"], message["inverted"], type(message["factor"][0])) == ("standard", True, float)


def test_noise_is_sized_for_the_range_that_float32_makes_of_a_scale() -> None:
    def number(value: float) -> torch.Tensor:
        return torch.tensor([[[value]]])

    # Nominally 0.0005, but float32 has steps of 8 here: of the numbers between, samples take two.
    coarse = Scaler("unit", False, number(1000.0), number(2.0**26), number(2e6), number(-1e6))
    zero, one = coarse.ends()
    assert coarse.diameter((1, 2, 2)) == 2 * float((one - zero).abs())
    assert not coarse.is_exact()
    fine = Scaler("unit", False, number(2.0), number(-1.0), number(0.5), number(0.25))
    assert (fine.diameter((1, 2, 2)), fine.is_exact()) == (8.0, True)
