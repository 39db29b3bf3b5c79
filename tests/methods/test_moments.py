"""Statistics of features: sums and heads in closed form, and CCVR, against computations on all features at once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    draw,
    each,
    engine_of,
    examples,
    federation_of,
    images,
    local,
    numbers,
    run,
    same,
    same_up_to_rounding,
    setup,
)
from hypothesis import given
from hypothesis import strategies as st
from sharing_helpers import server_side
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import Task
from fedblend.core.loop import RoundLoop
from fedblend.core.protection import Mechanism
from fedblend.core.random import stream
from fedblend.core.setup import model_spec
from fedblend.core.sharing import ClientData, Payload, Pool, gather
from fedblend.methods.server_steps.heads import CCVR, RIDGES, Sums, _cof
from fedblend.methods.sharing.features import FeatureStatistics, combined
from fedblend.methods.sharing.moments import SENSITIVITY, Moments, SecureMoments, projection
from fedblend.models.layers import Staged, last_layer, with_features

WIDTH, CLASSES = 5, 3
TASK = Task("classification", CLASSES)
LINEAR = {"name": "mlp", "hidden": []}


def features(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of three classes that lie apart."""
    y = torch.arange(n) % CLASSES
    drawn = np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)
    return torch.from_numpy(drawn) + 2 * torch.eye(CLASSES, WIDTH)[y], y


def holder(x: torch.Tensor, y: torch.Tensor, minimum: int = 1, seed: int = 0) -> ClientData:
    """A client whose samples are features of a linear model."""
    return replace(local(x, y, TASK, lambda x: x, seed, minimum), model=nn.Linear(WIDTH, CLASSES))  # type: ignore[arg-type]


def shared(x: torch.Tensor, y: torch.Tensor, seed: int = 0, minimum: int = 1, **options: Any) -> Payload | None:
    return Moments(**{"min_samples": 1, **options}).share(holder(x, y, minimum, seed))


def pooled(split: list[list[int]], **options: Any) -> Pool:
    """The pool of clients that hold these rows of sixty samples."""
    x, y = features(60)
    payloads = {k: shared(x[rows], y[rows], k, **options) for k, rows in enumerate(split)}
    entries = gather({k: one for k, one in payloads.items() if one})
    return Moments(**options).make_pool(entries, server_side(np.random.default_rng(0)))


IID = [list(range(k, 60, 4)) for k in range(4)]
BY_CLASS = [list(range(k, 60, 3)) for k in range(3)]


def test_sums_are_those_of_all_samples_whoever_holds_them() -> None:
    x, y = features(60)
    whole, hot = torch.cat([x, torch.ones(60, 1)], 1).double(), nn.functional.one_hot(y).double()
    for split in (IID, BY_CLASS, [list(range(60))]):
        total = Sums.of(pooled(split).tensors)
        torch.testing.assert_close(total.by_class, hot.T @ whole, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(total.augmented(), whole.T @ whole, rtol=1e-6, atol=1e-5)


def test_ridge_and_linear_discriminants_are_scikit_learns() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    discriminant = pytest.importorskip("sklearn.discriminant_analysis")
    x, y = features(60)
    whole, hot = np.c_[x, np.ones(60)], np.eye(CLASSES)[y]
    for split in (IID, BY_CLASS):
        total = Sums.of(pooled(split).tensors)
        w, b = total.ridge(0.1, total.by_class)
        alpha = 0.1 * float(total.augmented().diagonal()[:-1].mean())
        expected = linear_model.Ridge(alpha, fit_intercept=False).fit(whole, hot).coef_
        np.testing.assert_allclose(torch.cat([w, b[:, None]], 1), expected, rtol=1e-4, atol=1e-6)
        w, b = total.lda(0.0)
        found = (x.double() @ w.T + b).log_softmax(1)
        lda = discriminant.LinearDiscriminantAnalysis("lsqr").fit(x, y)
        slopes = lda.coef_ * (60 - CLASSES) / 60
        np.testing.assert_allclose(w - w[:1], slopes - slopes[:1], rtol=1e-4, atol=1e-5)
        assert (found.argmax(1).numpy() == lda.predict(x)).mean() >= 59 / 60


def test_fedcofs_covariance_is_that_of_clients_means() -> None:
    pool = pooled(IID, gram="none")
    x, y = (t.double() for t in features(60))
    within = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    means = torch.stack([x[y == c].mean(0) for c in range(CLASSES)])
    for c in range(CLASSES):
        sigma = 0.5 * torch.eye(WIDTH, dtype=torch.float64)
        for rows in IID:
            own = x[rows][y[rows] == c]
            apart = own.mean(0) - means[c]
            sigma += len(own) * torch.outer(apart, apart) / (len(IID) - 1)
        within += 19 * sigma
    overall = x.mean(0)
    expected = torch.linalg.solve(within + 60 * torch.outer(overall, overall), 20 * means.T).T

    w, b = _cof(pool.tensors["sums"].double(), 0.5)

    torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-5)
    assert not b.any()


