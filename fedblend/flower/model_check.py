"""What a site checks of the weights that a server sends, before it trains on them."""

from __future__ import annotations

import torch

from fedblend.core.trees import Tensors
from fedblend.flower.secrets import secret_generator
from fedblend.flower.site import RefusedByPolicy

FEWEST_INPUTS = 8
"""Inputs of a row from which on rows are compared: many random rows of fewer numbers are nearly parallel by chance."""

PARALLEL = 0.999  # Cosine of two rows, or its negative, from which on they count as multiples of each other

STEP = 0.1
"""Difference of two rows' thresholds, bias over norm, from which on they count as different. In training with strong
weight decay rows become parallel, too, and their thresholds alike: within 0.03 in our tests.
"""

DRAWS = 4  # Orders in which rows are compared: in one of them eight rows' steps stay below MOST_STEPS one time in 100

MOST_STEPS = 2  # Pairs of parallel rows with different thresholds that a layer may have by chance


def check_model(weights: Tensors) -> None:
    """Raise :class:`RefusedByPolicy` if a layer's rows are multiples of each other with different thresholds.

    Such rows divide samples into bins by one number of them, and the difference of two rows' gradients is the sum over
    the samples of a bin, mostly one; also in a masked sum (Fowl et al. 2022, "Robbing the Fed", section 3).
    """
    for name, rows in weights.items():
        bias = weights.get(f"{name.removesuffix('weight')}bias")
        if rows.dim() < 2 or not rows.is_floating_point() or bias is None or bias.shape != rows.shape[:1]:
            continue
        if (found := max(steps(rows.flatten(1), bias) for _ in range(DRAWS))) > MOST_STEPS:
            raise RefusedByPolicy(
                f"the server's model: '{name}' has {found} pairs of parallel rows with different biases, by which the "
                f"gradients of single samples can be told apart; valid: {MOST_STEPS} at most, as training makes them"
            )


def steps(rows: torch.Tensor, bias: torch.Tensor) -> int:
    """Return how many pairs of rows [n, d] are parallel and have different thresholds, of n - 1 pairs of neighbours.

    Neighbours are those along a random direction, in random order where rows are parallel. Rows of zeros have none.
    """
    rng = secret_generator()
    order = torch.from_numpy(rng.permutation(len(rows)))
    rows, bias = rows[order].float(), bias[order].float()
    norm = torch.linalg.vector_norm(rows, dim=1)
    if rows.shape[1] < FEWEST_INPUTS:
        return 0
    unit, threshold = rows[norm > 0] / norm[norm > 0, None], (bias / norm)[norm > 0]
    along = unit @ torch.from_numpy(rng.standard_normal(rows.shape[1])).float()
    order, sign = along.abs().argsort(), along.sign()
    unit, threshold = (unit * sign[:, None])[order], (threshold * sign)[order]
    parallel = (unit[1:] * unit[:-1]).sum(1) > PARALLEL
    return int((parallel & ((threshold[1:] - threshold[:-1]).abs() > STEP)).sum())


def check_first(weights: Tensors, first: Tensors) -> None:
    """Raise :class:`RefusedByPolicy` unless ``weights`` are the experiment's ``first`` ones.

    Processors differ in the last digits of drawn numbers.
    """
    for name, tensor in weights.items():
        if not torch.allclose(tensor.double(), first[name].double(), rtol=1e-4, atol=1e-6):
            raise RefusedByPolicy(
                f"the server's model: '{name}' of the first round is not that of the agreed experiment; valid: the "
                "first weights that its seed makes (agreed in its site file)"
            )
