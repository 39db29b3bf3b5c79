"""Weights of large dense layers in training: where they began, and a low-rank update.

A step of SGD on B samples adds to the weights [O, I] of a dense layer a matrix of rank B: lr g^T x, of the gradients
g [B, O] of its outputs and its inputs x [B, I]. So long as a client has seen few samples, those factors are much less
than the weights, which need not be written, nor read, once for each client and step: with W = W_0 + A^T X,

    x W^T = x W_0^T + (x X^T) A        and        g W = g W_0 + (g A^T) X,

and all clients of a stack that begin with the same W_0 read it together. These are the same sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fedblend._kernels.dense import made_of, run_dense, takes

aten = torch.ops.aten

LEAST = 1 << 18
"""Numbers of a matrix from which on it is kept so; smaller ones stay in the cache."""


class LowRank:
    """Weights [K, O, I] of K clients as a ``base`` and factors that are added up: base + a^T x.

    ``base`` may be one matrix, expanded, and is not written to. There is room for factors of half the weights' size;
    when it is used up, the weights are made, and are the base from then on.
    """

    def __init__(self, base: torch.Tensor) -> None:
        clients, outputs, inputs = base.shape
        self.base, self.own = base, False
        self.most = room(outputs, inputs)
        self.a, self.x = base.new_empty(clients, self.most, outputs), base.new_empty(clients, self.most, inputs)
        self.used = 0

    def __getitem__(self, rows: slice) -> Rows:
        """Some clients' weights, which stay part of these."""
        return Rows(self, rows)

    def __len__(self) -> int:
        return len(self.base)

    @property
    def shape(self) -> torch.Size:
        """[K, O, I]."""
        return self.base.shape

    def make(self) -> torch.Tensor:
        """The weights themselves, of which later steps are made: a tensor that may be written to."""
        if self.used:
            a, x = self.a[:, : self.used], self.x[:, : self.used]
            if self.own:
                self.base.baddbmm_(a.transpose(1, 2), x)
            elif self.base.stride(0) == 0:
                self.base = made_of(self.base[0], a, x)
            else:
                self.base = self.base.baddbmm(a.transpose(1, 2), x)
        elif not self.own:
            self.base = self.base.clone(memory_format=torch.contiguous_format)
        self.own, self.used = True, 0
        return self.base

    def lerp_towards(self, rows: slice, toward: torch.Tensor, share: float, active: torch.Tensor | None) -> None:
        """:func:`lerp_towards` for some clients, toward the weights that they began with."""
        a = self.a[rows, : self.used]
        lerp_towards(a, a.new_zeros(()), share, active)
        # Until it is the stack's own, the base is where they began.
        if self.own:
            lerp_towards(self.base[rows], toward, share, active)

    def add(self, rows: slice, a: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        """Add factor a x for a [k, O, B] and x [k, B, I] to some clients' weights."""
        samples = x.shape[1]
        if self.used + samples > self.most:
            self.make()
        if samples > self.most:
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
    """The weights of some of the clients whose weights ``whole`` keeps."""

    whole: LowRank
    rows: slice

    def tensor(self) -> torch.Tensor:
        """These weights themselves, which may be written to."""
        return self.whole.make()[self.rows]

    def lerp_towards(self, toward: torch.Tensor, share: float, active: torch.Tensor | None) -> None:
        """:func:`lerp_towards` toward the weights that these clients began with."""
        self.whole.lerp_towards(self.rows, toward, share, active)

    def add(self, a: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        """Add factor a x for a [k, O, B] and x [k, B, I]."""
        self.whole.add(self.rows, a, x, factor)

    def times(self, rows: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Rows [k, B, I] by the transposed weights, or rows [k, B, O] by the weights."""
        whole, used = self.whole, self.whole.used
        base = whole.base[self.rows]
        made = _shared(rows, base, transposed) if base.stride(0) == 0 else _times(rows, base, transposed)
        if not used:
            return made
        a, x = whole.a[self.rows, :used], whole.x[self.rows, :used]
        first, second = (x, a) if transposed else (a, x)
        return made.baddbmm_(torch.bmm(rows, first.transpose(1, 2)), second)


Weights = torch.Tensor | Rows


def lerp_towards(
    weights: torch.Tensor, toward: torch.Tensor, share: float | torch.Tensor, active: torch.Tensor | None
) -> None:
    """Move weights [K, ...] a share of their way toward others, in place; all, or where ``active`` bool [K] is true."""
    if active is None:
        weights.lerp_(toward, share)
    else:
        chosen = active.view(-1, *[1] * (weights.dim() - 1))
        weights.copy_(torch.where(chosen, weights.lerp(toward, share), weights))


def room(outputs: int, inputs: int) -> int:
    """Samples for whose factors there is room."""
    return outputs * inputs // (2 * (outputs + inputs))


def is_worth_it(shape: torch.Size, samples: int) -> bool:
    """Whether weights [K, O, I] should be kept so, for steps on so many samples."""
    return len(shape) == 3 and shape[1] * shape[2] >= LEAST and 2 * samples <= room(shape[1], shape[2])


def run_times_transposed(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """x [K, B, I] times the transposed w [K, O, I]."""
    return w.times(x, True) if isinstance(w, Rows) else _times(x, w, True)


def run_times(g: torch.Tensor, w: Weights) -> torch.Tensor:
    """g [K, B, O] times w [K, O, I]."""
    return w.times(g, False) if isinstance(w, Rows) else _times(g, w, False)


def use_low_rank(weights: Node) -> bool:
    """In a traced step that gives a weight's gradient as factors, let that weight come in as :class:`Rows`.

    Only where every use of it is a product with some rows; says whether it is.
    """
    shown = weights.meta.get("val")
    if weights.op != "placeholder" or shown is None or len(shown.shape) != 3 or shown.shape[1:].numel() < LEAST:
        return False
    turned = [user for user in weights.users if user.target is aten.transpose.int and user.args[1:] == (1, 2)]
    products = [(node, factor) for factor in (weights, *turned) for node in factor.users if node not in turned]
    if not all(_is_product(node, factor) for node, factor in products):
        return False
    for node, factor in products:
        node.target = run_times if factor is weights else run_times_transposed
        node.args = (node.args[0], weights)
    return True


def _is_product(node: Node, factor: Node) -> bool:
    """Whether a node is some rows times that factor."""
    is_one = node.target in (aten.bmm.default, run_dense)
    return is_one and node.args[1] is factor and node.args[0] is not factor


def _times(rows: torch.Tensor, w: torch.Tensor, transposed: bool) -> torch.Tensor:
    if not transposed:
        return torch.bmm(rows, w)
    turned = w.transpose(1, 2)
    return run_dense(rows, turned) if takes(rows, turned) else torch.bmm(rows, turned)


def _shared(rows: torch.Tensor, base: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Rows of all clients by one matrix."""
    flat = rows.reshape(-1, rows.shape[2])
    # Few rows of a long matrix are faster as columns.
    made = torch.mm(base[0], flat.t()).t().contiguous() if transposed else torch.mm(flat, base[0])
    return made.view(*rows.shape[:2], -1)
