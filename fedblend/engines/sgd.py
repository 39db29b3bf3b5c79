"""Optimisers for one client, SGD for a stack of clients, and the number formats of layers while clients train.

SGD has three forms with one definition (:class:`torch.optim.SGD` with momentum, weight decay and clipping):

- :class:`SGD`: one client's list of tensors; the loop engine uses it.
- :class:`StackedSGD`: the tensors [K, ...] of K clients; the stacked engine uses it.
- Within :class:`StackedSGD`, large layers may be low-rank updates of the round's first weights
  (:class:`fedblend._kernels.lowrank.Rows`): on a CPU with plain SGD only, where a stack does not record its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from fedblend._kernels.lowrank import Rows, Weights, lerp_towards
from fedblend.core.objective import Term
from fedblend.core.optimizer import Training

Precision = Literal["float32", "tf32", "bfloat16"]


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which layers compute in this precision; weights and losses stay float32."""
    if precision != "bfloat16":
        return nullcontext()
    # No cache: in a traced step the cached rounded weights would outlive the weights.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def allow_tf32(precision: Precision) -> None:
    """Set whether GPUs round the factors of float32 products to ten bits; no effect on CPUs."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def no_tf32() -> Iterator[None]:
    """Compute float32 products without rounded factors inside: models are tested in full precision."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allow_tf32("float32")
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


Products = tuple[tuple[torch.Tensor, torch.Tensor], ...]
Gradient = torch.Tensor | Products | None
"""A gradient [K, ...]; pairs of stacked matrices whose products add up to it; or ``None`` for an unused tensor."""


class ProximalStep(NamedTuple):
    """The derivative of FedProx's term, mu (w - w_start), which plain SGD adds to the gradients."""

    mu: float
    """The factor, at least 0."""
    toward: Sequence[torch.Tensor]
    """The round's first weights w_start; they broadcast over the tensors of a stack."""


