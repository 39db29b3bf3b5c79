import math

import numpy as np
import pytest
import torch
from helpers import each
from hypothesis import given, settings
from hypothesis import strategies as st

from fedblend.core.dataset import Dataset, Population, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.registry import build
from fedblend.data import measures
from fedblend.data.measures import class_counts, divergence, noniid_measures, smoothed
from fedblend.data.partitions.classes import draw_classes
from fedblend.data.partitions.deal import apportion, largest, stable_order
from fedblend.data.partitions.dirichlet import draw_proportions, fit_counts
from fedblend.data.partitions.prepare import prepare

LEVEL = np.arange(6000) % 10
"""Labels of 600 samples each of 10 classes."""


def split(spec, labels=LEVEL, classes=10, seed=0, natural=None) -> Population:
    return build("partition", spec).split(labels, classes, seed, natural)


def table(spec, labels=LEVEL, classes=10, **options) -> np.ndarray:
    return class_counts(split(spec, labels, classes, **options), labels, classes)


def data_of(labels: np.ndarray, classes: int = 10, client: np.ndarray | None = None) -> Dataset:
    y = torch.from_numpy(np.asarray(labels))
    y = y.to(torch.int64) if classes else y.to(torch.float32)[:, None]
    samples = Samples(torch.zeros(len(y), 1), y, client)
    return Dataset("some", "features", samples, samples, tuple(map(str, range(classes))))


small = st.integers(1, 12)
alphas = st.sampled_from([1e-300, 1e-9, 1e-3, 0.1, 1.0, 100.0, 1e38])


def specs_of(name, optional=(), **fields):
    return st.fixed_dictionaries({"name": st.just(name), **fields}, optional=dict(optional))


specs = st.one_of(
    specs_of("iid", {"samples": small}, clients=small),
    specs_of("classes", {"samples": small}, clients=small, classes_per_client=st.integers(1, 6)),
    specs_of(
        "dirichlet",
        {"min_samples": st.integers(1, 4)},
        clients=small,
        alpha=alphas,
        form=st.sampled_from(["client", "class"]),
    ),
    specs_of("dirichlet", form=st.just("client"), clients=small, alpha=alphas, sizes=st.just("lognormal-share")),
    specs_of(
        "lognormal",
        {"alpha": alphas, "sigma": st.floats(0, 20), "bias": st.floats(0, 30)},
        clients=small,
        sizes=st.sampled_from(["lognormal-share", "literal"]),
    ),
    specs_of("natural", {"clients": small, "min_samples": small}),
    specs_of("mix2fld", clients=small, samples=st.integers(1, 60)),
    specs_of("xormixfl", clients=small, samples=small, target_samples=small),
)


@settings(max_examples=300, deadline=None)
@given(specs, st.lists(st.integers(0, 4), min_size=1, max_size=200), st.integers(0, 3))
def test_a_sample_goes_to_one_client_or_an_error_is_raised(spec, labels, seed):
    labels = np.array(labels)
    natural = labels * 3 + np.arange(len(labels)) % 2
    try:
        population = split(spec, labels, 5, seed, natural)
    except FedblendError as error:
        assert "valid" in str(error) or "take fewer" in str(error)  # noqa: PT017, both outcomes are allowed
        return
    assert len(np.unique(population.order)) == len(population.order)
    assert population.offsets[0] == 0
    assert population.offsets[-1] == len(population.order)
    assert (population.sizes > 0).all() or spec["name"] in ("xormixfl", "mix2fld")
    assert len(population) == (spec["clients"] if "clients" in spec else len(np.unique(natural[population.order])))
    if spec["name"] in ("dirichlet", "lognormal") and spec.get("sizes") != "literal":
        assert len(population.order) == len(labels)
        assert population.sizes.min() >= spec.get("min_samples", 1)
    again = split(spec, labels, 5, seed, natural)
    assert np.array_equal(again.order, population.order)
    assert np.array_equal(again.offsets, population.offsets)


