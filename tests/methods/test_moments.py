"""Sums of features, and heads in closed form, against computations on all features at once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, federation_of, images, numbers, run, same, setup
from sharing_helpers import server_side
from torch import nn

from fedblend.core.context import Task
from fedblend.core.protection import Mechanism
from fedblend.core.setup import model_spec
from fedblend.core.sharing import ClientData, Payload, Pool, gather
from fedblend.methods.server_steps.closed_head import RIDGES, Sums, _cof
from fedblend.methods.sharing.moments import SENSITIVITY, Moments, SecureMoments, projection

WIDTH, CLASSES = 5, 3
TASK = Task("classification", CLASSES)
LINEAR = {"name": "mlp", "hidden": []}


def features(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of three classes that lie apart."""
    y = torch.arange(n) % CLASSES
    drawn = np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)
    return torch.from_numpy(drawn) + 2 * torch.eye(CLASSES, WIDTH)[y], y


def local(x: torch.Tensor, y: torch.Tensor, minimum: int = 1, seed: int = 0) -> ClientData:
    """A client whose samples are features of a linear model."""
    model, rng = nn.Linear(WIDTH, CLASSES), np.random.default_rng(seed)
    return ClientData(x, y, TASK, lambda x: x, lambda x, k: x, rng, minimum, model=model)  # type: ignore[arg-type]


def shared(x: torch.Tensor, y: torch.Tensor, seed: int = 0, minimum: int = 1, **options: Any) -> Payload | None:
    return Moments(**{"min_samples": 1, **options}).share(local(x, y, minimum, seed))


def pooled(split: list[list[int]], **options: Any) -> Pool:
    """The pool of clients that hold these rows of sixty samples."""
    x, y = features(60)
    payloads = {k: shared(x[rows], y[rows], k, **options) for k, rows in enumerate(split)}
    sharing = Moments(**options)
    return sharing.make_pool(
        gather({k: one for k, one in payloads.items() if one}), server_side(np.random.default_rng(0))
    )


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
    made = local(x, y, 5)
    assert Moments(min_samples=3, clip=1.0, multiplier=1e-9).used(made).all()
    assert Moments(min_samples=3).used(made).sum() == 11


@each(
    ("changes", "told"),
    [
        ({"sums": torch.zeros(1, CLASSES, WIDTH)}, "not float32 sums of the shapes"),
        ({"gram": torch.zeros(1, 15, dtype=torch.float64)}, "not float32 sums"),
        ({"more": torch.zeros(1)}, "not float32 sums"),
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
    made = [
        setup(
            images(), groups, method={"name": "fed3r", "sharing": sharing, "server_step": {"ridge": 0.01}}, model=LINEAR
        )
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
        payloads = {k: sharing.share(local(x[rows], y[rows], 2, 10 * seed + k)) or {} for k, rows in enumerate(IID)}
        pool = sharing.make_pool(gather(payloads), server_side(np.random.default_rng(0), np.arange(4)))
        totals.append(pool.tensors["sums"][0, :, -1])
        assert pool.tensors["noise"].tolist() == pytest.approx([2 * 4 * SENSITIVITY * 0.5])
    assert float(torch.stack(totals).std(0).mean()) == pytest.approx(2**0.5 * SENSITIVITY * 0.5, rel=0.1)
    few = {k: payloads[k] for k in range(3)}
    assert not len(sharing.make_pool(gather(few), server_side(np.random.default_rng(0), np.arange(4))))
