"""Evaluation of a model: on all test samples, by class, by client, and on samples kept for validation.

Each set of samples is scored in one pass. Metrics are computed on the host from that pass's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedblend.core.engine import Engine, Scores, Tensors
from fedblend.core.metric import Metric
from fedblend.core.setup import Setup

SIZE_CLASSES = ((0, 100, "<100"), (100, 200, "100-199"), (200, None, ">199"))
"""Clients by samples held, as FedMix's Table 13 groups them."""

NAMED = 50
"""Largest number of the data's own clients whose accuracies are recorded one by one."""


def evaluate(
    engine: Engine, weights: Tensors, setup: Setup, own: Mapping[int, Tensors] | None = None
) -> dict[str, Any]:
    """Loss, accuracy and the experiment's metrics on the test half; the same by class, by the data's own clients where
    these are few, and over clients that have tests of their own; and on validation samples. With ``own`` weights of
    clients, each is tested with its own (or with ``weights``, if it has none yet) on its own samples: those that it
    holds out, or its part of the test half.
    """
    if own is not None and len(setup.population.held_order):
        result = _on_held_out(engine.score_each(weights, own, "holdout"), setup)
    else:
        result = _on_test_half(engine, weights, setup, own)
    if len(setup.population.server_order) or len(setup.population.validation_order):
        result["validation"] = _validation(engine, weights, setup, own)
    return result


def _on_test_half(engine: Engine, weights: Tensors, setup: Setup, own: Mapping[int, Tensors] | None) -> dict[str, Any]:
    metrics, test = setup.experiment.metrics, setup.data.test
    scores = engine.score(weights) if own is None else engine.score_each(weights, own, "test")
    result: dict[str, Any] = {"loss": float(scores.loss.mean())}
    if scores.right is not None:
        result["accuracy"] = scores.accuracy
        result["per_class"] = _means_by(test.y.numpy(), scores.right, len(setup.data.classes))
    if metrics and scores.outputs is not None:
        result |= _values(metrics, scores.outputs, test.y)
    if test.client is not None and 0 < len(setup.data.client_names) <= NAMED:
        result |= _by_site(setup, test.client, scores)
    groups = _client_tests(engine, weights, setup, scores)
    if groups is not None:
        owner, of_clients, targets = groups
        if of_clients.right is not None:
            result["clients"] = over_clients(owner, of_clients.right, setup.population.sizes, of_clients.numbers)
        if by_client := _by_client(metrics, owner, of_clients, targets):
            result["client_metrics"] = {m.label: _over_clients(m, by_client) for m in metrics}
    return result


def _on_held_out(scores: Scores, setup: Setup) -> dict[str, Any]:
    """The same of clients' own models on the samples that they hold out.

    Real sites state how many of their samples are right, and no losses.
    """
    metrics, population, y = setup.experiment.metrics, setup.population, setup.data.train.y
    result: dict[str, Any] = {} if np.isnan(scores.loss).any() else {"loss": float(scores.loss.mean())}
    owner = population.owners("holdout") if scores.owner is None else scores.owner
    targets = y[torch.from_numpy(scores.samples)] if scores.owner is None else y
    if scores.right is not None:
        result["accuracy"] = scores.accuracy
        if scores.owner is None:
            result["per_class"] = _means_by(targets.numpy(), scores.right, len(setup.data.classes))
        result["clients"] = over_clients(owner, scores.right, population.sizes, scores.numbers)
    if metrics and scores.outputs is not None:
        result |= _values(metrics, scores.outputs, targets)
    if by_client := _by_client(metrics, owner, scores, targets):
        result["client_metrics"] = {m.label: _over_clients(m, by_client) for m in metrics}
    return result


