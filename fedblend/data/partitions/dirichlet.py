"""Label skew by a Dirichlet distribution, drawn for each client or for each class."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pydantic

from fedblend.core.dataset import Population
from fedblend.core.random import stream
from fedblend.core.registry import Count, Positive, part
from fedblend.data.partitions.deal import (
    apportion,
    deal_counts,
    even_sizes,
    largest,
    lognormal_sizes,
    require_classes,
    require_clients,
)

FITTING_ROUNDS = 100  # Rounds of proportional fitting; the rounding corrects a remaining difference
BLOCK = 1 << 16  # Clients that are fitted together, so their part of the table stays in the cache during a round
NEGLIGIBLE = 1e-100  # Smaller proportions are taken as 0, so scaling cannot overflow


@part("partition", "dirichlet")
class Dirichlet:
    """Class proportions from a Dirichlet distribution: the smaller ``alpha``, the less IID.

    ``form = "class"``, the usual one (Yurochkin et al. 2019, Wang et al. 2020; FedMix, appendix J, Table 18, with
    alpha 0.2 and 0.5): each class is divided among the clients by p_c ~ Dir(alpha), over clients. Sizes follow from
    the draws; clients below ``min_samples`` get samples of the largest clients.

    ``form = "client"`` (Hsu et al. 2019; AggEnhance, equation 17): each client draws its proportions of the classes,
    p_i ~ Dir(alpha q), where q are those of the whole data set. Its size is ``sizes``: ``"equal"`` or
    ``"lognormal-share"`` (equation 16). :func:`fit_counts` turns proportions and sizes into counts.

    All samples are used, and every client has at least ``min_samples``.
    """

    clients: Count = 100
    """Number of clients."""
    alpha: Positive = 1.0
    """Concentration of the distribution: the smaller, the less IID."""
    form: Literal["class", "client"] = "class"
    """Draw the client shares of each class, or the class proportions of each client."""
    sizes: Literal["equal", "lognormal-share"] | None = None
    """Client sizes for "client": equal (the default), or AggEnhance's equation 16."""
    min_samples: Count = 1
    """Least samples of a client."""

    @pydantic.model_validator(mode="after")
    def _sizes_belong_to_clients(self) -> Dirichlet:
        if self.form == "class" and self.sizes is not None:
            raise ValueError(f"sizes = '{self.sizes}' needs form = 'client'; with 'class', sizes follow from the draws")
        return self

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples to clients. Raises :class:`FedblendError` if there are too few for ``min_samples``."""
        require_classes(classes, "dirichlet")
        require_clients(self.clients, len(labels), self.min_samples)
        rng = stream(seed, "partition")
        supply = np.bincount(labels, minlength=classes)
        if self.form == "class":
            counts = _draw_by_class(supply, self.clients, self.alpha, self.min_samples, rng)
        else:
            if self.sizes == "lognormal-share":
                sizes = lognormal_sizes(self.clients, len(labels), rng, at_least=self.min_samples)
            else:
                sizes = even_sizes(len(labels), self.clients)
            counts = fit_counts(draw_proportions(self.clients, supply, self.alpha, rng), sizes, supply)
        return deal_counts(labels, counts, rng)


def draw_proportions(clients: int, supply: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """p_i ~ Dir(alpha q) with q = supply / sum(supply), float64 [clients, classes] (equation 17)."""
    prior = supply / supply.sum()
    return _dirichlet(alpha * prior, prior, clients, rng)


def _dirichlet(alpha: np.ndarray, fallback: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draws from Dir(alpha), float64 [rows, len(alpha)]; 0 where alpha is 0.

    A draw that underflows, for a very small alpha, is replaced by the distribution's limit: 1 at one position, chosen
    with the probabilities ``fallback``.
    """
    drawn = np.zeros((rows, len(alpha)))
    inside = alpha > 0
    drawn[:, inside] = rng.dirichlet(alpha[inside], rows)
    bad = np.flatnonzero(~(np.abs(drawn.sum(1) - 1) < 1e-6))
    drawn[bad] = 0
    drawn[bad, rng.choice(len(alpha), len(bad), p=fallback)] = 1
    return drawn


