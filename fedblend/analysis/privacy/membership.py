"""Membership advantage: how well samples that were used can be told from samples that were not.

An attacker has a sample and asks whether a client holds it. It compares a score of the sample with a threshold (Yeom et
al. 2018). Of the final model the score is the sample's loss, of shared entries the distance to the nearest of them, of
second moments the leverage. The advantage is the true minus the false positive rate, from 0 (guessing) to 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
import pandas as pd
import torch
from torch.func import functional_call

from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.trees import Tensors

SAMPLES = 2000  # Most samples of each half, training and test, that are scored
ENOUGH = 200  # Fewest samples that clients hold out for them to be scored as the half that was not used
AT_ONCE = 250  # Samples in one forward pass, or in one table of distances
CLIENTS = 10  # Most clients whose sums are attacked one by one


def of_model(
    setup: Setup, weights: Tensors, clients: Collection[int] | None = None, sizes: np.ndarray | None = None
) -> float:
    """The advantage against a model, by the loss of each sample; NaN if no sample can be compared.

    ``clients`` are those that trained it, by default all: samples of others were not used. Client k used its first
    ``sizes[k]`` samples, by default all. Both halves have the same classes: a model has smaller losses on classes that
    its clients have, also of samples that it never saw.
    """
    model = setup.model.eval()

    @torch.no_grad()
    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = functional_call(model, dict(weights), (setup.scale(x),))
        return setup.task.losses(outputs, y)

    return _measured(_halves(setup, clients, sizes, same_classes=setup.task.kind == "classification"), losses)


def of_entries(
    setup: Setup,
    entries: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sizes: np.ndarray | None = None,
) -> float:
    """The advantage against shared entries [n, ...], by the distance to the nearest; NaN if nothing can be compared.

    ``read`` makes of stored samples what the entries are made of others; by default inputs. Entries of client k are of
    its first ``sizes[k]`` samples, by default of all.
    """
    flat, read = entries.double().flatten(1), read or setup.scale

    def nearest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        own = read(x).double().flatten(1)
        parts = (torch.cdist(own, part).amin(1) for part in flat.split(AT_ONCE * 8))
        return functools.reduce(torch.minimum, parts)

    return _measured(_halves(setup, sizes=sizes), nearest)


def of_second_moments(
    setup: Setup,
    grams: Mapping[int | None, torch.Tensor],
    read: Callable[[torch.Tensor], torch.Tensor],
    sizes: np.ndarray,
) -> float:
    """The mean advantage against second moments G = sum f f^T of features, float64 [d, d] by client (``None``: of all).

    The score of a sample is its leverage f^T G^-1 f, at most 1 where f is a term of G. Fewer samples than features span
    a subspace, outside of which G is nearly 0 and a stranger's leverage large. Eigenvalues below 1e-6 of their mean, or
    no larger than those that noise made negative, are raised to that. ``read`` makes features of stored samples.
    """
    found = []
    for client, gram in grams.items():
        values, vectors = torch.linalg.eigh(gram)
        floor = max(1e-6 * float(values.clamp(min=0).mean()), -float(values[0]))
        root = vectors * values.clamp(min=floor).rsqrt()

        def leverages(x: torch.Tensor, y: torch.Tensor, root: torch.Tensor = root) -> torch.Tensor:
            return (read(x).double() @ root).square().sum(1)

        halves = _halves(setup, None if client is None else [client], sizes, same_classes=True)
        found.append(_measured(halves, leverages))
    return float(np.nanmean(found)) if not np.isnan(found).all() else math.nan


def advantage(members: np.ndarray, others: np.ndarray) -> float:
    """True minus false positive rate of the best threshold, where members have the smaller scores.

    The threshold is the best one on every second score, and is judged on the other scores, so that the advantage of
    samples that nothing distinguishes is 0 on average. The two halves change places, and the mean is returned.

    >>> scores = np.arange(4.0)
    >>> advantage(scores, scores + 10), advantage(scores + 10, scores)
    (1.0, 0.0)
    """
    halves = [(members[k::2], others[k::2]) for k in (0, 1)]
    found = []
    for (chosen_in, chosen_out), (judged_in, judged_out) in (halves, halves[::-1]):
        scores = np.unique(np.concatenate([chosen_in, chosen_out]))
        thresholds = np.concatenate([[-np.inf], (scores[1:] + scores[:-1]) / 2, [np.inf]])
        gain = _share_up_to(chosen_in, thresholds) - _share_up_to(chosen_out, thresholds)
        best = thresholds[gain.argmax()][None]
        found.append(float((_share_up_to(judged_in, best) - _share_up_to(judged_out, best))[0]))
    return float(np.mean(found))


def standard_error(advantage: float, samples: int) -> float:
    """The largest standard error of an advantage over so many members and as many others.

    It is that of the difference of two shares p and p - advantage, which is largest for p = (1 + advantage) / 2.

    >>> standard_error(0.0, 200), standard_error(1.0, 200)
    (0.05, 0.0)
    """
    return math.sqrt((1 - advantage**2) / (2 * samples))


def compared(setup: Setup) -> int:
    """How many members, and as many others, attacks on shared entries compare; those on the model at most as many."""
    return len(_halves(setup)[0][1])


def _share_up_to(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """The share of scores at or below each threshold."""
    return np.searchsorted(np.sort(scores), thresholds, side="right") / max(1, len(scores))


Half = tuple[torch.Tensor, torch.Tensor]


def _halves(
    setup: Setup, clients: Collection[int] | None = None, sizes: np.ndarray | None = None, same_classes: bool = False
) -> tuple[Half, Half]:
    """Up to :data:`SAMPLES` training samples of the clients (default: of all), and as many other samples, as stored.

    The training samples are the first ``sizes[k]`` of client k (default: all): later ones had not arrived.
    The others are what these clients hold out, or the test samples where that is too few: test samples may be of other
    people, who could be told from the clients for that alone. With ``same_classes`` each class is as frequent in both.
    """
    rng, train = stream(setup.experiment.seed, "membership"), setup.data.train
    population = setup.population
    owners, held = population.owners(), population.rows("holdout")
    is_used = np.ones(len(owners), bool)
    if sizes is not None:
        is_used = np.arange(len(owners)) - population.offsets[owners] < sizes[owners]
    if clients is not None:
        is_used &= np.isin(owners, sorted(clients))
        held = held[np.isin(population.owners("holdout"), sorted(clients))]
    used = population.order[is_used]
    rest = setup.data.test if len(held) < ENOUGH else train
    unused = np.arange(len(rest.y)) if rest is not train else held
    used, unused = rng.permutation(used), rng.permutation(unused)
    if same_classes:
        pairs = _numbered_in_class(used, train.y).merge(_numbered_in_class(unused, rest.y), on=["class", "number"])
        used, unused = pairs["row_x"].to_numpy(copy=True), pairs["row_y"].to_numpy(copy=True)
    count = min(SAMPLES, len(used), len(unused))
    members, others = torch.from_numpy(used[:count]), torch.from_numpy(unused[:count])
    return (train.x[members], train.y[members]), (rest.x[others], rest.y[others])


def _numbered_in_class(rows: np.ndarray, y: torch.Tensor) -> pd.DataFrame:
    """The class of each row, and how many rows of that class come before it."""
    frame = pd.DataFrame({"row": rows, "class": y[torch.from_numpy(rows)].numpy()})
    return frame.assign(number=frame.groupby("class").cumcount())


def _measured(halves: tuple[Half, Half], score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """The advantage by the scores of both halves; NaN where they are empty."""
    if not len(halves[0][1]):
        return math.nan
    parts = ([score(x, y) for x, y in zip(*(t.split(AT_ONCE) for t in half), strict=True)] for half in halves)
    return advantage(*(torch.cat(scores).numpy() for scores in parts))
