"""The kernels as differentiable operators on stacked tensors: K clients, each with weights of its own.

A convolution is bilinear in image and weights, so its two derivatives are bilinear forms of the same kind, and the
three of them are closed under differentiation: second derivatives (FedMix's Taylor term) cost no further kernel.
The derivative of a max pool picks the values at the maxima, and its adjoint spreads gradients to those places.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fedblend._kernels import build
from fedblend._kernels import winograd as winograd_kernels
from fedblend._kernels.tracing import opaque


@functools.cache
def _gpu() -> Any:
    """The kernels for GPUs; the import of Triton takes a while."""
    return importlib.import_module("fedblend._kernels.gpu")


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def are_usable(device: torch.device) -> bool:
    """Whether kernels for a device can be had here: by a C++ compiler; by Triton on NVIDIA's GPUs since Ampere."""
    if device.type == "cuda":
        has_units = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
        return has_units and importlib.util.find_spec("triton") is not None
    return device.type == "cpu" and build.library() is not None


def _call_conv(
    name: str, x_shape: Any, w_shape: Any, padding: int, winograd: int, *tensors: torch.Tensor | None
) -> None:
    """Run a form of a convolution by Winograd's way, or in the direct kernels."""
    sizes = (*x_shape, w_shape[1], *w_shape[3:], padding)
    source = build.SOURCE
    if winograd:
        source, name, sizes = winograd_kernels.SOURCE, f"winograd_{name}", (winograd, *sizes)
    build.function(source, name, "i" * len(sizes) + "P" * len(tensors))(*sizes, *tensors)


