"""Layers of a model in fedblend's kernels, where these are faster than PyTorch's.

Only PyTorch's own layers are replaced: a subclass or a hook may compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fedblend._kernels import winograd
from fedblend._kernels.operators import Convolution, MaxPool, are_usable

MAX_CHANNELS = 16
"""Input channels up to which a convolution runs in fedblend's plain kernel where no layer was timed."""

MIN_WINOGRAD_CHANNELS = 32
"""Channels, in and out, from which on a convolution of 3x3 runs by Winograd's algorithm where no layer was timed."""

MAX_4X4_CHANNELS = 256
"""Channels, in and out, up to which it then has tiles of 4x4: above, its kernels' transforms exceed the caches."""

MOST_ON_GPU = 31
"""Rows and columns of a kernel that fedblend's kernels for GPUs can take: the bits of an int32."""

FUSED = ([Convolution, nn.ReLU, MaxPool], [Convolution, MaxPool, nn.ReLU])
"""Consecutive types of layers that are computed as one."""


class FusedSequential(nn.Sequential):
    """A sequence of layers that fuses convolution, ReLU and max pooling; each layer can still be called alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layers in sequence."""
        layers, i = list(self), 0
        while i < len(layers):
            if _is_fused(layers[i : i + 3]):
                x, i = layers[i](x, pooled=True), i + 3
            else:
                x, i = layers[i](x), i + 1
        return x


def use_kernels(
    model: nn.Module, device: torch.device, precision: str = "float32", kernels: Mapping[str, str] | None = None
) -> None:
    """Replace layers of a model on ``device``, in place, where there are kernels for it.

    ``kernels`` has the names of the layers to replace, each with its way (:func:`own_ways`). Without it a rule chooses
    them, so that experiments that set their engine have the same numbers in each run.
    """
    if not are_usable(device):
        return
    rule = _way_on_cpu if device.type == "cpu" else _way_on_gpu
    for name in own_layers(model):
        layer = model.get_submodule(name)
        way = rule(layer, precision) if kernels is None else kernels.get(name)
        if way in (ways := own_ways(layer, device)):
            model.set_submodule(name, ways[way])
    for layer in list(model.modules()):
        if type(layer) is nn.Sequential:
            layer.__class__ = FusedSequential


def own_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that fedblend's kernels can compute."""
    layers = model.named_modules(remove_duplicate=False)
    return [name for name, layer in layers if name and own_ways(layer)]


def own_ways(layer: nn.Module, device: torch.device | None = None) -> dict[str, nn.Module]:
    """Return fedblend's layers in place of one of PyTorch's, with its parameters, by the name of the way.

    The ways are ``direct`` and, for convolutions on CPUs, those of :data:`fedblend._kernels.winograd.WAYS`. The table
    is empty where kernels cannot compute it. The default device is a CPU.
    """
    if is_exactly(layer, nn.MaxPool2d) and _is_two_by_two(layer):  # type: ignore[arg-type]
        return {"direct": MaxPool()}
    if not (is_exactly(layer, nn.Conv2d) and _has_plain_steps(layer)):  # type: ignore[arg-type]
        return {}
    assert isinstance(layer, nn.Conv2d)
    ways: dict[str, nn.Module] = {"direct": Convolution(layer)}
    on_cpu = device is None or device.type == "cpu"
    if not on_cpu and max(layer.kernel_size) > MOST_ON_GPU:
        return {}
    if on_cpu and winograd.supports(layer.in_channels, layer.out_channels, layer.kernel_size, int(layer.padding[0])):
        ways |= {way: Convolution(layer, side) for way, side in winograd.WAYS.items()}
    return ways


def is_exactly(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of exactly this type, and has no hooks."""
    return type(layer) is kind and not _has_hooks(layer)


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks)


def _is_fused(layers: list[nn.Module]) -> bool:
    """Whether layers are computed as one: their types are in :data:`FUSED`, and none has hooks."""
    return [type(layer) for layer in layers] in FUSED and not any(map(_has_hooks, layers))


def _has_plain_steps(layer: nn.Conv2d) -> bool:
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return plain and zeros and layer.padding[0] == layer.padding[1]


def _way_on_gpu(layer: nn.Module, precision: str) -> str:
    """The way of a layer that was not timed; empty for PyTorch's."""
    return "" if precision == "bfloat16" else "direct"


def _way_on_cpu(layer: nn.Module, precision: str) -> str:
    """The way of a layer that was not timed; empty for PyTorch's."""
    if not isinstance(layer, nn.Conv2d):
        return "direct"
    sizes = layer.in_channels, layer.out_channels, layer.kernel_size, int(layer.padding[0])
    # Not in bfloat16, which oneDNN computes on a processor's matrix units, where it has them.
    if precision != "bfloat16" and min(sizes[:2]) >= MIN_WINOGRAD_CHANNELS and winograd.supports(*sizes):
        return "winograd-4x4" if max(sizes[:2]) <= MAX_4X4_CHANNELS else "winograd"
    return "direct" if layer.in_channels <= MAX_CHANNELS else ""


def _is_two_by_two(layer: nn.MaxPool2d) -> bool:
    settings = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return settings in ((2, 2, 0, 1), ((2, 2), (2, 2), 0, 1)) and not layer.ceil_mode and not layer.return_indices
