"""Evaluation of a model: on all test samples, by class, by client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedblend.core.engine import Engine, Scores, Tensors
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup

SIZE_CLASSES = ((0, 100, "<100"), (100, 200, "100-199"), (200, None, ">199"))
"""Clients by samples held, as FedMix's Table 13 groups them."""

NAMED = 50
"""Largest number of the data's own clients whose accuracies are recorded one by one."""


def evaluate(
    engine: Engine, weights: Tensors, setup: Setup, own: Mapping[int, Tensors] | None = None
) -> dict[str, Any]:
    """Loss and accuracy on the test half; accuracy by class, by the data's own clients where these are few, and over
    clients that have tests of their own. With ``own`` weights of clients, each is tested with its own (or with
    ``weights``, if it has none yet) on its own samples: those that it holds out, or its part of the test half.
    """
    if own is not None and len(setup.population.held_order):
        return _on_held_out(engine.score_each(weights, own), setup)
    scores = engine.score(weights) if own is None else engine.score_each(weights, own)
    result: dict[str, Any] = {"loss": float(scores.loss.mean())}
    if scores.right is not None:
        result["accuracy"] = float(scores.right.mean())
        labels = setup.data.test.y.numpy()
        result["per_class"] = _means_by(labels, scores.right, len(setup.data.classes))
        result |= _by_site(setup, scores.right)
    groups = _client_tests(engine, weights, setup, scores)
    if groups is not None:
        result["clients"] = over_clients(*groups, setup.population.sizes)
    return result


def own_tests(setup: Setup) -> np.ndarray:
    """The client of each sample that clients hold out or, where they hold none out, of each test sample, int64 [n].

    Raises :class:`FedblendError` where there are no such samples, or test samples belong to no client of the run.
    """
    if len(setup.population.held_order):
        return setup.population.owners(held=True)
    natural, of = setup.natural_clients(), setup.data.test.client
    if natural is None or of is None or not np.isin(of, natural).all():
        raise FedblendError(
            "evaluate_model: 'each' needs test samples that all belong to a client of the run; valid with holdout "
            "(such as 0.2), or with data that have clients of their own, all of which the partition 'natural' takes"
        )
    return np.searchsorted(natural, of)


def _on_held_out(scores: Scores, setup: Setup) -> dict[str, Any]:
    """Loss and accuracy of clients' own models on the samples that they hold out, and accuracy over clients.

    Real sites state how many of their samples are right, and no losses.
    """
    result: dict[str, Any] = {} if np.isnan(scores.loss).any() else {"loss": float(scores.loss.mean())}
    if scores.right is not None:
        owner = setup.population.owners(held=True) if scores.owner is None else scores.owner
        result["accuracy"] = float(scores.right.mean())
        if scores.owner is None:
            labels = setup.data.train.y[torch.from_numpy(scores.samples)].numpy()
            result["per_class"] = _means_by(labels, scores.right, len(setup.data.classes))
        result["clients"] = over_clients(owner, scores.right, setup.population.sizes)
    return result


def _by_site(setup: Setup, right: np.ndarray) -> dict[str, Any]:
    """Accuracy on the test samples of each of the data's own clients, by name, whoever holds what in training."""
    client, names = setup.data.test.client, setup.data.client_names
    if client is None or not 0 < len(names) <= NAMED:
        return {}
    means = _means_by(client, right, len(names))
    return {"sites": {name: mean for name, mean in zip(names, means, strict=True) if mean is not None}}


def _client_tests(
    engine: Engine, weights: Tensors, setup: Setup, scores: Scores
) -> tuple[np.ndarray, np.ndarray] | None:
    """(client, right) of each sample that belongs to a client's own test, or ``None`` where there is none."""
    if scores.right is None:
        return None
    if len(setup.population.held_order):
        held = engine.score(weights, held=True)
        assert held.right is not None
        return setup.population.owners(held=True) if held.owner is None else held.owner, held.right
    natural = setup.natural_clients()
    if natural is None or setup.data.test.client is None:
        return None
    # The client of each test sample, -1 where its writer (or role) takes no part in this run.
    place = np.full(int(max(natural.max(), setup.data.test.client.max())) + 1, -1)
    place[natural] = np.arange(len(natural))
    owner = place[setup.data.test.client]
    return owner[owner >= 0], scores.right[owner >= 0]


def over_clients(owner: np.ndarray, right: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    """Mean, standard deviation and 10th percentile of clients' accuracies, and by size (FedMix, Table 13).

    ``owner`` int64 and ``right`` bool say, for each test sample, whose it is and whether it was right.
    Clients without test samples are left out. Standard deviations are over clients (not a sample's).
    """
    count = np.bincount(owner, minlength=len(sizes))
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
