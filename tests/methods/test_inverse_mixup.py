"""Mixup, its inverse (Mix2FLD) and coordinated labels, on cases worked by hand and against plain references."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy
import torch
from helpers import each, examples, images, run, setup
from hypothesis import assume, given
from hypothesis import strategies as st

from fedblend.analysis.privacy.mixup_privacy import make_mixtures
from fedblend.core.errors import FedblendError
from fedblend.core.registry import build
from fedblend.core.setup import Setup
from fedblend.data.partitions.prepare import prepare
from fedblend.engines.loop_engine import LoopEngine
from fedblend.methods.sharing.seeds import (
    MixedSeeds,
    Pairs,
    coordinate,
    inverse_ratio,
    mix,
    pair_across,
    pairs_of_labels,
    pairs_to_mix,
    unmix_pairs,
)

SEEDS = st.integers(0, 2**32 - 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@each("lam", [0.01, 0.1, 0.2, 0.3, 0.4, 0.49, 0.6])
def test_two_mixtures_solve_equations_9_and_10(lam: float) -> None:
    hat = inverse_ratio(lam)
    assert hat == pytest.approx(lam / (2 * lam - 1), rel=1e-12)
    assert hat * lam + (1 - hat) * (1 - lam) == pytest.approx(1, abs=1e-12)
    assert hat * (1 - lam) + (1 - hat) * lam == pytest.approx(0, abs=1e-12)


@each(
    ("lam", "told"),
    [(0.5, "has no inverse"), (1.2, "a number from 0 to 1"), (-0.2, "a number"), (float("nan"), "a number")],
)
def test_mixing_without_an_inverse_is_refused(lam: float, told: str) -> None:
    with pytest.raises(FedblendError, match=f"lambda: .*{told}"):
        inverse_ratio(lam)


def test_a_mixture_is_that_of_equation_6() -> None:
    x = torch.tensor([[[200]], [[100]], [[250]]], dtype=torch.uint8)
    mixed = mix(x, np.array([[0, 1], [2, 0]]), 0.1)
    torch.testing.assert_close(mixed, torch.tensor([[[110.0]], [[205.0]]]))
    assert mix(x.double(), np.array([[0, 1]]), 0.1).dtype == torch.float64


@examples(100)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=30), SEEDS)
def test_mixed_samples_have_different_labels(labels: list[int], seed: int) -> None:
    assume(len(set(labels)) > 1)
    y = np.array(labels)
    pairs = pairs_to_mix(y, 50, rng(seed))
    assert pairs.shape == (50, 2)
    assert (y[pairs[:, 0]] != y[pairs[:, 1]]).all()
    assert pairs.min() >= 0
    assert pairs.max() < len(y)


def test_pairs_to_mix_are_uniform_over_all_pairs_of_different_labels() -> None:
    y = np.array([2, 0, 0, 2, 5, 0])
    valid = [(i, j) for i, j in itertools.permutations(range(len(y)), 2) if y[i] != y[j]]
    drawn = Counter(map(tuple, pairs_to_mix(y, 20_000, rng()).tolist()))
    assert set(drawn) == set(valid)
    assert scipy.stats.chisquare([drawn[pair] for pair in valid]).pvalue > 1e-3


def test_a_device_with_one_label_cannot_mix() -> None:
    with pytest.raises(FedblendError, match=r"3 samples of 1 label cannot mix"):
        pairs_to_mix(np.array([4, 4, 4]), 2, rng())


def brute_force(labels: np.ndarray, owner: np.ndarray) -> set[tuple[int, int]]:
    """All valid pairs, looked at one after another."""
    return {
        (s, t)
        for s, t in itertools.permutations(range(len(owner)), 2)
        if owner[s] != owner[t] and labels[s].tolist() == labels[t].tolist()[::-1] and labels[s][0] != labels[s][1]
    }


def mixtures(seed: int, count: int, classes: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    draw = rng(seed)
    a = draw.integers(classes, size=count)
    return np.stack([a, (a + draw.integers(1, classes, size=count)) % classes], 1), draw.integers(devices, size=count)


@examples(60)
@given(SEEDS, st.integers(2, 25), st.integers(2, 4), st.integers(1, 4))
def test_pairs_are_all_symmetric_pairs_across_devices(seed: int, count: int, classes: int, devices: int) -> None:
    labels, owner = mixtures(seed, count, classes, devices)
    valid = brute_force(labels, owner)
    assume(valid)
    all_of_them = pair_across(labels, owner, len(valid), rng(seed))
    assert set(map(tuple, all_of_them.chosen.tolist())) == valid
    assert (len(all_of_them.chosen), all_of_them.repeated) == (len(valid), 0)
    more = pair_across(labels, owner, len(valid) + 7, rng(seed))
    assert set(map(tuple, more.chosen.tolist())) == valid
    assert (len(more.chosen), more.repeated) == (len(valid) + 7, 7)


@pytest.mark.slow
def test_pairs_are_drawn_uniformly() -> None:
    labels, owner = mixtures(1, 12, 3, 3)
    valid = sorted(brute_force(labels, owner))
    assert len(valid) > 6
    drawn = Counter(tuple(pair_across(labels, owner, 1, rng(k)).chosen[0].tolist()) for k in range(3000))
    assert scipy.stats.chisquare([drawn[pair] for pair in valid]).pvalue > 1e-3


@each(
    ("labels", "owner"),
    [
        ([[0, 1], [1, 0]], [3, 3]),  # symmetric, but on one device
        ([[0, 1], [0, 1]], [0, 1]),  # on two devices, but not symmetric
        ([[0, 1], [2, 0]], [0, 1]),
        ([[1, 1], [1, 1]], [0, 1]),  # nothing would be left
        (np.empty((0, 2), np.int64), []),
    ],
)
def test_where_nothing_matches_it_is_told(labels: list[list[int]], owner: list[int]) -> None:
    with pytest.raises(FedblendError, match=r"none of \d mixtures of \d devices has a partner"):
        pair_across(np.array(labels), np.array(owner, np.int64), 1, rng())


@pytest.mark.parametrize("lam", [0.01, 0.1, 0.4, 0.49])
def test_swapped_identical_samples_come_back(lam: float) -> None:
    x = torch.randint(0, 256, (2, 1, 5, 5), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    mixed = mix(x, np.array([[0, 1], [1, 0]]), lam)
    labels = np.array([[7, 3], [3, 7]])
    pairs = pair_across(labels, np.array([0, 1]), 2, rng())
    made, y = unmix_pairs(mixed, labels, pairs, lam)
    expected = {7: x[0].float(), 3: x[1].float()}
    assert sorted(y.tolist()) == [3, 7]
    for sample, label in zip(made, y.tolist(), strict=True):
        torch.testing.assert_close(sample, expected[label], atol=2e-2 if lam > 0.45 else 1e-3, rtol=0)


def test_samples_of_the_target_label_remain_and_the_others_cancel() -> None:
    # Samples s1, s2 and s'2, s'1, in this order: their labels are 5, 6 and 6, 5.
    lam = 0.3
    x = torch.eye(4, dtype=torch.float64)
    mixed = mix(x, np.array([[0, 1], [2, 3]]), lam)
    made, y = unmix_pairs(mixed, np.array([[5, 6], [6, 5]]), Pairs(np.array([[0, 1], [1, 0]]), 0), lam)
    a, b, c = lam**2, lam * (1 - lam), (1 - lam) ** 2
    by_hand = torch.tensor([[a, b, -b, -c], [-b, -c, a, b]], dtype=torch.float64) / (2 * lam - 1)
    torch.testing.assert_close(made, by_hand)
    assert y.tolist() == [5, 6]
    by_label = made @ torch.tensor([[1, 0], [0, 1], [0, 1], [1, 0]], dtype=torch.float64)
    torch.testing.assert_close(by_label, torch.eye(2, dtype=torch.float64))


def test_pixels_leave_their_range_and_are_not_clipped() -> None:
    mixed = mix(torch.tensor([[0.0], [255.0]]), np.array([[0, 1], [0, 1]]), 0.4) * torch.tensor([[1.0], [0.0]])
    made, _ = unmix_pairs(mixed, np.array([[5, 6], [6, 5]]), Pairs(np.array([[0, 1]]), 0), 0.4)
    assert made.item() == pytest.approx(-2 * 0.6 * 255)


@examples(100)
@given(SEEDS, st.integers(2, 9), st.integers(2, 6), st.integers(1, 8))
def test_every_coordinated_mixture_has_a_partner(seed: int, devices: int, classes: int, count: int) -> None:
    held = rng(seed).random((devices, classes)) < 0.6
    assume(any((held[d] & held[e]).sum() >= 2 for d, e in itertools.combinations(range(devices), 2)))
    wanted = coordinate(held, count, rng(seed))
    assert wanted.shape == (devices, count, 2)
    for slot in range(count):
        asked = [(d, *wanted[d, slot].tolist()) for d in range(devices) if wanted[d, slot, 0] >= 0]
        assert len(asked) >= 2
        ways = Counter((a, b) for _, a, b in asked)
        (a, b), *rest = ways
        assert rest == [(b, a)]
        assert a != b
        assert abs(ways[a, b] - ways[b, a]) <= 1
        assert {d for d, *_ in asked} == {d for d in range(devices) if held[d, a] and held[d, b]}


def test_devices_that_share_no_two_labels_cannot_be_coordinated() -> None:
    with pytest.raises(FedblendError, match=r"no two of 3 devices hold the same two labels"):
        coordinate(np.eye(3, 5, dtype=bool) | np.eye(3, 5, 1, dtype=bool), 2, rng())


def test_labels_that_a_device_lacks_are_told() -> None:
    with pytest.raises(FedblendError, match=r"requested labels \[3\] of a device"):
        pairs_of_labels(np.array([0, 1, 1]), np.array([[0, 1], [3, 0]]), rng())


LINEAR = {"name": "mlp", "hidden": []}
CLASSES = 10


def made(coordinated: bool, **changes: object) -> Setup:
    """Four devices with samples of all of ten labels, which mix three pairs each."""
    method = {"name": "mix2fld", "sharing": {"samples": 3, "coordinated": coordinated}, "server_step": {"steps": 1}}
    groups = [range(50 * k, 50 * k + 50) for k in range(4)]
    return setup(images(n=200, classes=CLASSES), groups, method=method, model=LINEAR, **changes)


def partners(on: Setup) -> list[int]:
    """For each mixture that was sent, how many of other devices have its labels the other way round."""
    state, _ = run(on, 1)
    labels, owner = state.entries.tensors["y"].numpy().astype(int), state.entries.owner
    symmetric = (labels[:, None, :] == labels[None, :, ::-1]).all(2)
    return list((symmetric & (owner[:, None] != owner)).sum(1))


def test_every_coordinated_mixture_has_a_partner_on_another_device() -> None:
    found = partners(made(coordinated=True))
    assert len(found) == 12
    assert min(found) >= 1
    # Of 90 ordered pairs of labels, twelve drawn at random hardly ever match all.
    assert min(partners(made(coordinated=False))) == 0


def test_a_device_mixes_samples_of_the_labels_that_it_is_asked_for() -> None:
    on = made(coordinated=True)
    sizes = on.sizes(0)
    asked = on.requests(sizes)
    for client, payload in LoopEngine(on).share(0, on.weights(), range(4), sizes):
        assert payload["y"].tolist() == asked[client].pairs.tolist()
        assert set(payload["y"].flatten().tolist()) <= set(on.data.train.y[on.population.indices(client)].tolist())


def test_labels_are_those_of_the_samples_that_have_arrived() -> None:
    on = made(coordinated=True)
    labels = on.data.train.y.numpy()
    sizes = np.array([0, 1, 7, 50])

    held = on.labels_held(sizes)

    for client, size in enumerate(sizes):
        own = labels[on.population.indices(client)[:size]]
        assert np.flatnonzero(held[client]).tolist() == np.unique(own).tolist()


def test_what_was_lost_is_asked_for_again_with_the_same_labels() -> None:
    on = made(coordinated=True)
    first, again = on.requests(on.sizes(0)), on.requests(on.sizes(1))
    assert all((first[client].pairs == again[client].pairs).all() for client in range(4))


def test_a_device_that_nobody_asks_says_so() -> None:
    on = made(coordinated=True)
    local = LoopEngine(on).local(0, 10, np.random.default_rng(0), 1)
    with pytest.raises(FedblendError, match="coordinated: true, but the server requested no labels of this device"):
        MixedSeeds(coordinated=True).share(local)


def test_real_sites_cannot_be_coordinated() -> None:
    on = made(coordinated=True)
    far = replace(on, population=replace(on.population, order=on.population.order[:0]))
    with pytest.raises(FedblendError, match="coordinated: true, but clients are real sites; valid: false"):
        far.requests(far.sizes(0))


def test_sample_privacy_of_many_classes_repeats_no_pair_where_labels_match() -> None:
    data = images(n=200, classes=CLASSES)
    population = prepare(build("partition", {"name": "iid", "clients": 2}), data, 0)

    alone = make_mixtures(data, population, 0, samples=20)
    together = make_mixtures(data, population, 0, samples=20, coordinated=True)

    assert alone.pairs.repeated > 0
    assert together.pairs.repeated == 0
    s, t = together.labels[together.pairs.chosen[:, 0]], together.labels[together.pairs.chosen[:, 1]]
    assert (s == t[:, ::-1]).all()
