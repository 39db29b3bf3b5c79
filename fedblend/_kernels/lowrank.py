"""Weights of large dense layers in training, kept as their first value and a low-rank update.

A step of SGD on B samples adds a matrix of rank B to the weights [O, I] of a dense layer: lr g^T x, for the gradients
g [B, O] of the layer's outputs and its inputs x [B, I]. After few samples, these factors are much smaller than the
weights. With W = W_0 + A^T X,

    x W^T = x W_0^T + (x X^T) A        and        g W = g W_0 + (g A^T) X,

so the weights are not written or read for each client and step. All clients of a stack with the same W_0 read W_0
together. These are the same sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

aten = torch.ops.aten

LEAST = 1 << 18
"""Numbers of a matrix from which on it is kept as a low-rank update; smaller ones fit into the cache."""


class LowRank:
    """Weights [K, O, I] of K clients as a base and factors: base + a^T x.

    ``base`` may be one matrix, expanded, and is not written to. The factors take at most half the weights' size. When
    this room is full, base + a^T x is computed and becomes the new base.
    """

    def __init__(self, base: torch.Tensor) -> None:
        clients, outputs, inputs = base.shape
        self.base, self.owns_base = base, False
        self.capacity = _capacity(outputs, inputs)
        self.a, self.x = base.new_empty(clients, self.capacity, outputs), base.new_empty(clients, self.capacity, inputs)
        self.used = 0

    def __getitem__(self, rows: slice) -> Rows:
        """The weights of some clients, which are still stored here."""
        return Rows(self, rows)

    def __len__(self) -> int:
        return len(self.base)

    @property
    def shape(self) -> torch.Size:
        """The shape [K, O, I]."""
        return self.base.shape

    def make(self) -> torch.Tensor:
        """Compute the weights [K, O, I], which become the base; the tensor may be written to."""
        if self.used:
            a, x = self.a[:, : self.used], self.x[:, : self.used]
            if self.owns_base:
                self.base.baddbmm_(a.transpose(1, 2), x)
            else:
                self.base = self.base.baddbmm(a.transpose(1, 2), x)
        elif not self.owns_base:
            self.base = self.base.clone(memory_format=torch.contiguous_format)
        self.owns_base, self.used = True, 0
        return self.base

    def lerp_towards(self, rows: slice, toward: torch.Tensor, share: float, active: torch.Tensor | None) -> None:
        """Apply :func:`lerp_towards` to some clients; ``toward`` must be their first weights."""
        a = self.a[rows, : self.used]
        lerp_towards(a, a.new_zeros(()), share, active)
        # Before the first computed base, the base is ``toward`` itself.
        if self.owns_base:
            lerp_towards(self.base[rows], toward, share, active)

    def add(self, rows: slice, a: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        """Add factor a x for a [k, O, B] and x [k, B, I] to some clients' weights."""
        samples = x.shape[1]
        if self.used + samples > self.capacity:
            self.make()
        if samples > self.capacity:
            self.base[rows].baddbmm_(a, x, alpha=factor)
            return
        new = slice(self.used, self.used + samples)
        if len(x) < len(self):
            self.a[:, new], self.x[:, new] = 0, 0
        torch.mul(a.transpose(1, 2), factor, out=self.a[rows, new])
        self.x[rows, new] = x
        self.used += samples


@dataclass(frozen=True)
class Rows:
    """The weights of some of the clients of ``whole``."""

    whole: LowRank
    rows: slice

    def tensor(self) -> torch.Tensor:
        """Compute these weights [k, O, I]; the tensor may be written to."""
        return self.whole.make()[self.rows]

    def lerp_towards(self, toward: torch.Tensor, share: float, active: torch.Tensor | None) -> None:
        """Apply :func:`lerp_towards`; ``toward`` must be the first weights of these clients."""
        self.whole.lerp_towards(self.rows, toward, share, active)

    def add(self, a: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        """Add factor a x for a [k, O, B] and x [k, B, I]."""
        self.whole.add(self.rows, a, x, factor)

    def times(self, rows: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Multiply rows [k, B, I] by the transposed weights, or rows [k, B, O] by the weights."""
        whole, used = self.whole, self.whole.used
        base = whole.base[self.rows]
        base = base.transpose(1, 2) if transposed else base
        shared = base.stride(0) == 0
        product = (
            torch.mm(rows.flatten(0, 1), base[0]).unflatten(0, rows.shape[:2]) if shared else torch.bmm(rows, base)
        )
        if not used:
            return product
        a, x = whole.a[self.rows, :used], whole.x[self.rows, :used]
        first, second = (x, a) if transposed else (a, x)
        return product.baddbmm_(torch.bmm(rows, first.transpose(1, 2)), second)


Weights = torch.Tensor | Rows


def lerp_towards(
    weights: torch.Tensor, toward: torch.Tensor, share: float | torch.Tensor, active: torch.Tensor | None
) -> None:
    """Compute weights + share (toward - weights) in place, for weights [K, ...].

    With ``active`` bool [K], only the weights of active clients change.
    """
    if active is None:
        weights.lerp_(toward, share)
    else:
        chosen = active.view(-1, *[1] * (weights.dim() - 1))
        weights.copy_(torch.where(chosen, weights.lerp(toward, share), weights))


def _capacity(outputs: int, inputs: int) -> int:
    """The number of samples whose factors take half the weights' size."""
    return outputs * inputs // (2 * (outputs + inputs))


def is_worth_it(shape: torch.Size, samples: int) -> bool:
    """Whether a low-rank update is faster than weights [K, O, I], for steps on this number of samples."""
    return len(shape) == 3 and shape[1] * shape[2] >= LEAST and 2 * samples <= _capacity(shape[1], shape[2])


def run_times_transposed(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """x [K, B, I] times the transposed w [K, O, I]."""
    return w.times(x, True) if isinstance(w, Rows) else torch.bmm(x, w.transpose(1, 2))


def run_times(g: torch.Tensor, w: Weights) -> torch.Tensor:
    """g [K, B, O] times w [K, O, I]."""
    return w.times(g, False) if isinstance(w, Rows) else torch.bmm(g, w)


def use_low_rank(weights: Node) -> bool:
    """In a traced step that gives a weight's gradient as factors, take that weight as :class:`Rows`.

    Returns False, and changes nothing, if the weight is small or has a use that is no product with rows.
    """
    value = weights.meta.get("val")
    if weights.op != "placeholder" or value is None or len(value.shape) != 3 or value.shape[1:].numel() < LEAST:
        return False
    transposes = [user for user in weights.users if user.target is aten.transpose.int and user.args[1:] == (1, 2)]
    products = [(node, factor) for factor in (weights, *transposes) for node in factor.users if node not in transposes]
    if not all(_is_product(node, factor) for node, factor in products):
        return False
    for node, factor in products:
        node.target = run_times if factor is weights else run_times_transposed
        node.args = (node.args[0], weights)
    return True


def _is_product(node: Node, factor: Node) -> bool:
    """Whether a node is the product of some rows and the factor."""
    return node.target is aten.bmm.default and node.args[1] is factor and node.args[0] is not factor
