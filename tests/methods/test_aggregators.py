"""Aggregators: worked by hand, against NumPy, under outliers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from aggregators_helpers import GATHERING
from helpers import each, examples
from hypothesis import given
from hypothesis import strategies as st

from fedblend.core.aggregator import Aggregator
from fedblend.methods.aggregators import robust as of_rows
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.aggregators.robust import IntervalMean, Krum, Median, MultiKrum, TrimmedMean, scores


def uploads_of(values: Any, weights: Sequence[float] | None = None) -> list[Any]:
    """One tensor "w" a client, from rows of numbers."""
    rows = torch.as_tensor(np.asarray(values, np.float32))
    return [({"w": row.clone()}, 1.0 if weights is None else weights[k]) for k, row in enumerate(rows)]


def result_of(aggregator: Aggregator, uploads: list[Any], start: Any = None) -> torch.Tensor:
    """What a round that began at ``start`` (zeros) becomes."""
    weights = {"w": torch.zeros_like(uploads[0][0]["w"]) if start is None else torch.as_tensor(start)}
    return aggregator.finish(aggregator.partial(iter(uploads)), weights)["w"]


def shape(rng: np.random.Generator) -> tuple[int, ...]:
    """Shapes of one and more dimensions, and those of scalars and of nothing."""
    return [(), (0,), (1,), (3, 5), (16, 17), (2, 3, 5, 7)][rng.integers(6)]


@each(
    ("aggregator", "values", "expected"),
    [
        (Median(), [[5, 1], [-3, 1], [4, 7]], [4, 1]),
        (Median(), [[5, 1], [-3, 1], [4, 7], [100, 2]], [4.5, 1.5]),
        (Median(), [[5, 1]], [5, 1]),
        (TrimmedMean(share=0.25), [[5, 1], [-3, 1], [4, 7], [100, 2]], [4.5, 1.5]),
        (TrimmedMean(share=0.2), [[1, 9], [2, 0], [3, 5], [40, 4], [-9, 3]], [2, 4]),
        (TrimmedMean(share=0.3), [[1, 9], [2, 0], [3, 5], [40, 4], [-9, 3]], [2, 4]),
        # 0.29 of 100 are 29, though 0.29 * 100 < 29 in floating point.
        (TrimmedMean(share=0.29), [[0]] * 29 + [[1]] * 71, [1]),
        (TrimmedMean(share=0), [[1, 9], [2, 0], [6, 3]], [3, 4]),
        (TrimmedMean(share=0.499999999999), [[1, 9], [2, 0]], [1.5, 4.5]),
        (IntervalMean(low=-2, high=2), [[1, 3], [2, -1], [2.5, 4]], [1.5, -1]),
        (IntervalMean(low=-2, high=2), [[5, 3], [-5, 2]], [0, 2]),
    ],
)
def test_worked_by_hand(aggregator: Aggregator, values: Any, expected: Any) -> None:
    assert result_of(aggregator, uploads_of(values)).tolist() == expected


LINE = [0, 5, 6, 7, 9, 15, 22]
"""Uploads of one parameter. With f = 1, n - f - 2 = 4 nearest others, scores are 191, 46, 47, 58, 65, ..."""


def test_krum_worked_by_hand() -> None:
    uploads = uploads_of([[value] for value in LINE])
    distances = of_rows.squared_distances([u["w"] for u, _ in uploads])

    assert distances.tolist() == [[(a - b) ** 2 for b in LINE] for a in LINE]
    assert scores(distances, 1).tolist()[:5] == [191, 46, 47, 58, 65]
    assert result_of(Krum(byzantine=1), uploads).tolist() == [5]
    assert result_of(MultiKrum(byzantine=1, kept=1), uploads).tolist() == [5]
    assert result_of(MultiKrum(byzantine=1, kept=3), uploads).tolist() == [6]
    # All but f: 22 is left out.
    assert result_of(MultiKrum(byzantine=1), uploads).tolist() == [7]


@each("place", [0, 1, 2])
def test_distances_are_those_over_all_tensors(place: int) -> None:
    names = ["abc"[(place + k) % 3] for k in range(3)]
    uploads = [
        (
            {names[0]: torch.tensor([value]), names[1]: torch.zeros(2, 2), names[2]: torch.tensor(5 * (value == 6.0))},
            1.0,
        )
        for value in map(float, LINE)
    ]

    found = Krum(byzantine=1).aggregate([(dict(sorted(tensors.items())), weight) for tensors, weight in uploads])

    assert found[names[0]].tolist() == [5]


def test_of_equal_scores_the_first_client_wins() -> None:
    uploads = uploads_of([[1.0], [0.0], [1.0], [0.0], [1.0], [0.0]])
    assert result_of(Krum(byzantine=1), uploads).tolist() == [1]
    assert result_of(Krum(byzantine=1), uploads[1:] + uploads[:1]).tolist() == [0]


def test_an_interval_lies_around_the_rounds_weights_and_its_mean_is_weighted() -> None:
    start = [10.0, -10.0, 1.0]
    uploads = uploads_of([[10.5, -10.0, 3.0], [9.5, -9.75, 0.0], [11.0, -12.0, 0.0]], [1.0, 3.0, 5.0])
    found = result_of(IntervalMean(), uploads, start)
    # Both ends belong to the interval; the third client is outside of it everywhere, as all are at the last place.
    assert found.tolist() == [10 + (0.5 - 3 * 0.5) / 4, -10 + (0 + 3 * 0.25) / 4, 1.0]


def test_the_interval_may_be_of_weights_or_of_deviations() -> None:
    uploads = uploads_of([[0.2, 3.0], [0.4, 2.0], [0.9, 1.0]])
    # Of [0.2, 0.4, 0.9] two lie within 0.5, of the others none.
    assert result_of(IntervalMean(of="weights"), uploads, [5.0, 5.0]).tolist() == pytest.approx([0.3, 5.0])
    # Means 0.5 and 2, deviations 0.294 and 0.816: within half of one are 0.4 and 2 alone.
    assert result_of(IntervalMean(of="deviations"), uploads, [5.0, 5.0]).tolist() == pytest.approx([0.4, 2.0])


def by_numpy(aggregator: Aggregator, rows: np.ndarray, weights: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The same in float64, as one would write it with all uploads in one array."""
    wide = rows.astype(np.float64)
    if isinstance(aggregator, Median):
        return np.median(wide, axis=0)
    if isinstance(aggregator, TrimmedMean):
        trimmed = int(aggregator.share * len(rows) + 1e-9)
        return np.sort(wide, axis=0)[trimmed : len(rows) - trimmed].mean(0)
    if isinstance(aggregator, IntervalMean):
        updates = np.ma.masked_outside(wide - start, aggregator.low, aggregator.high)
        averaged = np.ma.average(updates, axis=0, weights=weights)
        return start + np.ma.filled(averaged, 0.0)
    flat = wide.reshape(len(rows), -1)
    distances = np.square(flat[:, None] - flat[None]).sum(2)
    near = np.sort(distances, axis=1)[:, 1 : len(rows) - aggregator.byzantine - 1].sum(1)
    kept = getattr(aggregator, "kept", 1)
    return wide[np.argsort(near, kind="stable")[:kept]].mean(0)


