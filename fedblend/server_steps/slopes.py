"""Gradients of a loss at the server, as flat programs: on small batches autograd's bookkeeping is most of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fedblend.kernels.simplify import Flat


def slopes_of(loss: Callable[..., torch.Tensor], names: Sequence[str], trained: Sequence[str]) -> Flat:
    """The gradients of ``loss(weights, *batch)`` by the ``trained`` weights, as a function of tensors.

    These are all weights in the order of their ``names``, and the batch's.
    """

    def slopes(*tensors: torch.Tensor) -> list[torch.Tensor]:
        weights = {name: t.detach() for name, t in zip(names, tensors, strict=False)}
        params = [weights[name].requires_grad_() for name in trained]
        with torch.enable_grad():
            made = loss(weights, *tensors[len(names) :])
            # Zeros for a weight that the loss does not reach.
            return list(torch.autograd.grad(made, params, materialize_grads=True))

    return Flat(slopes)
