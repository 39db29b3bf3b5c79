"""Sample privacy (Mix2FLD, Tables II and III): distances by hand, and what the command tells and draws."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import PNG, here, refused, succeeded, write
from helpers import each, images, numbers

from fedblend.analysis.privacy.mixup_privacy import (
    LAMBDAS,
    Mixtures,
    jointly_scaled_distances,
    make_mixtures,
    measure_mixtures,
    measure_scaled,
    nearest_rows,
    recognised_share,
    smallest_distances,
)
from fedblend.core.dataset import Dataset, Population, Samples
from fedblend.core.errors import FedblendError
from fedblend.methods.sharing.seeds import Pairs

# MNIST's rows of the two tables.
TABLE_II = (2.163, 4.465, 5.158, 5.564, 5.852, 6.055)


def two_devices() -> Mixtures:
    """Four raw samples, two on each device: the device's own pair, mixed both ways round."""
    raw = torch.randint(0, 256, (4, 1, 3, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pairs = Pairs(np.array([[0, 1], [1, 0]]), 0)
    devices = np.array([0, 0, 1, 1])
    return Mixtures(raw, np.array([4, 9, 9, 4]), devices, np.array([[0, 1], [2, 3]]), np.array([0, 1]), pairs)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def vectors(one: Mixtures) -> np.ndarray:
    return one.raw.double().flatten(1).numpy()


def population(*groups: range) -> Population:
    return Population.of([np.array(group) for group in groups])


def test_the_nearest_contributor_by_hand() -> None:
    raw = torch.tensor([[0, 0], [3, 4], [250, 255]], dtype=torch.uint8)
    samples = torch.tensor([[0.0, 1.0], [250.0, 250.0]])
    assert smallest_distances(samples, raw, np.array([[0, 1], [1, 2]])).tolist() == [1, 5]
    assert smallest_distances(samples, raw, np.array([[1], [2]])).tolist() == [pytest.approx(math.sqrt(18)), 5]


@each("lam", LAMBDAS)
def test_a_mixture_lies_lambda_times_the_distance_of_its_samples_from_the_nearer(lam: float) -> None:
    one = two_devices()
    x = vectors(one)
    apart = np.linalg.norm(x[one.mixed[:, 0]] - x[one.mixed[:, 1]], axis=1)
    np.testing.assert_allclose(
        smallest_distances(one.mixup(lam), one.raw, one.mixed), min(lam, 1 - lam) * apart, rtol=1e-5
    )


@each("lam", LAMBDAS)
def test_an_inversely_mixed_sample_lies_where_its_weights_say(lam: float) -> None:
    one = two_devices()
    s1, s2, t2, t1 = vectors(one)
    # It leaves s'_1 by lambda / (1 - 2 lambda) times lambda (s'_1 - s_1) + (1 - lambda) (s'_2 - s_2).
    first = t1 + lam / (1 - 2 * lam) * (lam * (t1 - s1) + (1 - lam) * (t2 - s2))
    second = s2 + lam / (1 - 2 * lam) * (lam * (s2 - t2) + (1 - lam) * (s1 - t1))
    np.testing.assert_allclose(one.mix2up(lam).flatten(1).numpy(), [first, second], rtol=1e-3, atol=1e-2)
    expected = [min(np.linalg.norm(made - raw) for raw in (s1, s2, t2, t1)) for made in (first, second)]
    np.testing.assert_allclose(smallest_distances(one.mix2up(lam), one.raw, one.contributors), expected, rtol=1e-4)


def test_mixup_grows_as_the_logarithm_of_lambda_as_in_table_2() -> None:
    rows = measure_mixtures([two_devices()], LAMBDAS)
    steps = np.diff(np.log(LAMBDAS))
    np.testing.assert_allclose(np.diff([row.mixup_smallest for row in rows]), steps, atol=1e-5)
    # The paper's own row does so only if its outer columns hold 0.01 and 0.49, not the 0.001 and 0.499 they are headed.
    np.testing.assert_allclose(np.diff(TABLE_II), steps, atol=1.5e-3)


def test_a_row_is_the_smallest_and_the_mean_of_each_draw_averaged() -> None:
    one, lam = two_devices(), 0.2
    twice = replace(one, raw=one.raw // 2 * 2)
    up = [np.log(smallest_distances(m.mixup(lam)[:1], m.raw, m.mixed[:1])) for m in (one, twice)]
    two = [np.log(smallest_distances(m.mix2up(lam), m.raw, m.contributors)) for m in (one, twice)]
    (row,) = measure_mixtures([one, twice], [lam])
    assert row.mixup_smallest == row.mixup_mean == pytest.approx(np.mean(up))
    assert row.mix2up_smallest == pytest.approx(np.mean([logs.min() for logs in two]))
    assert row.mix2up_mean == pytest.approx(np.mean(two))
    with pytest.raises(FedblendError, match="lambda: mixing with the ratios"):
        measure_mixtures([one], [0.5])


@pytest.mark.slow
def test_points_of_a_plane_are_scaled_jointly_without_loss() -> None:
    raw = torch.tensor([[0, 0], [40, 0], [0, 30], [90, 90], [200, 10]], dtype=torch.uint8)
    samples = torch.tensor([[10.0, 0.0], [0.0, 25.0], [100.0, 90.0]])
    contributors = np.array([[0, 1], [2, 0], [3, 1]])

    scaled = jointly_scaled_distances(samples, raw, contributors, rng(1))

    np.testing.assert_allclose(scaled, smallest_distances(samples, raw, contributors), rtol=1e-2)


def test_joint_scaling_is_not_that_of_each_sample_with_its_own() -> None:
    """Two points are always as far apart as before, but seven corners of a simplex have no place in a plane."""
    raw = torch.eye(7, dtype=torch.uint8) * 200
    samples, contributors = raw[:3].double(), np.array([[3], [4], [5]])

    alone = [jointly_scaled_distances(samples[k : k + 1], raw, contributors[k : k + 1], rng(k))[0] for k in range(3)]
    together = jointly_scaled_distances(samples, raw, contributors, rng(0))

    np.testing.assert_allclose(alone, 200 * math.sqrt(2), rtol=1e-3)
    assert np.ptp(together) > 10


def test_scaled_figures_are_those_of_the_distances_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, lam = [two_devices(), two_devices()], 0.2
    monkeypatch.setattr(
        "fedblend.analysis.privacy.mixup_privacy.jointly_scaled_distances",
        lambda *given: smallest_distances(*given[:3]),
    )
    (plain,) = measure_mixtures(draws, [lam])

    found = measure_scaled(draws, lam, 0)

    names = [f"{kind}_{figure}" for kind in ("mixup", "mix2up") for figure in ("smallest", "mean")]
    assert found == {name.replace("_", "_scaled_"): pytest.approx(getattr(plain, name)) for name in names}


def test_recognised_is_whose_nearest_raw_sample_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedblend.analysis.privacy.mixup_privacy.CHUNK", 3)
    draws = rng(4)
    raw = torch.from_numpy(draws.integers(0, 256, (10, 2, 3)).astype(np.uint8))
    samples = torch.from_numpy(draws.uniform(0, 255, (6, 2, 3)))
    distances = np.linalg.norm((samples.numpy()[:, None] - raw.double().numpy()[None]).reshape(6, 10, -1), axis=2)
    assert nearest_rows(samples, raw).tolist() == distances.argmin(1).tolist()
    own = distances.argmin(1)
    others = (own + 1) % 10
    contributors = np.stack([others, np.where(np.arange(6) < 2, own, others)], 1)
    assert recognised_share(samples, raw, contributors) == pytest.approx(2 / 6)


def test_a_draw_mixes_labels_within_devices_and_pairs_across_them() -> None:
    data = images(60, classes=3)
    one = make_mixtures(data, population(range(20), range(20, 40), range(40, 60)), seed=5, devices=3, samples=12)
    assert len(one.mixed) == len(one.owner) == 36
    assert len(one.pairs.chosen) == 12
    assert (one.labels[:, 0] != one.labels[:, 1]).all()
    assert (one.holder[one.mixed] == one.owner[:, None]).all()
    s, t = one.pairs.chosen.T
    assert (one.owner[s] != one.owner[t]).all()
    assert (one.labels[s] == one.labels[t][:, ::-1]).all()
    assert one.contributors.shape == (12, 4)
    # Every raw sample is one of the data set's, with its own label.
    for image, label in zip(one.raw, one.y, strict=True):
        assert label in data.train.y[(data.train.x == image).flatten(1).all(1)].tolist()


def test_draws_are_keyed() -> None:
    data, clients = images(60, classes=3), population(range(30), range(30, 60))
    first, again, other, seeded = (
        make_mixtures(data, clients, *key, samples=8) for key in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert (first.mixed == again.mixed).all()
    assert (first.pairs.chosen == again.pairs.chosen).all()
    assert (first.mixed != other.mixed).any()
    assert (first.mixed != seeded.mixed).any()


def test_devices_that_cannot_mix_are_passed_over() -> None:
    data = images(60, classes=3)
    of_one_label = range(0, 60, 3)
    one = make_mixtures(data, population(of_one_label, range(0), range(20), range(20, 40)), seed=0, samples=6)
    assert len(one.raw) == 40
    with pytest.raises(FedblendError, match=r"--devices 3: only 2 of 3 clients .* valid: 2 to 2"):
        make_mixtures(data, population(of_one_label, range(20), range(20, 40)), seed=0, devices=3)
    with pytest.raises(FedblendError, match=r"partition: 1 of 2 clients hold samples of two labels"):
        make_mixtures(data, population(of_one_label, range(20)), seed=0)


def test_data_that_cannot_be_mixed_are_told() -> None:
    with pytest.raises(FedblendError, match=r"'numbers' is regression"):
        make_mixtures(numbers(), population(range(10), range(10, 20)), seed=0)
    codes = Samples(torch.zeros(8, 4, dtype=torch.uint8), torch.arange(8) % 2)
    with pytest.raises(FedblendError, match=r"'words' is text"):
        make_mixtures(Dataset("words", "text", codes, codes, ("a", "b")), population(range(4), range(4, 8)), seed=0)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_privacy_samples_tells_and_draws() -> None:
    file = write(Path("tiny.toml"))
    words = ("privacy", "samples", file, "--samples", "30", "--repeats", "2", "--lambdas")
    shown = succeeded(here(*words, "0.1,0.4")).out
    assert "digits: 30 samples, 2 devices" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith(("   0.1", "   0.4"))]
    assert [len(row) for row in rows] == [7, 7]
    smallest, mean = np.array([row[1:3] for row in rows], float).T
    np.testing.assert_allclose([smallest[1] - smallest[0], mean[1] - mean[0]], math.log(4), atol=2e-3)
    assert (smallest < mean).all()
    drawn = succeeded(here(*words, "0.4", "--out", "seen/here")).out
    assert Path("seen/here/lambda-0.4.png").read_bytes().startswith(PNG)
    assert drawn.splitlines()[2].split() == rows[1]
    assert "Pictures: seen/here" in drawn


def test_repeated_pairs_are_told() -> None:
    file = write(Path("tiny.toml"))
    shown = succeeded(here("privacy", "samples", file, "--samples", "25", "--repeats", "2")).out
    # 25 mixtures of each of two devices make 25 * 25 / 90 = 7 pairs of symmetric labels on average, each used twice.
    assert "repeat a pair" in shown


def test_privacy_samples_refuses_what_it_cannot_measure() -> None:
    file = write(Path("tiny.toml"))
    start = ("privacy", "samples", file, "--repeats", "1")
    refused(here(*start, "--lambdas", "0.1,x"), "--lambdas '0.1,x' is not valid")
    refused(here(*start, "--lambdas", "1.0"), "--lambdas '1.0' is not valid")
    refused(here(*start, "--lambdas", "0.5"), "lambda: mixing with the ratios [0.5, 0.5] has no inverse")
    refused(here(*start, "--devices", "9"), "--devices 9: only 4 of 4 clients")
    refused(
        here(*start, "--samples", "1"),
        "--samples 1: none of 2 mixtures",
        "more samples of each device, or coordinated labels (--",
    )
    succeeded(here(*start, "--samples", "1", "--coordinated"))
    Path("taken").write_text("")
    refused(here(*start, "--out", "taken"), "--out taken: cannot be used as a folder")
