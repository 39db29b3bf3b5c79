"""The weighted mean of FedAvg."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedblend.parts import part

Tensors = Mapping[str, torch.Tensor]


class Aggregator:
    """Base of all aggregators: a function of the uploads and their weights, in order of client."""

    def aggregate(self, uploads: Iterable[tuple[Tensors, float]]) -> dict[str, torch.Tensor]:
        """One set of tensors from (tensors, weight) pairs; at least one weight must be above 0."""
        raise TypeError(f"{type(self).__name__} defines no aggregate")


@part("aggregator", "mean")
class WeightedMean(Aggregator):
    """sum_k p_k w_k with p_k = n_k / sum n over the round's clients (FedAvg; FedMix, section 3.1).

    The further 1/K in FedMix's Algorithms 1 and 3 would shrink the weights and is left out. Uploads are
    used one at a time and may be freed after; sums are in float64, so that equal uploads average to
    themselves and the mean lies in their convex hull.
    """

    def aggregate(self, uploads: Iterable[tuple[Tensors, float]]) -> dict[str, torch.Tensor]:
        """The mean; whole-number tensors (batch norm's counters) are rounded."""
        total = 0.0
        sums: dict[str, torch.Tensor] = {}
        kinds: dict[str, torch.dtype] = {}
        for tensors, weight in uploads:
            if weight == 0:
                continue
            total += weight
            for name, tensor in tensors.items():
                if name not in sums:
                    sums[name] = tensor.double() * weight
                    kinds[name] = tensor.dtype
                else:
                    sums[name].add_(tensor, alpha=weight)
        return {
            name: (t / total if kinds[name].is_floating_point else (t / total).round()).to(kinds[name])
            for name, t in sums.items()
        }