class ClientOptimizer:
    """Base of the optimisers for one client, with clipping; the loop engine uses them."""

    def __init__(self, params: Sequence[torch.Tensor], train: Training, round: int) -> None:
        self.params, self.train, self.lr = list(params), train, train.lr_in(round)

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None], proximal: ProximalStep | None = None) -> None:
        """Update the parameters in place; one without a gradient does not change.

        Only plain SGD (:func:`is_plain`) takes a ``proximal`` step.
        """
        if proximal is not None:
            torch._foreach_lerp_(self.params, list(proximal.toward), self.lr * proximal.mu)
        used = [i for i, g in enumerate(gradients) if g is not None]
        grads = [g for g in gradients if g is not None]
        if not grads:
            return  # the layers whose turn it is may all be frozen
        if self.train.clip_norm is not None:
            grads = clipped(grads, self.train.clip_norm)
        self._update(used, grads)

    def _update(self, used: list[int], grads: list[torch.Tensor]) -> None:
        """Make a step by the gradients of the parameters at the positions ``used``."""
        raise TypeError(f"{type(self).__name__} defines no step")

    def state(self) -> dict[str, list[torch.Tensor]]:
        """Return what the optimiser keeps, by key, in the order of the parameters."""
        return {}

    def load(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Go on from a state."""


class SGD(ClientOptimizer):
    """SGD for one client, as :class:`torch.optim.SGD` defines it: a step is one fused call."""

    def __init__(self, params: Sequence[torch.Tensor], train: Training, round: int) -> None:
        super().__init__(params, train, round)
        self.velocity = [torch.zeros_like(p) for p in self.params] if train.momentum else []

    def _update(self, used: list[int], grads: list[torch.Tensor]) -> None:
        train, params = self.train, [self.params[i] for i in used]
        if train.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=train.weight_decay))
        if train.momentum:
            moving = [self.velocity[i] for i in used]
            torch._foreach_mul_(moving, train.momentum)
            torch._foreach_add_(moving, grads)
            grads = moving
        torch._foreach_add_(params, grads, alpha=-self.lr)

    def state(self) -> dict[str, list[torch.Tensor]]:
        return {"momentum_buffer": self.velocity}

    def load(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self.velocity = [v.clone() for v in state["momentum_buffer"]]


class TorchOptimizer(ClientOptimizer):
    """An optimiser of ``torch.optim`` for one client; its state is not kept."""

    def __init__(self, params: Sequence[torch.Tensor], train: Training, round: int) -> None:
        super().__init__(params, train, round)
        self.inner = train.optimizer.make(self.params, self.lr)

    def _update(self, used: list[int], grads: list[torch.Tensor]) -> None:
        for group in self.inner.param_groups:
            group["lr"] = self.lr
        for i, gradient in zip(used, grads, strict=True):
            # A copy: two parameters may have one tensor as their gradient.
            self.params[i].grad = gradient.clone()
        self.inner.step()
        self.inner.zero_grad()


class Accumulator:
    """Gradients of several batches of one client; their mean is weighted by samples."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor | None] = []
        self.samples = 0

    def add(self, gradients: Sequence[torch.Tensor | None], samples: int) -> None:
        """Add the gradients of a batch."""
        scaled = [None if g is None else g * samples for g in gradients]
        before = self.sums or [None] * len(scaled)
        self.sums = [b if s is None else s if b is None else b + s for b, s in zip(before, scaled, strict=True)]
        self.samples += samples

    def take(self) -> list[torch.Tensor | None]:
        """Return the mean, and begin anew."""
        mean = [None if s is None else s / self.samples for s in self.sums]
        self.sums, self.samples = [], 0
        return mean


class StackedOptimizer:
    """Base of the optimisers for a stack of clients: the learning rate.

    The round's learning rate is the number ``lr``. On GPUs and in recorded steps it is the tensor ``rate`` [], which
    holds minus lr and can change between replays. The two round products differently, except for powers of two.
    """

    def __init__(self, train: Training, rate: torch.Tensor | None = None) -> None:
        self.train, self.rate = train, rate
        self.lr = train.lr

    def begin(self, round: int) -> None:
        """Set the round's learning rate."""
        self.lr = self.train.lr_in(round)
        if self.rate is not None:
            self.rate.fill_(-self.lr)


class StackedSGD(StackedOptimizer):
    """SGD for a stack of K clients, with tensors [K, ...]; the stacked engine uses it.

    Each client's step is that of :class:`SGD`, clipped by the client's own norm. Plain SGD adds gradients that are
    products of matrices without computing the products, and updates low-rank weights by their factors.
    """

    @torch.no_grad()
    def step(
        self,
        params: Sequence[Weights],
        velocity: Sequence[torch.Tensor],
        gradients: Sequence[Gradient],
        active: torch.Tensor | None = None,
        proximal: ProximalStep | None = None,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Update parameters [K, ...] in place; a client whose ``active``, bool [K], is false does not change.

        ``velocity`` is empty without momentum; only plain SGD takes a ``proximal`` step. ``factor`` float32 [K]
        multiplies the learning rate, where that changes within the round.
        """
        train = self.train
        if is_plain(train):
            if proximal is not None:
                self._lerp_towards(params, proximal, active)
            self._step_plain(params, gradients, active)
            return
        tensors, gradients = self._step_low_rank(params, gradients, active)
        used = [i for i, g in enumerate(gradients) if g is not None]
        if not used:
            return
        tensors = [tensors[i] for i in used]
        grads = [sum_of_products(g) if isinstance(g, tuple) else g for g in gradients if g is not None]
        if train.clip_norm is not None:
            grads = clipped_by_client(grads, train.clip_norm)
        if train.weight_decay:
            grads = list(torch._foreach_add(grads, tensors, alpha=train.weight_decay))
        if train.momentum:
            velocity = [velocity[i] for i in used]
            updated = torch._foreach_add(torch._foreach_mul(velocity, train.momentum), grads)
            torch._foreach_copy_(velocity, keep_inactive(active, updated, velocity))
            grads = list(updated)
        if factor is not None:
            grads = [g * broadcast(factor, g) for g in grads]
        self._add(tensors, [zero_inactive(active, g) for g in grads])

    def _lerp_towards(self, params: Sequence[Weights], proximal: ProximalStep, active: torch.Tensor | None) -> None:
        share = self.lr * proximal.mu if self.rate is None else self.rate * -proximal.mu
        for param, toward in zip(params, proximal.toward, strict=True):
            if isinstance(param, Rows):
                param.lerp_towards(toward, self.lr * proximal.mu, active)
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
        """Update the weights that are low-rank updates; return the other weights and their gradients."""
        dense: list[tuple[torch.Tensor, Gradient]] = []
        for param, gradient in zip(params, gradients, strict=True):
            if not isinstance(param, Rows):
                dense.append((param, gradient))
            elif isinstance(gradient, tuple):
                for a, b in gradient:
                    param.add(zero_inactive(active, a), zero_inactive(active, b), -self.lr)
        return [param for param, _ in dense], [gradient for _, gradient in dense]

    def _step_plain(
        self, params: Sequence[Weights], gradients: Sequence[Gradient], active: torch.Tensor | None
    ) -> None:
        """Make a step of plain SGD; products of matrices are added to the weights without a temporary tensor."""
        dense, grads = [], []
        for param, gradient in zip(*self._step_low_rank(params, gradients, active), strict=True):
            if isinstance(gradient, tuple):
                for a, b in gradient:
                    # The factors are much smaller than their product.
                    a, b = zero_inactive(active, a), zero_inactive(active, b)
                    if self.rate is None:
                        param.baddbmm_(a, b, alpha=-self.lr)
                    else:
                        param.baddbmm_(a * self.rate, b)
            elif gradient is not None:
                dense.append(param)
                grads.append(zero_inactive(active, gradient))
        self._add(dense, grads)


def is_plain(train: Training) -> bool:
    """Whether a step is plain SGD of one batch: no momentum, no weight decay, no clipping, one rate in the round."""
    plain = train.clip_norm is None and not train.weight_decay and not train.momentum
    return plain and bool(train.optimizer.steps == "sgd") and train.schedule_in_round is None and train.accumulate == 1


def clipped(grads: list[torch.Tensor], clip_norm: float) -> list[torch.Tensor]:
    """Return one client's gradients, scaled down to a norm of ``clip_norm``."""
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    # Not in place: two parameters may have one tensor as their gradient.
    return list(torch._foreach_mul(grads, (clip_norm / (norm + 1e-6)).clamp(max=1.0)))


def clipped_by_client(grads: Sequence[torch.Tensor], clip_norm: float) -> list[torch.Tensor]:
    """Return gradients [K, ...], each client's scaled down to a norm of ``clip_norm``."""
    norm = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in grads]).norm(dim=0)
    factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    return [g * broadcast(factor, g) for g in grads]