def test_a_class_of_too_few_samples_is_in_no_sum() -> None:
    x, y = features(12)
    y[:9], y[9:] = 0, 1
    made = shared(x, y, min_samples=4)
    assert made is not None
    assert made["sums"][0, :, -1].tolist() == [9, 0, 0]
    torch.testing.assert_close(Sums.of(made).augmented()[:-1, :-1], (x[:9].T @ x[:9]).double(), rtol=1e-6, atol=1e-6)
    assert shared(x, y, minimum=10) is None


def test_a_projection_commutes_with_sums() -> None:
    turned = projection(WIDTH, 3)
    torch.testing.assert_close(turned.T @ turned, torch.eye(3, dtype=torch.float64))
    whole, small = (Sums.of(pooled(IID, **options).tensors) for options in ({}, {"project": 3}))
    assert whole.gram is not None
    torch.testing.assert_close(small.gram, turned.T @ whole.gram @ turned, rtol=1e-5, atol=1e-5)


def test_the_ridge_is_chosen_by_generalised_cross_validation() -> None:
    x, y = features(60)
    rng = np.random.default_rng(0)
    # Targets that no feature explains need more of it.
    wild = torch.from_numpy(rng.normal(size=x.shape).astype(np.float32)), torch.from_numpy(rng.integers(0, 3, 60))
    found = []
    for f, labels in ((x, y), wild):
        pool = gather({k: shared(f[rows], labels[rows]) or {} for k, rows in enumerate(IID)})
        total = Sums.of(pool.tensors)
        found.append(total.least_error())
        rows = [row for client in IID for row in client]
        design = torch.cat([f[rows], torch.ones(len(rows), 1)], 1).double()
        hot, a = nn.functional.one_hot(labels[rows], CLASSES).double(), design.T @ design
        errors = []
        for part in RIDGES:
            hat = design @ torch.linalg.inv(a + part * a.diagonal()[:-1].mean() * torch.eye(len(a))) @ design.T
            errors.append(float((hot - hat @ hot).square().sum() / (1 - hat.trace() / len(rows)) ** 2))
        assert found[-1] == RIDGES[int(np.argmin(errors))]
    assert found[0] < found[1]


def test_one_sample_in_place_of_another_changes_scaled_sums_by_at_most_the_sensitivity() -> None:
    rng = np.random.default_rng(0)
    f = torch.from_numpy(rng.normal(size=(40, 3)) * 10 ** rng.uniform(-2, 2, (40, 1)))
    f = torch.cat([f, torch.eye(3), -torch.eye(3), torch.zeros(1, 3)]).double()
    f = f * (1 / f.norm(dim=1, keepdim=True)).clamp(max=1)
    z = torch.cat([f, torch.ones(len(f), 1)], 1) / 2**0.5
    changes = []
    for one, other in itertools.permutations(z, 2):
        for label in (0, 1):
            by_class = torch.zeros(2, 4, dtype=torch.float64)
            by_class[0] += one
            by_class[label] -= other
            square = (torch.outer(one, one) - torch.outer(other, other)).square().sum() + by_class.square().sum()
            changes.append(float(square.sqrt()))
    assert max(changes) <= SENSITIVITY + 1e-12
    assert max(changes) > 0.99 * SENSITIVITY, "the bound is reached by opposite features of different classes"


