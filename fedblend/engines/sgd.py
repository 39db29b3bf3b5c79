"""In which numbers convolutions and matrix products are computed while clients train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from fedblend._kernels.dense import add_product
from fedblend._kernels.lowrank import Rows, Weights, lerp_towards
from fedblend.core.objective import Term
from fedblend.experiment.fields import Train

Precision = Literal["float32", "tf32", "bfloat16"]


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, layers compute in this precision; their weights and the losses stay float32."""
    if precision != "bfloat16":
        return nullcontext()
    # Its cache of rounded weights would outlive them in a traced step.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def allow_tf32(precision: Precision) -> None:
    """Let GPUs round the factors of float32 products to ten bits, or not; nothing else knows such products."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def no_tf32() -> Iterator[None]:
    """Inside, no GPU rounds the factors of products: how models are tested, whatever they were trained in."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allow_tf32("float32")
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


Products = tuple[tuple[torch.Tensor, torch.Tensor], ...]
Gradient = torch.Tensor | Products | None
"""A gradient [K, ...], or pairs of stacks of matrices whose products add up to it, or none for an unused tensor."""


class ProximalStep(NamedTuple):
    """What plain steps of SGD add to gradients: ``mu`` times the distance from the round's first weights, ``toward``.

    The derivative of FedProx's term. Toward tensors broadcast over those of a stack.
    """

    mu: float
    toward: Sequence[torch.Tensor]


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
    def step(self, gradients: Sequence[torch.Tensor | None], pull: ProximalStep | None = None) -> None:
        """Move the parameters, in place; with a ``pull``, which only plain steps take, toward others besides."""
        train = self.train
        if pull is not None:
            torch._foreach_lerp_(self.params, list(pull.toward), self.lr * pull.mu)
        params = [p for p, g in zip(self.params, gradients, strict=True) if g is not None]
        grads = [g for g in gradients if g is not None]
        if train.clip_norm is not None:
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            # Not in place: two parameters may have one tensor as their gradient.
            grads = list(torch._foreach_mul(grads, (train.clip_norm / (norm + 1e-6)).clamp(max=1.0)))
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

    What :class:`SGD` does to a client, this does to each; norms for clipping are each client's own. The learning rate
    of the round is ``lr``, a number, or where steps are recorded ``rate``, a tensor [] that can be changed: minus lr.
    The two differ in how products are rounded, but for a rate that is a power of two.
    """

    def __init__(self, train: Train, rate: torch.Tensor | None = None) -> None:
        self.train, self.rate = train, rate
        self.lr = train.lr

    def begin(self, round: int) -> None:
        """Take a round's learning rate."""
        self.lr = self.train.lr_in(round)
        if self.rate is not None:
            self.rate.fill_(-self.lr)

    @torch.no_grad()
    def step(
        self,
        params: Sequence[Weights],
        velocity: Sequence[torch.Tensor],
        gradients: Sequence[Gradient],
        active: torch.Tensor | None = None,
        pull: ProximalStep | None = None,
    ) -> None:
        """Move parameters [K, ...] in place; where ``active`` bool [K] is given and false, a client stays still.

        ``velocity`` is empty without momentum; only plain steps take a ``pull``.
        """
        train = self.train
        if is_plain(train):
            if pull is not None:
                self._lerp_towards(params, pull, active)
            self._step_plainly(params, gradients, active)
            return
        tensors, gradients = self._step_low_rank(params, gradients, active)
        touched = [i for i, g in enumerate(gradients) if g is not None]
        tensors = [tensors[i] for i in touched]
        grads = [_added_up(g) if isinstance(g, tuple) else g for g in gradients if g is not None]
        if train.clip_norm is not None:
            norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
            factor = (train.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            grads = [g * _along(factor, g) for g in grads]
        if train.weight_decay:
            grads = list(torch._foreach_add(grads, tensors, alpha=train.weight_decay))
        if train.momentum:
            velocity = [velocity[i] for i in touched]
            moved = torch._foreach_add(torch._foreach_mul(velocity, train.momentum), grads)
            torch._foreach_copy_(velocity, _where(active, moved, velocity))
            grads = list(moved)
        self._add(tensors, [_held(active, g) for g in grads])

    def _lerp_towards(self, params: Sequence[Weights], pull: ProximalStep, active: torch.Tensor | None) -> None:
        share = self.lr * pull.mu if self.rate is None else self.rate * -pull.mu
        for param, toward in zip(params, pull.toward, strict=True):
            if isinstance(param, Rows):
                param.lerp_towards(toward, self.lr * pull.mu, active)
            else:
                lerp_towards(param, toward, share, active)

    def _add(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        if not params:
            return
        if self.rate is None:
            torch._foreach_add_(params, grads, alpha=-self.lr)
        else:
            torch._foreach_add_(params, torch._foreach_mul(grads, self.rate))

    def _step_low_rank(
        self, params: Sequence[Weights], gradients: Sequence[Gradient], active: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[Gradient]]:
        """Move the weights that are kept as low-rank updates; gives the others and their gradients."""
        others: list[tuple[torch.Tensor, Gradient]] = []
        for param, gradient in zip(params, gradients, strict=True):
            if not isinstance(param, Rows):
                others.append((param, gradient))
            elif isinstance(gradient, tuple):
                for a, b in gradient:
                    param.add(_held(active, a), _held(active, b), -self.lr)
        return [param for param, _ in others], [gradient for _, gradient in others]

    def _step_plainly(
        self, params: Sequence[Weights], gradients: Sequence[Gradient], active: torch.Tensor | None
    ) -> None:
        """Plain SGD, which adds a product of matrices without making it first."""
        others, grads = [], []
        for param, gradient in zip(*self._step_low_rank(params, gradients, active), strict=True):
            if isinstance(gradient, tuple):
                for a, b in gradient:
                    # The factors are much smaller than their product.
                    a, b = _held(active, a), _held(active, b)
                    if self.rate is None:
                        add_product(param, a, b, -self.lr)
                    else:
                        add_product(param, a * self.rate, b, 1.0)
            elif gradient is not None:
                others.append(param)
                grads.append(_held(active, gradient))
        self._add(others, grads)


def is_plain(train: Train) -> bool:
    """Whether a step adds gradients times the learning rate, and nothing else."""
    return train.clip_norm is None and not train.weight_decay and not train.momentum


def split_proximal(terms: Sequence[tuple[str, Term]], train: Train) -> tuple[list[tuple[str, Term]], float]:
    """The terms (with their slots) that have to be differentiated, and the sum of the others' mu.

    A :class:`ProximalStep` takes the sum.
    """
    if not is_plain(train):
        return list(terms), 0.0
    return [(slot, term) for slot, term in terms if not term.pull], sum(term.pull for _, term in terms)


def _added_up(products: Products) -> torch.Tensor:
    first, *others = products
    total = torch.bmm(*first)
    for a, b in others:
        total.baddbmm_(a, b)
    return total


def _along(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers of clients [K] so that they broadcast over a tensor [K, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _held(active: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Values [K, ...], 0 for clients that are held still: no product with 0, since theirs may have gone to infinity."""
    return values if active is None else torch.where(_along(active, values), values, 0.0)


def _where(active: torch.Tensor | None, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if active is None:
        return list(new)
    return [torch.where(_along(active, n), n, o) for n, o in zip(new, old, strict=True)]
