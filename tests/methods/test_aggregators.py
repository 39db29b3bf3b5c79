"""Aggregators: worked by hand, against NumPy, under outliers, and in runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import CHECKPOINT, here, records, succeeded, write
from federation_helpers import BATCH_NORM, FLOATS, ROWS, losing, train, with_parts
from helpers import (
    BatchNormNet,
    each,
    engine_of,
    examples,
    federation,
    federation_of,
    iid,
    run,
    same,
    setup,
    slow_after_first,
    without_machine,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedblend.core.aggregator import Aggregator
from fedblend.core.callbacks import Callback
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.methods.aggregators import robust as of_rows
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.aggregators.robust import IntervalMean, Krum, Median, MultiKrum, TrimmedMean, scores

GATHERING: list[Aggregator] = [
    Median(),
    TrimmedMean(share=0.2),
    IntervalMean(low=-2, high=2),
    Krum(byzantine=1),
    MultiKrum(byzantine=1, kept=2),
]


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
    tensors = [(torch.tensor([v]), torch.zeros(2, 2), torch.tensor(5 * (v == 6.0))) for v in map(float, LINE)]
    uploads = [(dict(sorted(zip(names, of_one, strict=True))), 1.0) for of_one in tensors]

    found = Krum(byzantine=1).aggregate(uploads)

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


@given(rows=ROWS)
@examples(60)
def test_the_mean_is_weighted_by_samples(rows: list[tuple[list[float], int]]) -> None:
    mean = WeightedMean().aggregate(uploads_of([v for v, _ in rows], [w for _, w in rows]))["w"]
    expected = np.average([v for v, _ in rows], axis=0, weights=[w for _, w in rows])
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-6)


@given(value=st.lists(FLOATS, min_size=1, max_size=5), weights=st.lists(st.integers(1, 10_000), min_size=1, max_size=9))
@examples(60)
def test_equal_uploads_average_to_themselves_exactly(value: list[float], weights: list[int]) -> None:
    mean = WeightedMean().aggregate(({"w": torch.tensor(value)}, float(w)) for w in weights)
    assert torch.equal(mean["w"], torch.tensor(value))


def test_a_client_without_samples_changes_nothing() -> None:
    groups = [range(7), range(7, 20), range(20, 25)]
    with_empty = federation(groups=[*groups, []], train={"cohort": 3}, method="fedmix")
    without = federation(groups=groups, train={"cohort": 3}, method="fedmix")

    (state, records), (expected, expected_records) = run(with_empty, 3), run(without, 3)

    assert same(state.weights, expected.weights)
    assert same(state.entries.tensors, expected.entries.tensors)
    assert without_machine(records) == without_machine(expected_records)


def test_the_mean_keeps_types_and_rounds_whole_numbers() -> None:
    pairs = [
        ({"a": torch.tensor([1.0]), "b": torch.tensor(4), "c": torch.tensor([1.0], dtype=torch.float64)}, 1.0),
        ({"a": torch.tensor([2.0]), "b": torch.tensor(9), "c": torch.tensor([4.0], dtype=torch.float64)}, 2.0),
    ]

    mean = WeightedMean().aggregate(pairs)

    assert {n: t.dtype for n, t in mean.items()} == {"a": torch.float32, "b": torch.int64, "c": torch.float64}
    assert mean["a"].item() == pytest.approx(5 / 3, rel=1e-7)
    assert mean["b"].item() == 7  # 22 / 3, rounded
    assert mean["c"].item() == pytest.approx(3, rel=1e-15)


def test_a_round_averages_its_cohort_by_number_of_samples() -> None:
    made = setup(groups=[range(4), range(4, 20), range(20, 40)], train={"cohort": 3})

    state, records = run(federation_of(made), 1)

    uploads = train(made, range(3))
    for name, tensor in state.weights.items():
        total = sum(uploads[k].weights[name].double() * n for k, n in enumerate((4, 16, 20)))
        torch.testing.assert_close(tensor, (total / 40).float(), rtol=1e-6, atol=1e-7)
    losses = sum(uploads[k].loss * n for k, n in enumerate((4, 16, 20))) / 40
    assert records[0]["train_loss"] == pytest.approx(losses)


class Extras(Callback):
    """What the good uploads of a round had beside their models."""

    def on_updates(self, task: Any, result: Any) -> None:
        self.each = [result.each_extras[client] for client, _, _ in result.good]


LIAR = {"name": "sign-flip", "share": 0.2, "factor": 1e6}


@each(
    ("aggregator", "expected"),
    [
        ("median", lambda rows, honest: np.median(rows, 0)),
        ({"name": "trimmed-mean", "share": 0.2}, lambda rows, honest: np.sort(rows, 0)[1:4].mean(0)),
        ("multi-krum", lambda rows, honest: rows[honest].mean(0)),
        ("krum", None),
    ],
)
def test_a_robust_aggregator_also_takes_what_goes_beside_the_model(aggregator: Any, expected: Any) -> None:
    made, seen = setup(method={"name": "scaffold", "aggregator": aggregator}, adversary=LIAR, **iid(5)), Extras()

    state, _ = run(RoundLoop(made, engine_of(made), [seen]), 1)

    controls = {name: control.double().numpy() for name, control in state.server_part("terms.0").items()}
    rows = {n: np.stack([e[f"terms.0/{n}"].double().numpy() for e in seen.each]) for n in controls}
    honest = np.flatnonzero(~made.adversaries)
    if expected is None:
        assert any(all(np.array_equal(controls[n], rows[n][k]) for n in controls) for k in honest)
    for name, control in controls.items():
        largest = np.abs(rows[name][honest]).max()
        assert np.abs(rows[name]).max() > 1e3 * largest
        # SCAFFOLD's control variate begins at 0; all five clients of the federation take part.
        assert np.abs(control).max() <= largest * (1 + 1e-6)
        if expected:
            np.testing.assert_allclose(control, expected(rows[name], honest), rtol=1e-5, atol=1e-7)


def test_a_mean_sums_what_an_adversary_sends_beside_its_model() -> None:
    plain = {"name": "scaffold", "aggregator": {"name": "mean", "by": "clients"}}
    (honest, _), (lied, _) = (run(federation(method=plain, adversary=a, **iid(5)), 1) for a in ("none", LIAR))

    one, other = (state.server_part("terms.0") for state in (honest, lied))
    assert all(other[name].abs().max() > 1e3 * one[name].abs().max() for name in one)


def test_a_client_that_sends_no_numbers_beside_its_model_is_refused() -> None:
    nan = {"name": "nan", "share": 0.2}
    state, (record,) = run(federation(method={"name": "scaffold", "aggregator": "median"}, adversary=nan, **iid(5)), 1)
    assert len(record["refused"]) == 1
    assert all(torch.isfinite(control).all() for control in state.server_part("terms.0").values())


class Mistaken(Aggregator):
    """An author's mistake: what ``made`` returns for the first client's tensors."""

    name = "mistaken"

    def __init__(self, made: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        vars(self)["made"] = made

    def aggregate(self, uploads: Any) -> Any:
        return vars(self)["made"](uploads[0][0])


@each(
    ("made", "told"),
    [
        (lambda tensors: (tensors, 1.0), "'mistaken' returned what is no model.*tuple, where a dict of tensors by"),
        (lambda tensors: dict(list(tensors.items())[1:]), r"'mistaken' returned what is no model.*missing \['"),
        # A run ended as done with a model of zeros.
        (
            lambda tensors: {name: tensor.long() for name, tensor in tensors.items()},
            r"returned what is no model.*has whole numbers \(torch.int64\), where torch.float32 is valid",
        ),
        (
            lambda tensors: {name: tensor / 0 for name, tensor in tensors.items()},
            "^round 1: the server's model: '.*' holds NaN or infinity after method.aggregator 'mistaken'; "
            "valid: smaller steps, or other parts of the method$",
        ),
    ],
)
def test_what_an_own_aggregator_returns_is_checked(made: Any, told: str) -> None:
    with pytest.raises(FedblendError, match=told):
        run(with_parts(setup(rounds=1), aggregator=Mistaken(made)), 1)


def test_a_model_that_is_no_number_names_each_part_that_changed_it() -> None:
    made = federation(
        rounds=1,
        method={"aggregator": {"name": "mean", "by": "clients"}, "terms": [{"name": "feddyn", "alpha": 1e-300}]},
        protection={"name": "noise", "clip": 1.0, "multiplier": 1.0, "side": "server"},
    )
    told = (
        "^round 1: the server's model: '.*' holds NaN or infinity after method.aggregator 'mean' and protection "
        "'noise' and method.terms.0 'feddyn'; valid: smaller steps, or other parts of the method$"
    )
    with pytest.raises(FedblendError, match=told):
        run(made, 1)


class Masked(BatchNormNet):
    """A network whose state has a mask of attention, which is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))