def test_noise_is_as_large_as_stated() -> None:
    x, y = features(60)
    options: dict[str, Any] = {"clip": 2.0, "multiplier": 0.5}
    plain = shared(x * (2 / x.norm(dim=1, keepdim=True)).clamp(max=1), y)
    drawn = [shared(x, y, seed, **options) for seed in range(400)]
    assert plain is not None
    noise = {name: torch.stack([one[name] - plain[name] for one in drawn if one])[:, 0] for name in plain}
    deviation = SENSITIVITY * 0.5
    row, column = torch.triu_indices(WIDTH, WIDTH)
    for found, expected in (
        (noise["sums"][..., :-1], 2**0.5 * 2 * deviation),
        (noise["sums"][..., -1], 2**0.5 * deviation),
        (noise["gram"][:, row == column], 2 * 4 * deviation),
        (noise["gram"][:, row != column], 2 * 4 * deviation / 2**0.5),
    ):
        assert float(found.std()) == pytest.approx(expected, rel=0.05)
        assert abs(float(found.mean())) < 0.2 * expected
    pool = Moments(**options).pool(gather({0: drawn[0] or {}, 1: drawn[1] or {}}), np.random.default_rng(0))
    assert Sums.of(pool.tensors).noise == pytest.approx(2**0.5 * 2 * 4 * deviation)
    assert Moments(**options).mechanism() == Mechanism("gaussian", 0.5, at_server=False)
    assert "no noise" in str(Moments().mechanism())


def test_no_class_is_left_out_where_counts_get_noise() -> None:
    x, y = features(12)
    y[:11], y[11] = 0, 1
    made = holder(x, y, 5)
    assert Moments(min_samples=3, clip=1.0, multiplier=1e-9).used(made).all()
    assert Moments(min_samples=3).used(made).sum() == 11


@each(
    ("changes", "told"),
    [
        ({"sums": torch.zeros(1, CLASSES, WIDTH)}, "not of the shapes"),
        ({"gram": torch.zeros(1, 15, dtype=torch.float64)}, "not of the shapes"),
        ({"more": torch.zeros(1)}, "not of the shapes"),
        ({"sums": torch.full((1, CLASSES, WIDTH + 1), 9.0)}, "counts that are not of 20 samples"),
        ({"sums": torch.full((1, CLASSES, WIDTH + 1), -1.0)}, "counts that are not of 20 samples"),
    ],
)
def test_sums_of_another_form_are_refused(changes: dict[str, torch.Tensor], told: str) -> None:
    made = setup(numbers(outputs=CLASSES), model=LINEAR)
    spec = replace(model_spec(made, made.model), task=TASK)
    x, y = features(20)
    assert Moments().fault(shared(x, y) or {}, 20, spec) is None
    assert told in str(Moments().fault({**(shared(x, y) or {}), **changes}, 20, spec))


GROUPS = [list(range(0, 40, 2)), list(range(1, 40, 2))]


@each("method", ["fed3r", "fedlda", "fedncm", "fedcof"])
def test_one_round_sets_the_last_layer_and_later_ones_change_nothing(method: str) -> None:
    made = setup(images(), GROUPS, method=method, model={"name": "mlp", "hidden": [6]}, rounds=2)
    fed = federation_of(made)
    first, [record] = run(fed, 1)
    second, [later] = run(fed, 1, first)
    start = made.weights()
    changed = {name for name, tensor in first.weights.items() if not torch.equal(tensor, start[name])}
    assert len(changed) == 2
    assert same(second.weights, first.weights)
    assert record["bytes_up"].keys() == {"statistics"}
    assert later["bytes_up"] == {}


def test_clients_can_go_on_from_the_head() -> None:
    upload = {"name": "model", "from_round": 2}
    fed = federation_of(setup(images(), GROUPS, method={"name": "fed3r", "upload": upload}, model=LINEAR, rounds=3))
    state, records = run(fed, 2)
    assert [one["bytes_up"].keys() for one in records] == [{"statistics"}, {"weights"}]
    assert not same(state.weights, run(fed, 1)[0].weights)


