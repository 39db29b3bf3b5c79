"""Long-tailed client sizes: a few clients hold much, most hold little."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedblend.core.dataset import Population
from fedblend.core.random import stream
from fedblend.core.registry import Count, Float, Positive, part
from fedblend.data.partitions.deal import (
    BIAS,
    MU,
    SIGMA,
    cut,
    deal_counts,
    lognormal_sizes,
    require_classes,
    require_clients,
)
from fedblend.data.partitions.dirichlet import fitted, proportions


@part("partition", "lognormal")
class Lognormal:
    """Sizes by ln(|D_i| - bias) ~ N(mu, sigma^2) (AggEnhance, equation 16), classes as in the whole data.

    With ``alpha``, each client's class proportions are drawn too, p_i ~ Dir(alpha q) (equation 17): the
    split of AggEnhance's experiments is ``clients = 100, alpha = 1``. ``sizes``: the draws are
    proportions of the data (``"lognormal-share"``), or the sizes themselves (``"literal"``, about 30
    samples a client); see :func:`fedblend.data.partitions.deal.lognormal_sizes`.
    """

    clients: Count = 100
    """Number of clients."""
    alpha: Positive | None = None
    """Concentration of the Dirichlet draw of class proportions; without it classes are as in the whole data."""
    sizes: Literal["lognormal-share", "literal"] = "lognormal-share"
    """Whether draws are shares of all the data, or the sizes themselves (about 30 samples a client)."""
    mu: Annotated[Float, Field(ge=-50, le=50)] = MU
    """Mean of the logarithm of a size above `bias`."""
    sigma: Annotated[Float, Field(ge=0, le=20)] = SIGMA
    """Standard deviation of the logarithm of a size above `bias`."""
    bias: Annotated[Float, Field(ge=0, le=1e9)] = BIAS
    """Samples that are added to every draw."""
    min_samples: Count = 1
    """Samples that every client gets at least."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples out. Raises :class:`FedblendError` if there are too few."""
        n = len(labels)
        require_clients(self.clients, n, self.min_samples)
        rng = stream(seed, "partition")
        sizes = lognormal_sizes(self.clients, n, rng, self.sizes, self.mu, self.sigma, self.bias, self.min_samples)
        if self.alpha is None:
            return cut(rng.permutation(n), sizes)
        require_classes(classes, "lognormal (with alpha)")
        supply = np.bincount(labels, minlength=classes)
        return deal_counts(labels, fitted(proportions(self.clients, supply, self.alpha, rng), sizes, supply), rng)