def _values(metrics: Sequence[Metric], outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """The record's ``metrics`` and ``class_metrics``."""
    by_class = {m.label: values for m in metrics if (values := m.by_class(outputs, targets)) is not None}
    found: dict[str, Any] = {"metrics": {m.label: _defined(m.overall(outputs, targets)) for m in metrics}}
    if by_class:
        found["class_metrics"] = {label: [_defined(v) for v in values] for label, values in by_class.items()}
    return found


def _defined(value: float) -> float | None:
    """A finite number; ``None`` in place of NaN and infinity, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def _by_client(
    metrics: Sequence[Metric], owner: np.ndarray, scores: Scores, targets: torch.Tensor
) -> dict[int, Mapping[str, float]]:
    """Metrics of each client's samples, by client: computed here, or received from the clients' sites."""
    if scores.at_clients is not None:
        return dict(scores.at_clients)
    if not metrics or scores.outputs is None:
        return {}
    order = np.argsort(owner, kind="stable")
    clients, first = np.unique(owner[order], return_index=True)
    found: dict[int, Mapping[str, float]] = {}
    for client, rows in zip(clients.tolist(), np.split(order, first[1:]), strict=True):
        outputs, y = scores.outputs[rows], targets[rows]
        found[client] = {m.label: m.overall(outputs, y) for m in metrics}
    return found


def _over_clients(metric: Metric, by_client: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Mean, standard deviation and worst tenth of a metric over clients for which it is defined."""
    values = np.array([v for table in by_client.values() if math.isfinite(v := table.get(metric.label, math.nan))])
    if not len(values):
        return {"tested": 0}
    worst = np.percentile(values, 10 if metric.larger_is_better else 90)
    return {
        "tested": len(values),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "worst_tenth": float(worst),
    }


def _validation(
    engine: Engine, weights: Tensors, setup: Setup, own: Mapping[int, Tensors] | None
) -> dict[str, dict[str, Any]]:
    """Scores on the samples that the server, and the clients, keep for validation.

    At clients, accuracy and loss are means over all samples, and a metric is the mean of the clients' values, weighted
    by their samples: sites send values and no outputs.
    """
    population, metrics, y = setup.population, setup.experiment.metrics, setup.data.train.y
    result: dict[str, dict[str, Any]] = {}
    if len(rows := population.server_order):
        scores = engine.score(weights, "server")
        values = {} if scores.outputs is None else _values(metrics, scores.outputs, y[rows])["metrics"]
        result["server"] = _summary(scores, float(scores.loss.mean()), values)
    if len(rows := population.validation_order):
        scores = engine.score(weights, "validation") if own is None else engine.score_each(weights, own, "validation")
        owner = population.owners("validation") if scores.owner is None else scores.owner
        by_client = _by_client(metrics, owner, scores, y if scores.outputs is None else y[rows])
        counted = np.unique(owner, return_counts=True) if scores.numbers is None else (owner, scores.numbers)
        size = dict(zip(*(v.tolist() for v in counted), strict=True))
        values = {m.label: _weighted(by_client, m.label, size) for m in metrics}
        loss = float(scores.loss.mean()) if scores.at_clients is None else _weighted(by_client, "loss", size)
        result["clients"] = {"tested": len(size), **_summary(scores, loss, values)}
    return result


def _summary(scores: Scores, loss: float | None, metrics: Mapping[str, float | None]) -> dict[str, Any]:
    """One set of samples in the record's ``validation``."""
    found: dict[str, Any] = {"samples": scores.number}
    if loss is not None:
        found["loss"] = loss
    if scores.right is not None:
        found["accuracy"] = scores.accuracy
    return found | ({"metrics": dict(metrics)} if metrics else {})


def _weighted(by_client: Mapping[int, Mapping[str, float]], name: str, size: Mapping[int, int]) -> float | None:
    """The mean of the clients' values, weighted by samples, over clients for which it is defined."""
    defined = [(size[c], v) for c, table in by_client.items() if math.isfinite(v := table.get(name, math.nan))]
    samples = sum(n for n, _ in defined)
    return sum(n * v for n, v in defined) / samples if samples else None


def _by_site(setup: Setup, client: np.ndarray, scores: Scores) -> dict[str, Any]:
    """Accuracy and metrics on the test samples of each of the data's own clients, by name, whichever client held the
    training samples.
    """
    names, targets, found = setup.data.client_names, setup.data.test.y, dict[str, Any]()
    if scores.right is not None:
        means = _means_by(client, scores.right, len(names))
        found["sites"] = {name: mean for name, mean in zip(names, means, strict=True) if mean is not None}
    if setup.experiment.metrics and scores.outputs is not None:
        outputs, rows = scores.outputs, {name: np.flatnonzero(client == i) for i, name in enumerate(names)}
        found["site_metrics"] = {
            m.label: {name: _defined(m.overall(outputs[r], targets[r])) for name, r in rows.items() if len(r)}
            for m in setup.experiment.metrics
        }
    return found


def _client_tests(
    engine: Engine, weights: Tensors, setup: Setup, scores: Scores
) -> tuple[np.ndarray, Scores, torch.Tensor] | None:
    """The owner, scores and targets of the samples that belong to a client's own test; ``None`` where there is none."""
    if scores.right is None and not setup.experiment.metrics:
        return None
    population = setup.population
    if len(population.held_order):
        held = engine.score(weights, "holdout")
        owner = population.owners("holdout") if held.owner is None else held.owner
        targets = setup.data.train.y
        return owner, held, targets if held.outputs is None else targets[population.held_order]
    if population.natural is None or setup.data.test.client is None:
        return None
    owner = population.places_of(setup.data.test.client)
    of = owner >= 0
    if not of.any():
        return None
    right = None if scores.right is None else scores.right[of]
    outputs = None if scores.outputs is None else scores.outputs[of]
    return owner[of], replace(scores, loss=scores.loss[of], right=right, outputs=outputs), setup.data.test.y[of]


def over_clients(
    owner: np.ndarray, right: np.ndarray, sizes: np.ndarray, numbers: np.ndarray | None = None
) -> dict[str, Any]:
    """Mean, standard deviation and 10th percentile of clients' accuracies, and by size (FedMix, Table 13).

    ``owner`` int64 and ``right`` bool say, for each test sample, whose it is and whether it was right.
    With ``numbers`` int64 they do so for each client, which has so many test samples. Clients without test samples are
    left out. Standard deviations are over clients (not a sample's).
    """
    count = np.bincount(owner, numbers, minlength=len(sizes))
    tested = np.flatnonzero(count)
    accuracy = np.bincount(owner, right, minlength=len(sizes))[tested] / count[tested]
    by_size = {}
    for low, high, name in SIZE_CLASSES:
        of = accuracy[(sizes[tested] >= low) & (sizes[tested] < (high or np.inf))]
        if len(of):
            by_size[name] = {"clients": len(of), "mean": float(of.mean()), "std": float(of.std())}
    return {
        "tested": len(tested),
        "mean": float(accuracy.mean()),
        "std": float(accuracy.std()),
        "p10": float(np.percentile(accuracy, 10)),
        "by_size": by_size,
    }


def _means_by(groups: np.ndarray, values: np.ndarray, number: int) -> list[float | None]:
    """Mean of values in each group 0..number-1; ``None`` where a group is empty."""
    count = np.bincount(groups, minlength=number)
    total = np.bincount(groups, values, minlength=number)
    return [float(t / c) if c else None for t, c in zip(total, count, strict=True)]