def test_another_seed_gives_another_partition():
    for spec in ("iid", "classes", "dirichlet", "lognormal", {"name": "mix2fld", "clients": 5}):
        assert not np.array_equal(split(spec, seed=1).order, split(spec, seed=2).order)


def test_iid_is_even():
    assert split({"name": "iid", "clients": 7}).sizes.tolist() == [858, 857, 857, 857, 857, 857, 857]
    assert split({"name": "iid", "clients": 7, "samples": 5}).sizes.tolist() == [5] * 7


@each("samples", [None, 60, 61])
@each("each", [1, 2, 3, 10])
def test_classes_are_exact_and_balanced(samples, each):
    if samples == 61 and each == 10:
        samples = 65
    counts = table({"name": "classes", "clients": 23, "classes_per_client": each, "samples": samples})
    held = counts > 0
    assert (held.sum(1) == each).all()
    assert held.sum(0).max() - held.sum(0).min() <= 1
    if samples:
        assert (counts.sum(1) == samples).all()
        assert np.ptp(counts[held].reshape(23, each), axis=1).max() == (samples % each > 0)
    else:
        assert counts.sum() == 6000
        assert all(np.ptp(counts[held[:, c], c]) <= 1 for c in range(10))


def test_random_classes_are_distinct_and_not_balanced():
    spec = {"name": "classes", "clients": 30, "classes_per_client": 2, "random": True}
    held = table(spec, LEVEL) > 0

    assert held.sum(1).tolist() == [2] * 30
    assert len(set(held.sum(0).tolist())) > 2, "levelled classes would have 6 clients each"
    one = split({**spec, "clients": 1}, LEVEL)
    assert len(one.notes["classes_unheld"]) == 8


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_drawn_classes_are_distinct_and_balanced(clients, classes, data):
    each = data.draw(st.integers(1, classes))
    held = draw_classes(clients, each, classes, np.random.default_rng(data.draw(st.integers(0, 9))))
    assert all(len(set(row)) == each for row in held.tolist())
    times = np.bincount(held.ravel(), minlength=classes)
    assert times.max() - times.min() <= 1


def test_drawn_classes_include_all_pairs():
    held = draw_classes(2000, 2, 10, np.random.default_rng(0))
    assert len({tuple(sorted(row)) for row in held.tolist()}) == 45


def test_classes_without_samples_are_not_drawn():
    counts = table({"name": "classes", "clients": 2, "classes_per_client": 2}, np.array([0, 0, 0, 2, 2]), 5)
    assert np.sort(counts[:, [0, 2]].ravel()).tolist() == [1, 1, 1, 2]
    assert counts.sum() == 5


@each(
    ("spec", "message"),
    [
        ({"name": "iid", "clients": 6001}, "partition.clients: 6,001 .* there are 6,000 samples; valid: 1 to 6,000"),
        ({"name": "iid", "clients": 10, "samples": 601}, "clients of 601 samples or more, .* valid: 1 to 9 clients"),
        ({"name": "classes", "classes_per_client": 11}, "classes_per_client: 11 is more than the 10 .* valid: 1 to 10"),
        ({"name": "classes", "samples": 1}, "partition.samples: 1 samples cannot be of 2 classes; valid: 2 or more"),
        ({"name": "classes", "samples": 102}, "which has 600; valid: up to 100 samples a client"),
        ({"name": "classes", "clients": 3001}, "partition.clients: needs 601 samples of class"),
        ({"name": "classes", "clients": 3001, "samples": 2}, "valid: fewer clients"),
        ({"name": "dirichlet", "clients": 601, "min_samples": 10}, "of 10 samples or more, .* valid: 1 to 600"),
        ({"name": "dirichlet", "alpha": 0}, "partition.alpha: 0 is not valid"),
        ({"name": "dirichlet", "sizes": "equal"}, "partition: sizes = 'equal' needs form = 'client'"),
        ({"name": "lognormal", "sizes": "literal", "clients": 1000}, "'literal' draws for 1,000 clients need"),
        ({"name": "natural"}, "the data set has no clients"),
        ({"name": "counts", "counts": []}, "partition.counts: is empty"),
        ({"name": "counts", "counts": [[1, 2]]}, r"row 0 is \[1, 2\]; valid: 10 numbers from 0 up"),
        ({"name": "counts", "counts": [[1] * 9 + [-1]]}, "row 0 is"),
        ({"name": "counts", "counts": [[601] + [0] * 9]}, "needs 601 samples of class 0, which has 600"),
        ({"name": "mix2fld", "samples": 501}, "partition.samples: 501 do not leave .* such as 500"),
        ({"name": "mix2fld", "scarce_labels": 10}, "partition.scarce_labels: 10 of 2 samples; valid: 1 to 9"),
        ({"name": "mix2fld", "clients": 50}, "partition.samples: needs"),
        ({"name": "xormixfl", "targets": [10]}, r"partition.targets: \[10\] is not valid: labels from 0 to 9"),
    ],
)
def test_errors_name_field_value_and_what_is_valid(spec, message):
    with pytest.raises(FedblendError, match=message):
        split(spec)