def test_infinity_that_no_round_makes_is_no_fault_of_a_round() -> None:
    model = {"name": "module", "path": f"{__name__}:Masked"}
    state, records = run(federation(model=model, rounds=2, method="fd"), 2)
    assert [record["uploads"] for record in records] == [2, 2]
    assert torch.equal(state.weights["mask"], Masked().mask)


def test_a_client_beyond_the_range_of_a_secure_mean_sends_nothing() -> None:
    attack = {"name": "sign-flip", "share": 0.25, "factor": 1e6}
    made = federation(**iid(4), method={"aggregator": "secure-mean"}, adversary=attack)
    _, (record,) = run(made, 1)
    (refused,) = record["refused"]
    assert record["uploads"] == 3
    assert "changed by more than 16 in one round" in refused["reason"]


@pytest.mark.parametrize(
    "changes",
    [
        {"protection": {"name": "noise", "clip": 1.0, "multiplier": 2.0}},
        {"protection": {"name": "noise", "clip": 1.0, "multiplier": 9.0, "side": "server"}},
        {"adversary": {"name": "sign-flip", "share": 0.5, "factor": 10.0}},
    ],
    ids=["clients' noise", "the server's noise", "adversaries"],
)
def test_a_running_variance_never_falls_below_zero(changes: dict[str, Any]) -> None:
    made = federation(model=BATCH_NORM, **iid(4), **changes)
    state, (record,) = run(made, 1)
    variance = state.weights["norm.running_var"]
    assert float(variance.min()) == 0.0  # some would be negative
    assert np.isfinite(record["loss"])