ONE_STEP = {"cohort": 2, "batch_size": 40, "lr": 1.0}
SOFTMAX = {"name": "fed3r", "upload": {"name": "model", "from_round": 2}}


@each("sharing", [{"min_samples": 1}, {"name": "secure-moments", "fewest": 2, "clients": 2, "range": 1e4}])
def test_softmax_regression_is_that_of_all_samples_whoever_holds_them(sharing: dict[str, Any]) -> None:
    made = setup(images(), GROUPS, model=LINEAR)
    x, y = made.data.train.x, made.data.train.y
    design = np.c_[made.scale(x).flatten(1).double(), np.ones(40)]
    hot, a = np.eye(CLASSES)[y], design.T @ design
    inverse = np.linalg.inv(a + 0.01 * a.diagonal()[:-1].mean() * np.eye(len(a)))
    w, losses = np.zeros((len(a), CLASSES)), []
    for _ in range(4):
        p = np.exp(design @ w)
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log(p[hot == 1]).mean())
        w += 2 * inverse @ design.T @ (hot - p)
    assert losses == sorted(losses, reverse=True)

    method = {**SOFTMAX, "sharing": sharing, "server_step": {"head": "softmax", "ridge": 0.01, "step": 2.0}}
    for groups in (GROUPS, [list(range(30)), list(range(30, 40))]):
        state, _ = run(setup(images(), groups, method=method, model=LINEAR, train=ONE_STEP, rounds=4), 4)
        found = torch.cat([t.flatten(1) if t.ndim > 1 else t[:, None] for t in state.weights.values()], 1)
        np.testing.assert_allclose(found, w.T, rtol=1e-3, atol=1e-4)


SECURE = {"name": "secure-moments", "fewest": 2}


def test_secure_sums_are_the_plain_ones_whoever_holds_which_sample() -> None:
    method = {"name": "fed3r", "server_step": {"ridge": 0.01}}
    made = [
        setup(images(), groups, method={**method, "sharing": sharing}, model=LINEAR)
        for groups in (GROUPS, [*GROUPS, [0]])
        for sharing in ({"min_samples": 1}, {**SECURE, "clients": 3, "range": 1e4})
    ]
    plain, secure, _, with_a_small_one = (run(one, 1)[0] for one in made)
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(secure.weights[name], tensor, rtol=1e-4, atol=1e-4)
    assert same(with_a_small_one.weights, secure.weights), "one sample is fewer than policy.min_mean"


def test_noise_is_shared_by_as_many_as_must_be_in_the_sum() -> None:
    x, y = features(60)
    sharing = SecureMoments(clip=2.0, multiplier=0.5, noise_over=4)
    assert sharing.threshold(4) == sharing.threshold(7) == 4
    assert sharing.threshold(20) == 11
    assert sharing.moments.multiplier == 0.25
    totals = []
    for seed in range(200):
        payloads = {k: sharing.share(holder(x[rows], y[rows], 2, 10 * seed + k)) or {} for k, rows in enumerate(IID)}
        pool = sharing.make_pool(gather(payloads), server_side(np.random.default_rng(0), np.arange(4)))
        totals.append(pool.tensors["sums"][0, :, -1])
        assert pool.tensors["noise"].tolist() == pytest.approx([2 * 4 * SENSITIVITY * 0.5])
    assert float(torch.stack(totals).std(0).mean()) == pytest.approx(2**0.5 * SENSITIVITY * 0.5, rel=0.1)
    few = {k: payloads[k] for k in range(3)}
    assert not len(sharing.make_pool(gather(few), server_side(np.random.default_rng(0), np.arange(4))))


UNEVEN = [list(range(0, 12)), list(range(12, 20)), list(range(20, 40))]
METHOD = {"name": "ccvr", "sharing": {"min_samples": 1}, "server_step": {"per_class": 40, "epochs": 2}}
ALL = {"unsafe": True, "groups": UNEVEN, "train": {"cohort": 2}}
"""Classes of single samples count too; two of three clients train in a round."""


def world(method: Any = METHOD, **changes: Any) -> Any:
    return setup(**{**ALL, "method": method, **changes})