def test_regression_has_no_partition_by_class():
    data = data_of(np.linspace(0, 1, 100), classes=0)
    for name in ("classes", "dirichlet", "mix2fld", "xormixfl"):
        with pytest.raises(FedblendError, match=f"partition '{name}': needs classes"):
            prepare(build("partition", name), data, 0)
    for name in ("iid", "lognormal"):
        assert prepare(build("partition", {"name": name, "clients": 5}), data, 0).sizes.sum() == 100


@each("form", ["class", "client"])
def test_dirichlet_follows_its_parameter(form):
    spec = {"name": "dirichlet", "form": form, "clients": 50}
    by_alpha = [noniid_measures(table({**spec, "alpha": alpha})) for alpha in (0.1, 1, 10, 1000)]
    for measure in ("divergence", "distance"):
        values = [m[measure] for m in by_alpha]
        assert values == sorted(values, reverse=True)
    assert [m["classes_mean"] for m in by_alpha] == sorted(m["classes_mean"] for m in by_alpha)
    assert table({**spec, "alpha": 0.1, "min_samples": 30}).sum(1).min() >= 30


def test_dirichlet_proportions_have_the_prior_as_mean_and_equation_17s_variance():
    labels = np.repeat([0, 1, 2], [24_000, 12_000, 4_000])
    p = table({"name": "dirichlet", "form": "client", "clients": 400, "alpha": 4.0}, labels, 3) / 100
    prior = np.array([0.6, 0.3, 0.1])
    assert np.allclose(p.mean(0), prior)
    # Var Dir(alpha q) = q (1 - q) / (alpha + 1); fitting to the supply takes little of it.
    assert np.allclose(p.var(0), prior * (1 - prior) / 5, rtol=0.2)


def test_fitted_keeps_the_proportions_where_they_add_up():
    p = np.array([[0.8, 0.2], [0.2, 0.8]])
    assert fit_counts(p, np.array([10, 10]), np.array([10, 10])).tolist() == [[8, 2], [2, 8]]
    assert fit_counts(np.eye(2), np.array([4, 8]), np.array([6, 6])).tolist() == [[4, 0], [2, 6]]


def test_lognormal_shares_have_a_long_tail():
    sizes = split({"name": "lognormal", "clients": 100}, np.arange(60_000) % 10).sizes
    assert sizes.sum() == 60_000
    assert sizes.max() > 5 * np.median(sizes)
    literal = split({"name": "lognormal", "clients": 100, "sizes": "literal"}, np.arange(60_000) % 10).sizes
    assert literal.min() >= 10
    assert np.corrcoef(sizes, literal)[0, 1] > 0.999


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(any), st.integers(0, 500), st.integers(0, 3))
def test_apportion_gives_all_and_no_one_less(weights, total, at_least):
    total += at_least * len(weights)
    shares = apportion(np.array(weights), total, at_least)
    assert shares.sum() == total
    assert shares.min() >= at_least
    quota = np.array(weights) / np.sum(weights) * total
    if at_least == 0:
        assert np.abs(shares - quota).max() <= 1


