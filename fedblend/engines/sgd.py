"""One step of stochastic gradient descent on a list of tensors, fused over the list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedblend.config import Train

Products = tuple[tuple[torch.Tensor, torch.Tensor], ...]
Gradient = torch.Tensor | Products | None
"""A gradient [K, ...], or pairs of stacks of matrices whose products add up to it, or none for an unused tensor."""


class SGD:
    """SGD as :class:`torch.optim.SGD` defines it (momentum, weight decay), on plain lists of tensors.

    Gradients come in as a list, so that a step makes one fused call; a gradient may be ``None``.
    """

    def __init__(self, params: Sequence[torch.Tensor], train: Train, round: int) -> None:
        self.params = list(params)
        self.train = train
        self.lr = train.lr_in(round)
        self.velocity: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Move the parameters, in place."""
        train = self.train
        params = [p for p, g in zip(self.params, gradients, strict=True) if g is not None]
        grads = [g for g in gradients if g is not None]
        if train.clip_norm is not None:
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            torch._foreach_mul_(grads, (train.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if train.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=train.weight_decay))
        if train.momentum:
            grads = self._with_momentum(gradients, grads)
        torch._foreach_add_(params, grads, alpha=-self.lr)

    def _with_momentum(self, gradients: Sequence[torch.Tensor | None], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.velocity is None:
            self.velocity = [torch.zeros_like(p) for p in self.params]
        moving = [v for v, g in zip(self.velocity, gradients, strict=True) if g is not None]
        torch._foreach_mul_(moving, self.train.momentum)
        torch._foreach_add_(moving, grads)
        return moving


class StackedSGD:
    """The same step for a stack of clients: every tensor has a leading dimension of clients.

    What :class:`SGD` does to a client, this does to each; norms for clipping are each client's own.
    """

    def __init__(self, params: Sequence[torch.Tensor], train: Train, round: int) -> None:
        self.params = list(params)
        self.train = train
        self.lr = train.lr_in(round)
        self.velocity = [torch.zeros_like(p) for p in self.params] if train.momentum else []

    @torch.no_grad()
    def step_rows(self, gradients: Sequence[Gradient], rows: slice, active: torch.Tensor | None = None) -> None:
        """Move the clients ``rows``, in place; where ``active`` bool [rows] is given and false, one stays still."""
        train = self.train
        if train.clip_norm is None and not train.weight_decay and not train.momentum and active is None:
            self._step_plainly(gradients, rows)
            return
        touched = [i for i, g in enumerate(gradients) if g is not None]
        params = [self.params[i][rows] for i in touched]
        grads = [_added_up(g) if isinstance(g, tuple) else g for g in gradients if g is not None]
        if train.clip_norm is not None:
            norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
            factor = (train.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            grads = [g * _along(factor, g) for g in grads]
        if train.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=train.weight_decay))
        if train.momentum:
            velocity = [self.velocity[i][rows] for i in touched]
            moved = torch._foreach_add(torch._foreach_mul(velocity, train.momentum), grads)
            torch._foreach_copy_(velocity, _where(active, moved, velocity))
            grads = list(moved)
        if active is not None:
            # Not a product with 0: what is held still may have gone to infinity.
            grads = [torch.where(_along(active, g), g, 0.0) for g in grads]
        torch._foreach_add_(params, grads, alpha=-self.lr)

    def _step_plainly(self, gradients: Sequence[Gradient], rows: slice) -> None:
        """Plain SGD, which adds a product of matrices without making it first."""
        params, grads = [], []
        for param, gradient in zip(self.params, gradients, strict=True):
            if isinstance(gradient, tuple):
                for a, b in gradient:
                    param[rows].baddbmm_(a, b, alpha=-self.lr)
            elif gradient is not None:
                params.append(param[rows])
                grads.append(gradient)
        if params:
            torch._foreach_add_(params, grads, alpha=-self.lr)


def _added_up(products: Products) -> torch.Tensor:
    first, *others = products
    total = torch.bmm(*first)
    for a, b in others:
        total.baddbmm_(a, b)
    return total


def _along(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers of clients [K] so that they broadcast over a tensor [K, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _where(active: torch.Tensor | None, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if active is None:
        return list(new)
    return [torch.where(_along(active, n), n, o) for n, o in zip(new, old, strict=True)]