def test_a_cohort_that_is_just_large_enough() -> None:
    for spec, cohort in (
        ({"name": "krum", "byzantine": 2}, 7),
        ({"name": "krum", "byzantine": 0}, 3),
        ({"name": "multi-krum", "byzantine": 2, "kept": 5}, 7),
        ({"name": "trimmed-mean", "share": 0.112}, 9),
        ({"name": "trimmed-mean", "share": 0}, 1),
        ("median", 1),
        ("interval-mean", 1),
    ):
        made = federation(**iid(10, cohort), method={"aggregator": spec})
        assert run(made, 1)[1][0]["uploads"] == cohort


def test_a_round_with_too_few_uploads_for_krum_is_told() -> None:
    fed = federation(**iid(6), method={"aggregator": "krum"}, channel=losing(up=[0, 1, 2]))
    with pytest.raises(FedblendError, match=r"byzantine: 1 needs 5 uploads .* but valid uploads are 3; valid: 0 to 0"):
        run(fed, 1)


@pytest.mark.parametrize("name", ["krum", "multi-krum"])
def test_uploads_that_are_refused_count_among_krums_byzantine_clients(name: str) -> None:
    def made(invalid: float) -> Any:
        method = {"aggregator": {"name": name, "byzantine": 3}}
        return setup(**iid(10), adversary={"name": "nan", "share": invalid}, method=method)

    _, records = run(made(0.3), 2)
    assert [(one["uploads"], len(one["refused"])) for one in records] == [(7, 3), (7, 3)]
    # What is refused beyond that leaves too few.
    with pytest.raises(FedblendError, match=r"0 needs 3 uploads .* but valid uploads are 2"):
        run(made(0.8), 1)