def fit_counts(p: np.ndarray, sizes: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """Whole counts [clients, classes] near sizes * p, with row sums ``sizes`` and column sums at most ``supply``.

    The column sums of sizes * p differ from the supply. So the table is fitted in proportion (Sinkhorn: columns scaled
    to the supply and rows to the sizes, in turn), which keeps zeros and odds ratios. Then the table is rounded down,
    the largest fractions are rounded up, and missing samples are taken from the remaining supply. Needs
    sum(sizes) <= sum(supply).
    """
    table = np.where(p > NEGLIGIBLE, p, 0.0) * sizes[:, None]
    target = supply * (sizes.sum() / supply.sum())
    found = table.sum(0)
    for _ in range(FITTING_ROUNDS):
        found = _fit(table, _ratio(target, found), sizes)
        if np.abs(found - target).max() < 0.5:
            break
    table *= np.minimum(1.0, _ratio(target, found))
    counts = np.floor(table).astype(np.int64)
    missing, left = sizes - counts.sum(1), supply - counts.sum(0)
    fractions = table
    fractions -= counts
    for c in np.argsort(left):
        candidates = np.flatnonzero((missing > 0) & (fractions[:, c] > 0))
        chosen = candidates[largest(fractions[candidates, c], int(left[c]))]
        counts[chosen, c] += 1
        missing[chosen] -= 1
        left[c] -= len(chosen)
    _fill(counts, missing, left)
    return counts


def _fit(table: np.ndarray, columns: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Scale columns by ``columns`` and rows to ``sizes``, in place; return the new sums of the columns."""
    found = np.zeros(len(columns))
    for start in range(0, len(table), BLOCK):
        rows = table[start : start + BLOCK]
        rows *= columns
        rows *= _ratio(sizes[start : start + BLOCK], rows.sum(1))[:, None]
        found += rows.sum(0)
    return found


def _ratio(wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    """wanted / found, and 0 where ``found`` is negligible."""
    return np.divide(wanted, found, out=np.zeros(len(found)), where=found > NEGLIGIBLE)


def _fill(counts: np.ndarray, missing: np.ndarray, left: np.ndarray) -> None:
    """Add ``missing`` [clients], taken from ``left`` [classes] in order, to the counts (north-west corner rule)."""
    clients = np.flatnonzero(missing)
    missing = missing[clients]
    to_client, to_class = np.cumsum(missing), np.cumsum(left)
    low = np.maximum((to_client - missing)[:, None], (to_class - left)[None])
    counts[clients] += np.maximum(np.minimum(to_client[:, None], to_class[None]) - low, 0)


def _draw_by_class(
    supply: np.ndarray, clients: int, alpha: float, min_samples: int, rng: np.random.Generator
) -> np.ndarray:
    """Counts [clients, classes]: a draw for every class, then samples moved to clients below ``min_samples``."""
    even_odds = np.full(clients, 1 / clients)
    shares = _dirichlet(np.full(clients, alpha), even_odds, len(supply), rng)
    counts = np.stack([apportion(p, int(n)) for p, n in zip(shares, supply, strict=True)], axis=1)
    sizes = counts.sum(1)
    short = np.maximum(min_samples - sizes, 0)
    if not short.any():
        return counts
    # The largest clients give first, each down to min_samples. Unlike repeated draws, this always ends.
    order = np.argsort(-sizes, kind="stable")
    spare = np.maximum(sizes[order] - min_samples, 0)
    gives = np.zeros(clients, np.int64)
    gives[order] = np.clip(short.sum() - (np.cumsum(spare) - spare), 0, spare)
    taken = np.zeros_like(counts)
    for k in np.flatnonzero(gives):
        taken[k] = np.minimum(apportion(counts[k].astype(float), int(gives[k])), counts[k])
    counts -= taken
    _fill(counts, short, taken.sum(0))
    return counts
