"""XOR of samples: drawn, blended, encoded and decoded, by hand and in the kernel."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from xormixfl_helpers import pixels, rng

from fedblend._kernels import build
from fedblend.core.errors import FedblendError
from fedblend.methods.sharing import xor as xor_module
from fedblend.methods.sharing.xor import blend, decode, draw_within, encode, superpose
from fedblend.methods.sharing.xor_seeds import XorSeeds


@pytest.fixture(params=["kernel", "without"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel, and as it is done where there is no compiler."""
    if request.param == "without":
        monkeypatch.setattr(build, "library", lambda source: None)
    elif build.library(xor_module.SOURCE) is None:
        pytest.skip("no C++ compiler")
    return request.param


def test_samples_of_a_label_are_drawn_without_replacement_and_evenly() -> None:
    labels = np.array([1, 0, 1, 1, 0, 1, 1, 2])
    own = np.flatnonzero(labels == 1)
    drawn = draw_within(labels, np.full(12_000, 1), 3, rng())

    assert (labels[drawn] == 1).all()
    assert all(len(np.unique(drawn[:, [a, b]], axis=0)) == 20 for a, b in ((0, 1), (0, 2), (1, 2)))
    assert (np.sort(drawn, axis=1)[:, 1:] != np.sort(drawn, axis=1)[:, :-1]).all()
    # Each of 60 ordered triples about 200 times.
    triples, times = np.unique(drawn, axis=0, return_counts=True)
    assert len(triples) == 60
    assert abs(times - 200).max() < 70
    assert set(drawn[:, 0]) == set(own)


def test_a_label_with_fewer_samples_than_p_is_blended_of_what_there_is() -> None:
    labels = np.array([0, 1, 0, 1, 1, 2])
    drawn = draw_within(labels, np.array([0, 1, 2, 0]), 4, rng())

    assert (drawn >= 0).sum(1).tolist() == [2, 3, 1, 2]
    for row, label in zip(drawn, [0, 1, 2, 0], strict=True):
        taken = row[row >= 0]
        assert sorted(taken) == sorted(np.flatnonzero(labels == label))
        assert (row[len(taken) :] == -1).all()
    assert draw_within(labels, np.empty(0, np.int64), 2, rng()).shape == (0, 2)
    with pytest.raises(FedblendError, match="label 3 is to be blended, but there is no sample of it"):
        draw_within(labels, np.array([0, 3]), 1, rng())


@pytest.mark.parametrize("alpha", ["0.5", "0.25", "0.95", "0.123"])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_blending_rounds_half_to_even_at_each_step(alpha: str, p: int, way: str) -> None:
    x, places = pixels(7), rng(1).integers(7, size=(9, p))
    places[4, p - 1 :] = -1 if p > 1 else places[4, 0]
    made = blend(x, places, float(alpha)).flatten(1).tolist()

    share, flat = Fraction(alpha), x.flatten(1).tolist()
    for row, result in zip(places.tolist(), made, strict=True):
        wanted = flat[row[0]]
        for other in (one for one in row[1:] if one >= 0):
            # Python's round is half to even, and exact on fractions.
            wanted = [round(share * b + (1 - share) * a) for b, a in zip(wanted, flat[other], strict=True)]
        assert result == wanted


@pytest.mark.parametrize("alpha", ["0.5", "0.01", "0.37", "0.9", "0.95", "0.9921875", "0.123", "0.3333", "0.9999"])
def test_every_pair_of_pixels_is_blended_exactly(alpha: str, way: str) -> None:
    share = Fraction(alpha)
    n, d = share.numerator, share.denominator
    b, a = (part.ravel() for part in np.meshgrid(np.arange(256), np.arange(256)))
    x = torch.from_numpy(np.stack([b, a]).astype(np.uint8))
    down, left = np.divmod(n * b + (d - n) * a, d)
    wanted = down + ((2 * left > d) | ((2 * left == d) & (down % 2 == 1)))
    np.testing.assert_array_equal(blend(x, np.array([[0, 1]]), float(alpha))[0].numpy(), wanted)


def test_a_blend_of_samples_that_there_are_not_is_refused(way: str) -> None:
    x, one = pixels(4), np.zeros((1, 1), np.int64)
    for wrong in ([[4]], [[-2]], [[-1]], [[-1, 0]]):
        with pytest.raises(IndexError, match="samples"):
            encode(x, one, np.array(wrong), 0.5)
        with pytest.raises(IndexError, match="samples"):
            blend(x, np.array(wrong), 0.5)
    assert blend(x, np.empty((0, 2), np.int64), 0.5).shape == (0, 1, 5, 5)