def split_proximal(terms: Sequence[tuple[str, Term]], train: Training) -> tuple[list[tuple[str, Term]], float]:
    """Return the terms to differentiate, with their slots, and the sum of the other terms' mu.

    The other terms are proximal; their sum is the mu of a :class:`ProximalStep`. Without plain SGD all terms are
    differentiated.
    """
    if not is_plain(train):
        return list(terms), 0.0
    return [(slot, term) for slot, term in terms if not term.proximal_mu], sum(term.proximal_mu for _, term in terms)


def sum_of_products(products: Products) -> torch.Tensor:
    """Return the sum of the products of pairs of stacked matrices."""
    first, *rest = products
    total = torch.bmm(*first)
    for a, b in rest:
        total.baddbmm_(a, b)
    return total


def broadcast(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape values [K] to broadcast over a tensor [K, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


def zero_inactive(active: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Return values [K, ...] with 0 for inactive clients; not a product with 0, which infinity would turn into NaN."""
    return values if active is None else torch.where(broadcast(active, values), values, 0.0)


def keep_inactive(
    active: torch.Tensor | None, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return new values [K, ...], with the old ones for inactive clients."""
    if active is None:
        return list(new)
    return [torch.where(broadcast(active, n), n, o) for n, o in zip(new, old, strict=True)]
