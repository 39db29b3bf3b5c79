"""Sample privacy of XorMixFL's and MixFL's seeds: distances, scaling and leaks by hand, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import PNG, here, refused, succeeded, write
from helpers import images, numbers

from fedblend.analysis.privacy.xor_privacy import SharedSeeds, bit_majorities, make_seeds, mds_distances, measure_seeds
from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def by_hand() -> SharedSeeds:
    """One seed of four pixels: target 12 0 255 8, dummy 0 0 1 8, decoded with 0 4 1 8."""
    raw = torch.tensor([[12, 0, 255, 8], [0, 0, 1, 8], [90, 90, 90, 90], [0, 4, 1, 8]], dtype=torch.uint8)
    seed = raw[:1] ^ raw[1:2]
    made = seed ^ raw[3:]
    usual = torch.tensor([[0, 0, 1, 0]], dtype=torch.uint8)
    return SharedSeeds(
        raw, 3, np.array([[0]]), np.array([[1]]), np.array([[3]]), raw[:1], seed, made, seed ^ usual, usual
    )


def world_of(rows: list[list[int]], **options: int) -> tuple[Dataset, Population]:
    """Images of three labels at clients by counts."""
    data = images(90, classes=3, side=6, **options)
    y, groups, used = data.train.y.numpy(), [], np.zeros(3, int)
    for row in rows:
        groups.append(np.concatenate([np.flatnonzero(y == c)[used[c] : used[c] + n] for c, n in enumerate(row)]))
        used += row
    return data, Population.of(groups)


def test_what_leaks_of_one_seed_by_hand() -> None:
    row = measure_seeds([by_hand()])

    # Sent are 12 0 254 0, of which the first two pixels are the target's own; of its ink only the first.
    assert row.clear == 2 / 4
    assert row.clear_ink == pytest.approx(1 / 3)
    # Decoded with the usual dummy 0 0 1 0: 12 0 255 0, which is wrong in one bit of 32.
    assert row.bits == pytest.approx(31 / 32)
    # 0 0 1 0 against 12 0 255 8: wrong in two, seven, and one bit.
    assert row.blind == pytest.approx(1 - 10 / 32)
    # Made are 12 4 255 8, 4 from the target.
    assert row.distance == (4.0, 0.0)
    assert row.mds is None
    assert row.sent_recognised == row.made_recognised == 1.0


def test_a_mixture_has_distances_and_no_dummy_to_undo() -> None:
    one = by_hand()
    half = torch.tensor([[6, 0, 128, 8]], dtype=torch.uint8)
    one.raw[2] = torch.tensor([6, 0, 120, 8])
    mixture = SharedSeeds(
        one.raw, 3, one.targets, one.dummies, np.empty((1, 0), np.int64), one.blended, half, half, None, None
    )
    row = measure_seeds([mixture])
    assert row.distance[0] == pytest.approx(np.sqrt(36 + 127**2))
    assert row.clear is row.clear_ink is row.bits is row.blind is None
    # The third raw sample, of another, is the nearest.
    assert row.sent_recognised == 0.0


def test_the_majority_of_each_bit() -> None:
    x = torch.tensor([[1, 255], [3, 0], [7, 255], [8, 8]], dtype=torch.uint8)
    made = bit_majorities(x, torch.tensor([0, 0, 0, 2]), 3)
    assert made.tolist() == [[3, 255], [0, 0], [8, 8]]


def test_points_in_a_plane_keep_their_distances() -> None:
    pixels = np.zeros((10, 1, 4, 4), np.uint8)
    pixels[:, 0, 0, :2] = rng(1).integers(0, 256, (10, 2))
    raw, samples = torch.from_numpy(pixels[:8]), torch.from_numpy(pixels[8:])
    contributors = np.array([[0, 1, 2, 3], [7, 6, 5, 1]])

    found = mds_distances(samples, raw, contributors, rng(2))

    apart = np.linalg.norm(pixels[8:, None].astype(float) - pixels[contributors].astype(float), axis=(3, 4))
    np.testing.assert_allclose(found, apart.squeeze(2).min(1), rtol=1e-2)


def test_without_scikit_learn_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(FedblendError, match=r'needs the package scikit-learn.*pip install "\.\[analysis\]"'):
        mds_distances(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), np.zeros((1, 1), np.int64), rng(0))


@pytest.mark.parametrize("p", [1, 3])
def test_a_draw_says_what_each_seed_was_made_of(p: int) -> None:
    data, clients = world_of([[9, 9, 2], [9, 9, 4], [8, 8, 5]])
    sharing = XorSeeds(p=p, alpha=0.5)
    one = make_seeds(data, clients, sharing, 3)

    assert len(one.seeds) == 7
    assert one.device_samples == 43
    assert len(one.raw) == 63
    owner = np.repeat([1, 2, 0], [22, 21, 20])
    labels = np.concatenate([data.train.y.numpy()[clients.indices(c)] for c in (1, 2, 0)])
    assert (labels[one.targets] == 2).all()
    assert (owner[one.targets] == owner[one.dummies[:, :1]]).all()
    assert (owner[one.server_dummies] == 0).all()
    assert (labels[one.server_dummies] == labels[one.dummies]).all()
    if p == 1:
        target, dummy, own = (one.raw[rows[:, 0]] for rows in (one.targets, one.dummies, one.server_dummies))
        assert torch.equal(one.seeds, target ^ dummy)
        assert torch.equal(one.server_samples, target ^ dummy ^ own)
        assert torch.equal(one.blended, target)
        assert measure_seeds([one]).clear == pytest.approx(float((dummy == 0).float().mean()))
    again = make_seeds(data, clients, sharing, 3)
    assert torch.equal(one.server_samples, again.server_samples)
    assert not torch.equal(one.seeds, make_seeds(data, clients, sharing, 3, repeat=1).seeds)


def test_an_offset_hides_what_a_black_dummy_tells() -> None:
    data, clients = world_of([[9, 9, 2], [9, 9, 4], [8, 8, 5]])
    data.train.x[data.train.y < 2, :, 1:] = 0  # labels 0 and 1 are black but for one pixel
    plain, hidden = (measure_seeds([make_seeds(data, clients, XorSeeds(offset=o), 0)]) for o in (0, 255))

    assert plain.clear > 0.8 > 0.05 > hidden.clear
    assert plain.bits > 0.9 > 0.6 > hidden.bits


def test_mixtures_are_drawn_too() -> None:
    data, clients = world_of([[9, 9, 2], [9, 9, 4], [8, 8, 5]])
    one = make_seeds(data, clients, MixedTargetSeeds(equal_parts=True), 0)
    assert one.dummies.shape == (7, 2)
    mean = sum(one.raw[rows].double() for rows in (one.targets[:, 0], *one.dummies.T.copy())) / 3
    assert float((one.server_samples.double() - mean).abs().max()) <= 0.5 + 1e-6


def test_what_cannot_be_measured() -> None:
    data, clients = world_of([[9, 9, 2], [9, 9, 0], [8, 8, 0]])
    with pytest.raises(FedblendError, match="no device holds samples that the server requests"):
        make_seeds(data, clients, XorSeeds(), 0)
    with pytest.raises(FedblendError, match=r"method\.sharing\.server: 3"):
        make_seeds(data, clients, XorSeeds(server=3), 0)
    with pytest.raises(FedblendError, match="does not hold 8-bit pixels"):
        make_seeds(numbers(), clients, XorSeeds(), 0)


FILE = {
    "methods": ["xormixfl", "mixfl", "standalone"],
    "data": {"name": "mnist5k"},
    "partition": {"name": "xormixfl", "clients": 3, "targets": [9], "samples": 40, "target_samples": 4},
    "train": {"cohort": 3},
}


@pytest.mark.slow
def test_the_command_tells_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = write(tmp_path / "seeds.toml", FILE)
    options = ("--blended", "1,2", "--mds", "--out", str(tmp_path / "p"), "--json", str(tmp_path / "j" / "told.json"))
    shown = succeeded(here("privacy", "xor", str(file), *options))
    wanted = [(method, p) for method in ("xormixfl", "mixfl") for p in (1, 2)]
    rows = [line.split() for line in shown.out.splitlines() if line.startswith(("xormixfl", "mixfl", "stand"))]
    assert [(row[0], int(row[1])) for row in rows] == wanted
    drawn = list((tmp_path / "p").iterdir())
    assert {path.name for path in drawn} == {"side-by-side.png", *(f"{method}-p-{p}.png" for method, p in wanted)}
    assert all(path.read_bytes().startswith(PNG) for path in drawn)
    told = json.loads((tmp_path / "j" / "told.json").read_text())
    assert told["repeats"] == 1
    assert [(row["method"], row["p"]) for row in told["rows"]] == wanted
    assert told["rows"][2]["clear"] is None
    assert f"{100 * told['rows'][0]['clear']:.1f}%" in shown.out


def test_the_command_refuses_what_has_no_seeds(tmp_path: Path) -> None:
    file = write(tmp_path / "seeds.toml", {**FILE, "methods": ["standalone"]})
    refused(here("privacy", "xor", str(file)), "base-samples", "xor-seeds")
    refused(here("privacy", "xor", str(file), "--blended", "0"), "--blended")