def _all(x: torch.Tensor, a: Any, b: Any, noise: torch.Tensor, alpha: float) -> list[torch.Tensor]:
    return [encode(x, a, b, alpha, noise), encode(x, a, b, alpha), decode(noise, x, b, alpha), blend(x, a, alpha)]


def test_the_kernel_and_plain_pytorch_agree_on_samples_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of 4,096 pixels, and what is left of them; rows that are no whole vectors.
    for shape in ((3, 40, 35), (1, 1, 1), (9000,)):
        x, noise = (torch.from_numpy(rng(s).integers(0, 256, (6, *shape), np.uint8)) for s in (0, 1))
        a, b = (draw_within(np.arange(6) % 2, rng(s).integers(2, size=6), 4, rng(s)) for s in (2, 3))
        ways = []
        for library in (build.library, lambda source: None):
            monkeypatch.setattr(build, "library", library)
            ways.append([made for alpha in (0.95, 0.123) for made in _all(x, a, b, noise, alpha)])
        assert all(map(torch.equal, *ways))
        turned = x.transpose(0, -1).contiguous().transpose(0, -1)
        assert torch.equal(blend(turned, a, 0.5), blend(x, a, 0.5))
        monkeypatch.undo()


@pytest.mark.parametrize("p", [1, 3])
def test_the_same_dummy_decodes_to_the_exact_target(p: int, way: str) -> None:
    x = pixels(20)
    targets, dummies = (draw_within(np.zeros(20, np.int64), np.zeros(50, np.int64), p, rng(s)) for s in (1, 2))
    encoded = encode(x, targets, dummies, 0.7)

    assert encoded.dtype == torch.uint8
    assert torch.equal(decode(encoded, x, dummies, 0.7), blend(x, targets, 0.7))
    other = draw_within(np.zeros(20, np.int64), np.zeros(50, np.int64), p, rng(3))
    a, b, c = (blend(x, places, 0.7).numpy() for places in (targets, dummies, other))
    np.testing.assert_array_equal(encoded.numpy(), a ^ b)
    np.testing.assert_array_equal(decode(encoded, x, other, 0.7).numpy(), a ^ b ^ c)


def test_pixels_that_are_worked_on_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = pixels(20, side=7)
    a, b = (draw_within(np.arange(20) % 4, rng(s).integers(4, size=33), 6, rng(s)) for s in (1, 2))
    noise = pixels(33, 5, 7)
    whole = encode(x, a, b, 0.95, noise), decode(noise, x, b, 0.95), blend(x, a, 0.95)
    mixed = superpose(x, [a, b], [0.3, 0.7], 0.95)
    monkeypatch.setattr(xor_module, "CHUNK", 100)
    monkeypatch.setattr(build, "library", lambda source: None)
    assert all(map(torch.equal, whole, (encode(x, a, b, 0.95, noise), decode(noise, x, b, 0.95), blend(x, a, 0.95))))
    assert torch.equal(mixed, superpose(x, [a, b], [0.3, 0.7], 0.95))


def test_an_offset_leaves_no_dummy_pixel_constant_and_never_passes_white(way: str) -> None:
    x = torch.tensor([[0, 0, 200, 255], [7, 7, 7, 7]], dtype=torch.uint8)
    noise = torch.tensor([[0, 9, 99, 9]], dtype=torch.uint8)
    encoded = encode(x, np.array([[1]]), np.array([[0]]), 0.5, noise)
    assert encoded.tolist() == [[7, 7 ^ 9, 7 ^ 255, 7 ^ 255]]

    drawn = XorSeeds(offset=15).dummy_noise(x, 5000, rng())
    assert drawn is not None
    assert sorted(drawn.unique().tolist()) == list(range(16))
    assert XorSeeds().dummy_noise(x, 5, rng()) is None


def test_mixup_is_the_rounded_sum_of_shares() -> None:
    x = torch.tensor([[1, 255, 10], [2, 255, 20], [4, 0, 60]], dtype=torch.uint8)
    one, two, three = (np.array([[k]]) for k in range(3))
    assert superpose(x, [one, two], [0.5, 0.5], 0.5).tolist() == [[2, 255, 15]]
    assert superpose(x, [one, two, three], [1 / 3] * 3, 0.5).tolist() == [[2, 170, 30]]
    assert superpose(x, [one, three], [0.75, 0.25], 0.5).tolist() == [[2, 191, 22]]