@each("aggregator", GATHERING)
@each("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each("seed", range(6))
def test_equal_to_numpy(aggregator: Aggregator, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients, size = int(rng.choice([5, 6, 11, 32, 100])), shape(rng)
    rows = torch.from_numpy(rng.normal(1, 2, (clients, *size))).to(dtype)
    weights = rng.integers(1, 9, clients).astype(float)
    start = torch.from_numpy(rng.normal(0, 1, size)).to(dtype)
    uploads = [({"w": row}, weight) for row, weight in zip(rows, weights, strict=True)]

    found = aggregator.finish(aggregator.partial(uploads), {"w": start})["w"]

    expected = by_numpy(aggregator, rows.double().numpy(), weights, start.double().numpy())
    assert (found.shape, found.dtype) == (start.shape, dtype)
    torch.testing.assert_close(found, torch.from_numpy(np.asarray(expected)).to(dtype))


def test_tensors_that_are_not_contiguous() -> None:
    rows = np.random.default_rng(0).normal(0, 1, (5, 40, 30)).astype(np.float32)
    uploads = [({"w": torch.from_numpy(row).t()}, 1.0) for row in rows]
    for aggregator in GATHERING:
        straight = result_of(aggregator, uploads_of(rows))
        torch.testing.assert_close(result_of(aggregator, uploads, torch.zeros(30, 40)), straight.t())


def test_chunks_cover_every_number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_rows, "CPU_CHUNK", 30)
    rows = [torch.arange(67.0) + 100 * k for k in range(3)]
    found = list(of_rows.chunks(rows))
    assert torch.equal(torch.cat([chunk for _, chunk in found], dim=1), torch.stack(rows))
    assert [place.start for place, _ in found] == list(range(0, 67, 10))


@each("aggregator", [*GATHERING, WeightedMean()])
@each("place", [0, 3, 7])
def test_a_client_of_weight_0_changes_nothing(aggregator: Aggregator, place: int) -> None:
    uploads = uploads_of(np.random.default_rng(0).normal(0, 1, (7, 20)))
    alone = result_of(aggregator, uploads)
    uploads.insert(place, ({"w": torch.full((20,), float("nan"))}, 0.0))
    assert torch.equal(result_of(aggregator, uploads), alone)


@each("aggregator", GATHERING)
def test_whole_numbers_stay_so_and_take_no_part_in_distances(aggregator: Aggregator) -> None:
    values, counters = [[0.0], [0.1], [0.2], [9.0], [0.25]], [9, 50, 1000, 20, 31]
    uploads = [
        ({"w": torch.tensor(v), "n": torch.tensor(n)}, float(1 + k))
        for k, (v, n) in enumerate(zip(values, counters, strict=True))
    ]

    found = aggregator.finish(aggregator.partial(uploads), {"w": torch.zeros(1), "n": torch.tensor(5)})

    expected = {
        "median": 31,
        "trimmed-mean": round((50 + 20 + 31) / 3),
        "interval-mean": round((9 + 100 + 3000 + 80 + 155) / 15),
        "krum": 1000,  # of the client of 0.2, whose two nearest are 0.25 and 0.1; the next is that of 0.1
        "multi-krum": (50 + 1000) // 2,
    }
    assert found["n"].dtype == torch.int64
    assert found["n"].item() == expected[aggregator.name]
    assert abs(found["w"].item()) < 1


@each("aggregator", [*GATHERING, WeightedMean()])
def test_uploads_are_left_as_they_were_and_the_result_is_none_of_them(aggregator: Aggregator) -> None:
    uploads = uploads_of(np.random.default_rng(0).normal(0, 1, (7, 300)))
    copies = [u["w"].clone() for u, _ in uploads]
    found = result_of(aggregator, uploads)
    found.zero_()
    assert all(torch.equal(u["w"], c) for (u, _), c in zip(uploads, copies, strict=True))


@given(
    seed=st.integers(0, 10**6),
    byzantine=st.integers(0, 3),
    far=st.sampled_from([50.0, 1e6, 1e18, 3e38]),
    alike=st.booleans(),
)
@examples(60)
def test_krum_takes_an_honest_upload_and_multi_krum_none_of_the_others(
    seed: int, byzantine: int, far: float, alike: bool
) -> None:
    rng = np.random.default_rng(seed)
    honest = rng.uniform(-1, 1, (byzantine + 3 + int(rng.integers(3)), 30))
    evil = np.full((byzantine, 30), far) if alike else far * np.sign(rng.normal(0, 1, (byzantine, 30)))
    rows = rng.permutation(np.concatenate([honest, evil]).astype(np.float32))
    one = result_of(Krum(byzantine=byzantine), uploads_of(rows)).numpy()
    several = result_of(MultiKrum(byzantine=byzantine), uploads_of(rows)).numpy()
    assert (one == honest.astype(np.float32)).all(1).any()
    np.testing.assert_allclose(several, honest.mean(0), rtol=1e-5, atol=1e-6)


def near_each_other(far: float) -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
    """Uploads that differ by little and lie far from zero, one of them at ``far``; exact distances; the others."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy((1000 + 1e-3 * rng.normal(0, 1, (9, 5000))).astype(np.float32))
    if far:
        rows[4] = far
    wide = rows.double()
    return list(rows), (wide[:, None] - wide).square().sum(2), [k for k in range(9) if k != 4 or not far]


@each("far", [0.0, 3e4, 1e18, 1e30])
def test_distances_between_near_uploads_far_from_the_origin(far: float) -> None:
    rows, exact, honest = near_each_other(far)
    found = of_rows.squared_distances(rows)
    assert torch.equal(found, found.t())
    torch.testing.assert_close(found[honest][:, honest], exact[honest][:, honest], rtol=1e-5, atol=0)
    if far:
        assert (found[4, honest] > 1e3 * found[0, 1]).all()