def test_counts_are_exact():
    rows = [[3, 0, 0, 0, 0, 0, 0, 0, 0, 1], [0] * 10, [597] + [1] * 9]
    population = split({"name": "counts", "counts": rows})
    assert class_counts(population, LEVEL, 10).tolist() == rows


def test_mix2fld_devices():
    counts = table({"name": "mix2fld"}, np.arange(10_000) % 10)
    assert np.sort(counts, axis=1).tolist() == [[2, 2] + [62] * 8] * 10
    assert len({tuple(row) for row in counts.tolist()}) > 3
    assert (table({"name": "mix2fld", "form": "iid"}) == 50).all()


def test_xormixfl_devices():
    counts = table({"name": "xormixfl", "targets": [2, 4]})
    assert counts.tolist() == [[200, 200, 10, 200, 10, 200, 200, 200, 200, 200]] * 3


def test_natural_clients():
    natural = np.array([5, 9, 5, 2, 9, 9, 7])
    labels = np.zeros(7, np.int64)
    population = split({"name": "natural"}, labels, 1, natural=natural)
    assert population.natural.tolist() == [2, 5, 7, 9]
    assert [population.indices(k).tolist() for k in range(4)] == [[3], [0, 2], [6], [1, 4, 5]]
    some = split({"name": "natural", "min_samples": 2, "clients": 1, "choose": "first"}, labels, 1, natural=natural)
    assert some.natural.tolist() == [5]
    assert some.order.tolist() == [0, 2]
    with pytest.raises(FedblendError, match="3 clients are needed, but 2 have min_samples = 2"):
        split({"name": "natural", "min_samples": 2, "clients": 3}, labels, 1, natural=natural)
    chosen = {tuple(split({"name": "natural", "clients": 2}, labels, 1, s, natural).natural) for s in range(20)}
    assert len(chosen) > 2


def test_fraction_keeps_that_share_of_each_client_and_smaller_ones_are_subsets():
    partition, data = build("partition", {"name": "classes", "clients": 20}), data_of(LEVEL)
    whole, half, tenth = (prepare(partition, data, 0, fraction=f) for f in (1.0, 0.5, 0.1))
    for k in range(20):
        assert len(half.indices(k)) == math.floor(0.5 * len(whole.indices(k)) + 0.5)
        assert set(tenth.indices(k)) < set(half.indices(k)) < set(whole.indices(k))
    assert half.notes["fraction"] == 0.5


def test_holdout_is_apart_and_never_takes_the_only_sample():
    counts = [[1, 0], [1, 1], [3, 1], [40, 60], [0, 0]]
    data = data_of(np.repeat([0, 1], 100), 2)
    population = prepare(build("partition", {"name": "counts", "counts": counts}), data, 0, holdout=0.25)
    assert population.sizes.tolist() == [1, 1, 3, 75, 0]
    assert [len(population.held(k)) for k in range(5)] == [0, 1, 1, 25, 0]
    together = np.concatenate([population.order, population.held_order])
    assert len(np.unique(together)) == 107
    assert population.notes["empty_clients"] == [4]


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 1), st.floats(0, 0.999), st.integers(1, 40))
def test_fraction_and_holdout_leave_every_client_a_sample(fraction, holdout, clients):
    partition = build("partition", {"name": "lognormal", "clients": clients})
    population = prepare(partition, data_of(np.arange(60) % 10), 0, fraction, holdout)
    assert population.sizes.min() >= 1
    together = np.concatenate([population.order, population.held_order])
    assert len(np.unique(together)) == len(together)


@each(
    ("group", "message"),
    [([1, 1], "gives sample 1 2 times"), ([6000], "sample 6000; valid: 0 to 5999"), ([-1], "gives sample -1; valid")],
)
def test_a_user_partition_is_checked(group, message):
    class Own:
        def split(self, labels, classes, seed, natural):
            return Population.of([np.array(group)])

    with pytest.raises(FedblendError, match=message):
        prepare(Own(), data_of(LEVEL), 0)


