"""Long-tailed client sizes: a few clients have many samples, most have few."""

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
    deal_counts,
    lognormal_sizes,
    require_classes,
    require_clients,
    split_by_sizes,
)
from fedblend.data.partitions.dirichlet import draw_proportions, fit_counts


@part("partition", "lognormal")
class Lognormal:
    """Sizes by ln(|D_i| - bias) ~ N(mu, sigma^2) (AggEnhance, equation 16), classes as in the whole data.

    With ``alpha``, each client's class proportions are drawn too, p_i ~ Dir(alpha q) (equation 17). AggEnhance's
    experiments have ``clients = 100, alpha = 1``. ``sizes``: the draws are proportions of the data set
    (``"lognormal-share"``), or the sizes themselves (``"literal"``, about 30 samples a client); see
    :func:`fedblend.data.partitions.deal.lognormal_sizes`.
    """

    clients: Count = 100
    """Number of clients."""
    alpha: Positive | None = None
    """Concentration of the Dirichlet draw of class proportions; by default classes are as in the whole data set."""
    sizes: Literal["lognormal-share", "literal"] = "lognormal-share"
    """Draws as shares of the data set, or as the sizes themselves (about 30 samples a client)."""
    mu: Annotated[Float, Field(ge=-50, le=50)] = MU
    """Mean of the logarithm of a size above `bias`."""
    sigma: Annotated[Float, Field(ge=0, le=20)] = SIGMA
    """Standard deviation of the logarithm of a size above `bias`."""
    bias: Annotated[Float, Field(ge=0, le=1e9)] = BIAS
    """Samples added to every draw."""
    min_samples: Count = 1
    """Least samples of a client."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples to clients. Raises :class:`FedblendError` if there are too few."""
        n = len(labels)
        require_clients(self.clients, n, self.min_samples)
        rng = stream(seed, "partition")
        sizes = lognormal_sizes(self.clients, n, rng, self.sizes, self.mu, self.sigma, self.bias, self.min_samples)
        if self.alpha is None:
            return split_by_sizes(rng.permutation(n), sizes)
        require_classes(classes, "lognormal (with alpha)")
        supply = np.bincount(labels, minlength=classes)
        counts = fit_counts(draw_proportions(self.clients, supply, self.alpha, rng), sizes, supply)
        return deal_counts(labels, counts, rng)