def test_a_trimmed_mean_leaves_out_as_many_uploads_where_some_do_not_arrive() -> None:
    def weights(aggregator: Any) -> Any:
        return run(federation(**iid(6), method={"aggregator": aggregator}, channel=losing(up=[0, 1, 2])), 1)[0].weights

    # One of six at each end: of the three that arrive the middle one is left.
    assert same(weights({"name": "trimmed-mean", "share": 0.2}), weights("median"))
    told = r"share: 0.4 of 6 clients leaves out 2 uploads at each end and needs 5, but valid uploads are 3; valid: a sm"
    with pytest.raises(FedblendError, match=told):
        weights({"name": "trimmed-mean", "share": 0.4})


@pytest.mark.parametrize("aggregator", [*GATHERING, IntervalMean(low=-0.003, high=0.01)], ids=lambda a: a.name)
def test_a_round_is_the_aggregate_of_its_uploads(aggregator: Aggregator) -> None:
    made = setup(model=BATCH_NORM, **iid(6), method={"aggregator": aggregator})
    fed = federation_of(made)
    task = fed.engine.train
    seen: list[Any] = []
    fed.engine.train = lambda *given: (seen.append(one) or one for one in task(*given))  # type: ignore[method-assign]

    state, _ = run(fed, 1)

    uploads = [(one.weights, float(one.samples)) for one in seen]
    assert len(uploads) == 6
    assert same(state.weights, aggregator.finish(uploads, made.weights()))
    assert state.weights["norm.num_batches_tracked"].dtype == torch.int64
    assert list(state.weights) == list(BatchNormNet().state_dict())


OVERFLOWING = [
    ("fedavg", ("--engine", "loop")),
    ("scaffold", ("--engine", "loop")),
    ("fedavg", ("--engine", "stacked")),
    ("scaffold", ("--ranks", 2)),
]


@pytest.mark.parametrize(("method", "options"), slow_after_first(OVERFLOWING))
def test_a_simulated_upload_that_overflows_is_left_out_as_one_of_nan_is(
    method: str, options: tuple[Any, ...], tmp_path: Path
) -> None:
    for name, adversary in (("huge", {"name": "sign-flip", "factor": 1e30}), ("nan", {"name": "nan"})):
        table = {"method": method, "adversary": {**adversary, "share": 0.25}, **iid(4)}
        file = write(tmp_path / f"{name}.toml", table)
        succeeded(here("run", file, *options, "--out", tmp_path / name))

    huge, nan = (next((tmp_path / name).glob("*-seed0")) for name in ("huge", "nan"))
    assert same(load_file(huge / CHECKPOINT), load_file(nan / CHECKPOINT))
    lines = [[json.loads(line) for line in records(folder)] for folder in (huge, nan)]
    who = [[[one["client"] for one in line.get("refused", ())] for line in of] for of in lines]
    assert who[0] == who[1]
    assert len(who[0][-1]) == 1


def test_simulated_clients_that_all_diverge_count_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(train={"cohort": 4, "lr": 1e12})
    trained: list[Any] = []
    collect = fed.engine.collect
    monkeypatch.setattr(fed.engine, "collect", lambda *given: trained.append(given) or collect(*given))
    told = r"0 good uploads of 4.*clients 0, 1, 2, 3: .*NaN or infinity \(a learning rate"
    with pytest.raises(FedblendError, match=told):
        run(fed, 20)
    assert len(trained) < 40