@pytest.mark.slow
def test_a_million_clients_are_split():
    labels = np.zeros(10_000_000, np.uint8)
    for name in ("iid", "lognormal"):
        population = split({"name": name, "clients": 1_000_000}, labels, 1)
        assert len(population) == 1_000_000
        assert population.offsets[-1] == 10_000_000


@each("alpha", [1e-300, 1.0, 1.7e308])
def test_proportions_add_up_where_a_draw_underflows_or_overflows(alpha):
    drawn = draw_proportions(50, np.full(5, 20), alpha, np.random.default_rng(0))
    assert drawn.sum(1) == pytest.approx(np.ones(50))
    assert (drawn >= 0).all()


def test_even_shares_need_no_square_memory():
    population = split({"name": "dirichlet", "clients": 60_000, "alpha": 0.05}, np.arange(300_000) % 3, 3)
    assert (population.sizes > 0).all()
    assert population.sizes.sum() == 300_000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.5, 2.0]), max_size=30), st.integers(-1, 31))
def test_largest_equals_a_stable_sort(values, number):
    found = largest(np.array(values), number)
    assert sorted(found) == sorted(np.argsort(-np.array(values), kind="stable")[: max(0, number)])


@each("most", [0, 1, 255, 256, 65_535, 65_536, 10**7])
def test_stable_order_is_numpys(most):
    numbers = np.random.default_rng(0).integers(0, most + 1, 3000)
    assert np.array_equal(stable_order(numbers), np.argsort(numbers, kind="stable"))
    assert len(stable_order(numbers[:0])) == 0


def test_blocks_of_clients_change_nothing(monkeypatch):
    labels = np.random.default_rng(0).integers(0, 7, 5000)
    population = split({"name": "dirichlet", "form": "client", "clients": 100, "alpha": 0.1}, labels, 7)
    counts = class_counts(population, labels, 7)
    counts[[0, 50, 99]] = 0
    whole = noniid_measures(counts)

    monkeypatch.setattr(measures, "BLOCK", 9)

    again = class_counts(population, labels, 7)
    assert np.array_equal(np.delete(again, [0, 50, 99], 0), np.delete(counts, [0, 50, 99], 0))
    assert noniid_measures(counts) == pytest.approx(whole, rel=1e-12)


def test_class_counts_by_hand():
    population = Population.of([np.array([0, 1, 3]), np.array([], np.int64), np.array([2])])
    assert class_counts(population, np.array([0, 2, 1, 0]), 3).tolist() == [[2, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_divergence_is_the_mean_over_pairs():
    p = np.random.default_rng(0).dirichlet(np.ones(4), 6)
    pairs = [(p[i] * np.log(p[i] / p[j])).sum() for i in range(6) for j in range(6) if i != j]
    assert divergence([p[:1], p[1:]]) == pytest.approx(np.mean(pairs))
    assert divergence([p[:1]]) == 0


def test_measures_by_hand():
    counts = np.array([[4, 0, 0], [2, 2, 0], [0, 0, 0]])
    found = noniid_measures(counts)
    # The whole: 3/4, 1/4. Smoothed: (4 + 3/4) / 5 = 0.95 and 0.05; (2 + 3/4) / 5 = 0.55 and 0.45.
    assert smoothed(counts[:2], counts.sum(0)) == pytest.approx(np.array([[0.95, 0.05], [0.55, 0.45]]))
    assert found["classes_mean"] == 1.5
    assert found["classes_deviation"] == 0.5
    assert found["distance"] == pytest.approx(0.5)  # |1 - 3/4| + 1/4 = 1/2; |1/2 - 3/4| + 1/4 = 1/2
    assert found["divergence"] == pytest.approx(0.5 * 0.4 * (math.log(0.95 / 0.55) + math.log(0.45 / 0.05)))
    assert (found["size_mean"], found["size_min"], found["size_max"]) == (4, 4, 4)
    assert noniid_measures(counts[2:]) == {}
    found = noniid_measures(np.full((5, 3), 7))
    assert found["divergence"] == pytest.approx(0, abs=1e-12)
    assert found["distance"] == 0