def _call_pool(name: str, height: int, width: int, outputs: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Run a form of a max pool on planes of ``height`` x ``width``."""
    build.function(build.SOURCE, name, "qiiPPP")(math.prod(outputs.shape[:-2]), height, width, *tensors)


def run_conv(x: torch.Tensor, w: torch.Tensor, padding: int, winograd: int = 0) -> torch.Tensor:
    """x [K, B, C, H, W] and w [K, O, C, kh, kw] to y [K, B, O, h, w].

    ``winograd``, here and below, is the side of a tile in Winograd's way, for 3x3 kernels; 0 for the direct way.
    """
    if _is_on_gpu(x):
        return _gpu().conv(x, w, padding)
    x, w = x.contiguous(), w.contiguous()
    y = x.new_empty(*x.shape[:2], w.shape[1], *_size_after(x.shape[3:], w.shape[3:], padding))
    _call_conv("conv", x.shape, w.shape, padding, winograd, x, w, y, None)
    return y


def run_conv_pool(
    x: torch.Tensor, w: torch.Tensor, padding: int, winograd: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`run_pool` of :func:`run_conv`, sample by sample, so that the pooled numbers stay in the cache."""
    x, w = x.contiguous(), w.contiguous()
    y = x.new_empty(*x.shape[:2], w.shape[1], *(n // 2 for n in _size_after(x.shape[3:], w.shape[3:], padding)))
    which = torch.empty_like(y, dtype=torch.uint8)
    if y.numel():
        _call_conv("conv", x.shape, w.shape, padding, winograd, x, w, y, which)
    return y, which


def _size_after(image: Sequence[int], kernel: Sequence[int], padding: int) -> tuple[int, int]:
    return image[0] + 2 * padding - kernel[0] + 1, image[1] + 2 * padding - kernel[1] + 1


def run_conv_input(
    g: torch.Tensor,
    w: torch.Tensor,
    padding: int,
    height: int,
    width: int,
    which: torch.Tensor | None = None,
    winograd: int = 0,
) -> torch.Tensor:
    """d <g, conv(x, w)> / d x for x of ``height`` x ``width``; with ``which``, g are gradients of its max pool."""
    if _is_on_gpu(g):
        return _gpu().conv_input(g, w, padding)
    g, w = g.contiguous(), w.contiguous()
    x = g.new_empty(g.shape[0], g.shape[1], w.shape[2], height, width)
    if not g.numel():
        return x.zero_()
    if which is not None and not (winograd and _is_dense(g, winograd, height, width)):
        _call_conv("pooled_input", x.shape, w.shape, padding, 0, g, w, x, which)
    else:
        _call_conv("conv_input", x.shape, w.shape, padding, winograd, g, w, x, *([which] if winograd else []))
    return x


def run_conv_weight(
    x: torch.Tensor,
    g: torch.Tensor,
    padding: int,
    height: int,
    width: int,
    which: torch.Tensor | None = None,
    winograd: int = 0,
) -> torch.Tensor:
    """d <g, conv(x, w)> / d w for w of ``height`` x ``width``; with ``which``, g are gradients of its max pool."""
    if _is_on_gpu(g):
        return _gpu().conv_weight(x, g, padding, height, width)
    x, g = x.contiguous(), g.contiguous()
    w = x.new_empty(x.shape[0], g.shape[2], x.shape[2], height, width)
    if not g.numel():
        return w.zero_()
    if which is not None:
        _call_conv("pooled_weight", x.shape, w.shape, padding, 0, x, g, w, which)
    else:
        _call_conv("conv_weight", x.shape, w.shape, padding, winograd, x, g, w)
    return w


def _is_dense(g: torch.Tensor, winograd: int, height: int, width: int) -> bool:
    """Whether Winograd's way makes the derivative by an image faster than one that only visits gradients other than 0.

    It takes (M + 2)^2 products a tile of M x M, twice as fast as the nine products a gradient.
    """
    tiles = math.ceil(height / winograd) * math.ceil(width / winograd) * math.prod(g.shape[:3])
    others = g.sign().abs_().sum()  # faster than count_nonzero
    return bool(9 * 2 * others > (winograd + 2) ** 2 * tiles)


def run_pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """2x2 max pool: values, and which of the four was the first largest (uint8)."""
    if _is_on_gpu(x):
        return _gpu().pool(x)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-2], x.shape[-2] // 2, x.shape[-1] // 2)
    which = torch.empty_like(y, dtype=torch.uint8)
    _call_pool("pool", *x.shape[-2:], y, x, y, which)
    return y, which


def run_pick(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The values of x at the places that ``which`` gives."""
    if _is_on_gpu(x):
        return _gpu().pick(x, which)
    x, which = x.contiguous(), which.contiguous()
    y = torch.empty_like(which, dtype=x.dtype)
    _call_pool("pool_pick", *x.shape[-2:], which, x, which, y)
    return y


def run_spread(g: torch.Tensor, which: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Each gradient at the place of its maximum, zeros elsewhere."""
    if _is_on_gpu(g):
        return _gpu().spread(g, which, height, width)
    g, which = g.contiguous(), which.contiguous()
    x = g.new_empty(*g.shape[:-2], height, width)
    _call_pool("pool_spread", height, width, which, g, which, x)
    return x


RAW: dict[Any, Any] = {
    opaque(run.__name__.removeprefix("run_"), run): run
    for run in (run_conv, run_conv_input, run_conv_weight, run_pool, run_pick, run_spread)
}
"""Operator -> its function, which a traced step calls without PyTorch's dispatcher."""

_conv, _conv_input, _conv_weight, _pool, _pick, _spread = RAW


def join_pools(graph: Graph, node: Node) -> None:
    """In a traced step, fuse a max pool into the convolution that only the pool reads.

    The spreading of gradients is likewise fused into the derivatives of a convolution that read it. GPUs have no such
    kernels.
    """
    first = node.args[0] if node.args else None
    if isinstance(first, Node) and _is_on_gpu(first.meta.get("val")):
        return
    if node.target is _pool and isinstance(first, Node) and first.target is _conv:
        if all(user.target is _pool for user in first.users):
            node.target, node.args = run_conv_pool, first.args
    elif node.target is _spread and all(_reads_as_gradient(user, node) for user in node.users):
        g, which, *_ = node.args
        for reader in list(node.users):
            # A recorded call has no arguments after its last one that is no default.
            given = (g if argument is node else argument for argument in reader.args[:WHICH])
            reader.args = (*given, which, *reader.args[WHICH + 1 :])


GRADIENTS = {_conv_input: 0, _conv_weight: 1}
"""Which argument of a convolution's derivatives is the gradient of its outputs."""

WHICH = 5
"""Which argument of a convolution's derivatives is the ``which`` of a max pool."""


def _reads_as_gradient(reader: Node, node: Node) -> bool:
    """Whether a derivative of a convolution reads a node only as its outputs' gradient."""
    return [GRADIENTS.get(reader.target)] == [i for i, argument in enumerate(reader.args) if argument is node]


def makes(node: Node) -> bool:
    """Whether a node of a traced step is a tensor that one of the operators allocated."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and node.args[0].target in (_pool, run_conv_pool)
    return node.target in RAW


class _Form(torch.autograd.Function):
    """Base of the forms: vmap makes their stacks longer, from [K, ...] to [size * K, ...]."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Call the form once for all stacks."""
        size = info.batch_size

        def stacked(argument: Any, dim: int | None) -> Any:
            if not isinstance(argument, torch.Tensor):
                return argument
            whole = argument.expand(size, *argument.shape) if dim is None else argument.movedim(dim, 0)
            return whole.flatten(0, 1)

        result = cls.apply(*map(stacked, arguments, in_dims))
        if isinstance(result, tuple):
            return tuple(t.unflatten(0, (size, -1)) for t in result), (0,) * len(result)
        return result.unflatten(0, (size, -1)), 0


class _Conv(_Form):
    """The derivative of <g, conv(x, w)>, which is linear in x, g and w, by ``missing`` of them, at the other two."""

    @staticmethod
    def forward(
        a: Any, b: Any, missing: str, padding: int, winograd: int, image: Sequence[int], kernel: Sequence[int]
    ) -> Any:
        if missing == "g":
            return _conv(a, b, padding, winograd)
        derivative, size = (_conv_input, image) if missing == "x" else (_conv_weight, kernel)
        return derivative(a, b, padding, *size, None, winograd)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        first, second, ctx.missing, *ctx.sizes = inputs
        ctx.save_for_backward(first, second)

    @staticmethod
    def backward(ctx: Any, v: Any) -> Any:
        others = "xgw".replace(ctx.missing, "")
        known = {**dict(zip(others, ctx.saved_tensors, strict=True)), ctx.missing: v}
        gradients = [
            _Conv.apply(*(known[one] for one in "xgw" if one != wanted), wanted, *ctx.sizes) if needed else None
            for wanted, needed in zip(others, ctx.needs_input_grad[:2], strict=True)
        ]
        return (*gradients, *[None] * 5)


class _Pool(_Form):
    @staticmethod
    def forward(x: Any) -> Any:
        return _pool(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, which = output
        ctx.mark_non_differentiable(which)
        ctx.save_for_backward(which)
        ctx.size = inputs[0].shape[-2:]

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any) -> Any:
        return _Move.apply(g, *ctx.saved_tensors, True, *ctx.size)


class _Move(_Form):
    """Spread pooled numbers to the places ``which`` in an image, or pick the image's numbers there: adjoint maps."""

    @staticmethod
    def forward(numbers: Any, which: Any, spreads: bool, height: int, width: int) -> Any:
        return _spread(numbers, which, height, width) if spreads else _pick(numbers, which)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, which, ctx.spreads, *ctx.size = inputs
        ctx.save_for_backward(which)

    @staticmethod
    def backward(ctx: Any, v: Any) -> Any:
        return _Move.apply(v, *ctx.saved_tensors, not ctx.spreads, *ctx.size), None, None, None, None


def conv(x: torch.Tensor, w: torch.Tensor, padding: int, winograd: int = 0) -> torch.Tensor:
    """Convolution with stride 1 of x [B, C, H, W] with w [O, C, kh, kw]; stacks under ``torch.vmap``."""
    # Not indexed by 0, since the derivative of an index fills a tensor with zeros first.
    # In float32 at any precision of the other layers: the kernels take no other type.
    sizes = (tuple(x.shape[-2:]), tuple(w.shape[-2:]))
    return _Conv.apply(x.float().unsqueeze(0), w.float().unsqueeze(0), "g", padding, winograd, *sizes).squeeze(0)


def max_pool(x: torch.Tensor) -> torch.Tensor:
    """2x2 max pool with stride 2 of x [B, C, H, W]; stacks under ``torch.vmap``."""
    return _Pool.apply(x.float().unsqueeze(0))[0].squeeze(0)


class Convolution(nn.Module):
    """A :class:`torch.nn.Conv2d` with stride 1 and zero padding, computed by the kernels.

    ``winograd`` is as in :func:`run_conv` (:data:`fedblend._kernels.winograd.WAYS`).

    With ``pooled``, the call includes the ReLU and the 2x2 max pool that follow in either order. A bias and a ReLU
    keep the order of numbers, so the maxima are taken first, which leaves a quarter of the work.
    """

    def __init__(self, like: nn.Conv2d, winograd: int = 0) -> None:
        super().__init__()
        self.winograd = winograd
        self.weight, self.bias = like.weight, like.bias
        assert isinstance(like.padding[0], int)
        self.padding = like.padding[0]

    def forward(self, x: torch.Tensor, pooled: bool = False) -> torch.Tensor:
        """[B, C, H, W] to [B, O, h, w], or to [B, O, h // 2, w // 2]."""
        y = conv(x, self.weight, self.padding, self.winograd)
        y = max_pool(y) if pooled else y
        y = y if self.bias is None else y + self.bias[:, None, None]
        return y.relu() if pooled else y


class MaxPool(nn.Module):
    """A :class:`torch.nn.MaxPool2d` of 2x2 with stride 2, computed by the kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to [B, C, H // 2, W // 2]."""
        return max_pool(x)