def pooled_features(made: Any, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features in float64 and labels of all clients' samples, with the model's layers written out."""
    rows = torch.from_numpy(made.population.order)
    x = made.scale(made.data.train.x[rows]).flatten(1)
    first, _ = (name.rpartition(".")[0] for name in weights if name.endswith("weight"))
    hidden = torch.relu(F.linear(x, weights[f"{first}.weight"], weights[f"{first}.bias"]))
    return hidden.double(), made.data.train.y[rows]


def in_rows(packed: torch.Tensor, width: int) -> np.ndarray:
    """A packed covariance as a matrix."""
    whole = np.zeros((width, width))
    whole[np.triu_indices(width)] = packed.numpy()
    return whole + np.triu(whole, 1).T


def statistics_of(z: torch.Tensor, y: list[int], minimum: int = 1, **options: Any) -> Any:
    """What a client with features ``z`` shares: its model is one dense layer, whose inputs are the samples."""
    given = local(z, torch.tensor(y), TASK, lambda x: x, minimum=minimum)
    model = Staged(nn.Linear(z.shape[1], CLASSES, dtype=z.dtype)).eval()
    return FeatureStatistics(min_samples=1, **options).share(replace(given, model=model))


def test_a_client_sends_count_mean_and_unbiased_covariance() -> None:
    z = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 2.0], [7.0, 7.0]])

    made = statistics_of(z, [2, 2, 2, 0])

    assert made["y"].tolist() == [0, 2]
    assert made["count"].tolist() == [1, 3]
    assert made["mean"].tolist() == [[7.0, 7.0], [3.0, 2.0]]
    assert made["covariance"].tolist() == [[0.0, 0.0, 0.0], [4.0, 2.0, 4.0]]  # (8, 4, 8) / 2
    assert statistics_of(z, [2, 2, 2, 0], covariance="diagonal")["covariance"].tolist() == [[0.0, 0.0], [4.0, 4.0]]


def test_a_class_of_too_few_samples_is_left_out() -> None:
    z = torch.rand(5, 2)
    assert statistics_of(z, [0, 0, 1, 1, 1], minimum=3)["y"].tolist() == [1]
    assert statistics_of(z, [0, 0, 1, 1, 1], minimum=4) is None


@given(
    split=st.lists(st.integers(0, 3), min_size=25, max_size=25),
    labels=st.lists(st.integers(0, 2), min_size=25, max_size=25),
    offset=st.sampled_from([0.0, 1e3]),
    diagonal=st.booleans(),
)
@examples(60)
def test_combined_statistics_are_those_of_the_pooled_features(
    split: list[int], labels: list[int], offset: float, diagonal: bool
) -> None:
    """In float64, however samples are split; single samples of a class at a client, or in all, are among them."""
    z, y = draw(25, 4).double() + offset, np.array(labels)
    entries: dict[str, list[Any]] = {"y": [], "count": [], "mean": [], "covariance": []}
    for client, label in sorted({*zip(split, labels, strict=True)}):
        own = z[torch.from_numpy((np.array(split) == client) & (y == label))].numpy()
        whole = np.cov(own.T) if len(own) > 1 else np.zeros((4, 4))
        packed = np.diag(whole) if diagonal else whole[np.triu_indices(4)]
        for name, value in zip(entries, (label, len(own), own.mean(0), packed), strict=True):
            entries[name].append(value)

    found, means, covariances = combined({name: torch.tensor(np.array(v)) for name, v in entries.items()})

    assert found.tolist() == sorted(set(labels))
    for label, mean, packed in zip(found.tolist(), means, covariances, strict=True):
        own = z[torch.from_numpy(y == label)].numpy()
        wanted = np.cov(own.T) if len(own) > 1 else np.zeros((4, 4))
        np.testing.assert_allclose(mean.numpy(), own.mean(0), rtol=1e-12, atol=1e-12)
        if diagonal:
            np.testing.assert_allclose(packed.numpy(), np.diag(wanted), rtol=1e-9, atol=1e-9)
        else:
            np.testing.assert_allclose(in_rows(packed, 4), wanted, rtol=1e-9, atol=1e-9)


def independent(made: Any, weights: dict[str, torch.Tensor], round: int, step: CCVR) -> dict[str, torch.Tensor]:
    """The calibrated model, from the pooled_features features alone."""
    z, y = pooled_features(made, weights)
    noise = stream(made.experiment.seed, "server", round)
    classes = sorted(set(y.tolist()))
    normal = noise.standard_normal((len(classes), step.per_class, z.shape[1]))
    drawn = []
    for e, label in zip(normal, classes, strict=True):
        own = z[y == label].numpy()
        values, vectors = np.linalg.eigh(np.cov(own.T))
        values[values < z.shape[1] * 2.0**-23 * values[-1]] = 0
        drawn.append(own.mean(0) + e @ (vectors @ np.diag(np.sqrt(values)) @ vectors.T))
    x = torch.from_numpy(np.concatenate(drawn)).float()
    target = torch.tensor(classes).repeat_interleave(step.per_class)
    names = [name for name in weights if name.startswith(last_layer(made.model)[0])]
    head = torch.nn.Linear(x.shape[1], made.task.outputs)
    head.load_state_dict({name.rpartition(".")[2]: weights[name] for name in names})
    optimizer = torch.optim.SGD(head.parameters(), lr=step.lr or made.experiment.train.lr_in(round))
    for _ in range(step.epochs):
        order = torch.from_numpy(noise.permutation(len(x)))
        for rows in order.split(step.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(head(x[rows]), target[rows]).backward()
            optimizer.step()
    return {**weights, **{name: head.state_dict()[name.rpartition(".")[2]] for name in names}}


def test_the_last_round_ends_with_the_calibrated_aggregate() -> None:
    made, plain = world(), world("fedavg")

    state, records = run(made, 2)
    before, _ = run(made, 1)
    first, _ = run(plain, 1)
    aggregate, plain_records = run(plain, 2)

    assert same(before.weights, first.weights), "earlier rounds are FedAvg's"
    wanted = independent(made, aggregate.weights, 1, made.experiment.method.server_step)
    same_up_to_rounding(state.weights, wanted, steps=1000)
    body = {n: t for n, t in state.weights.items() if not n.startswith(last_layer(made.model)[0])}
    assert same(body, {n: aggregate.weights[n] for n in body})
    assert records[0]["loss"] == plain_records[0]["loss"]
    assert records[1]["loss"] != plain_records[1]["loss"], "the calibrated model is the one that is evaluated"


def test_all_clients_get_the_aggregate_and_send_statistics_once() -> None:
    made = world()

    state, records = run(made, 2)

    model = sum(tensor.numel() * 4 for tensor in state.weights.values())
    width, classes = 6, 3
    size = 16 + 4 * (width + width * (width + 1) // 2)
    assert [record["bytes_up"] for record in records] == [
        {"weights": 2 * model},
        {"weights": 2 * model, "statistics": 3 * classes * size},
    ]
    assert [record["bytes_down"] for record in records] == [{"weights": 2 * model}, {"weights": (2 + 3) * model}]
    assert records[1]["shared"] == {"asked": 3, "sent": 3, "entries": 9}
    assert "shared" not in records[0]


def test_from_a_round_on_clients_go_on_from_the_calibrated_model() -> None:
    method = {**METHOD, "sharing": {"min_samples": 1, "from_round": 1}}
    made = world(method, rounds=3)

    state, records = run(made, 1)
    again, later = run(made, 1, state)

    assert "shared" in records[0]
    assert "shared" in later[0]
    begun = federation_of(made).begin_round(state)
    assert same(begun.task.weights, state.weights)
    assert not same(again.weights, state.weights)


def test_a_run_with_more_rounds_does_not_use_its_earlier_statistics_again() -> None:
    ended, longer, plain = world(rounds=1), world(rounds=3), world("fedavg", rounds=3)
    first, records = run(ended, 1)
    assert "shared" in records[0]

    second, records = run(longer, 1, first)
    averaged, _ = run(plain, 1, first)
    third, last = run(longer, 1, second)
    uncalibrated, _ = run(plain, 1, averaged)

    assert "shared" not in records[0]
    assert same(second.weights, averaged.weights)
    assert "shared" in last[0]
    assert not same(third.weights, uncalibrated.weights)


def test_rows_of_classes_without_statistics_stay() -> None:
    groups = [[i for i in range(40) if i % 3 < 2 or i < 6]] * 2
    made = world({**METHOD, "sharing": {"min_samples": 14}}, groups=groups)

    state, records = run(made, 2)
    aggregate, _ = run(world("fedavg", groups=groups), 2)

    name = last_layer(made.model)[0]
    assert records[1]["shared"]["entries"] == 2 * 1, "only the first class has 14 samples at a client"
    for field in ("weight", "bias"):
        new, old = state.weights[f"{name}.{field}"], aggregate.weights[f"{name}.{field}"]
        assert torch.equal(new[1:], old[1:])


def test_diagonal_covariances_draw_features_apart() -> None:
    made = world({**METHOD, "sharing": {"min_samples": 1, "covariance": "diagonal"}})

    state, _ = run(made, 2)
    whole, _ = run(RoundLoop(world(), engine_of(world())), 2)

    assert state.entries.tensors["covariance"].shape[1] == 6
    width = whole.entries.tensors["mean"].shape[1]
    rows, columns = torch.triu_indices(width, width)
    diagonal = whole.entries.tensors["covariance"][:, rows == columns]
    torch.testing.assert_close(state.entries.tensors["covariance"], diagonal)
    assert not same(state.weights, whole.weights)


def test_without_statistics_the_model_is_the_aggregate() -> None:
    made, plain = world({**METHOD, "sharing": {"min_samples": 20}}), world("fedavg")
    state, records = run(made, 2)
    assert records[1]["shared"]["sent"] == 0
    assert same(state.weights, run(plain, 2)[0].weights)


GOOD = {
    "y": torch.tensor([0, 2]),
    "count": torch.tensor([5, 3]),
    "mean": torch.ones(2, 6),
    "covariance": torch.ones(2, 21),
}


@each(
    ("name", "value", "told"),
    [
        ("y", torch.tensor([0, 3]), "no different labels from 0 to 2"),
        ("y", torch.tensor([-1, 0]), "no different labels"),
        ("y", torch.tensor([2, 2]), "no different labels"),
        ("y", torch.tensor([0.0, 2.0]), "not of the shapes"),
        ("count", torch.tensor([0, 3]), "no numbers of 8 samples"),
        ("count", torch.tensor([6, 3]), "no numbers of 8 samples"),
        ("count", torch.tensor([2**62, 2**62]), "no numbers of 8 samples"),
        ("mean", torch.ones(2, 5), "of the shapes"),
        ("covariance", torch.ones(2, 6), "of the shapes"),
        ("covariance", -torch.ones(2, 21), "negative variances"),
        ("more", torch.ones(2), "of the shapes"),
    ],
)
def test_statistics_that_no_client_can_have_are_refused(name: str, value: torch.Tensor, told: str) -> None:
    loop = RoundLoop(made := world(), engine_of(made))
    assert FeatureStatistics().fault(GOOD, 8, loop.spec) is None
    assert told in str(FeatureStatistics().fault({**GOOD, name: value}, 8, loop.spec))


def test_what_is_no_covariance_gives_finite_weights() -> None:
    """A client may send variances and products that no features have."""
    covariance = 100 * torch.ones(2, 21)
    covariance[:, 1] = -1e6
    _, means, covariances = combined({**GOOD, "covariance": covariance})

    server: Any = SimpleNamespace(rng=np.random.default_rng(0))
    drawn = CCVR(per_class=3)._virtual(means, covariances, server)

    assert bool(torch.isfinite(drawn).all())


def test_features_are_the_inputs_of_the_last_layer_and_no_hook_stays() -> None:
    made = world(model="lenet5", data=images(side=14))
    x = made.scale(made.data.train.x[:3])
    outputs, features = with_features(made.model, x)
    torch.testing.assert_close(features, made.model(x, 0, -1))
    torch.testing.assert_close(outputs, made.model(x))
    assert not any(layer._forward_pre_hooks for layer in made.model.modules())
