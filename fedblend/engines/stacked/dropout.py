"""Dropout for stacks: each client's masks from its own keyed stream, as the loop engine draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from fedblend._kernels import dropout
from fedblend.core.engine import TrainTask
from fedblend.core.random import key
from fedblend.engines.stacked.layers import CannotStack, MaskedDropout, dropouts

Shapes = Mapping[str, tuple[tuple[int, ...], float]]


def dropout_shapes(model: nn.Module, samples: torch.Tensor) -> dict[str, tuple[tuple[int, ...], float]]:
    """Of each dropout layer of a prepared model: the shape of one sample there, and the share that is dropped.

    Tried on two and on three of the ``samples``. Raises :class:`CannotStack` for a layer that drops twice in a pass, or
    whose input does not have the samples along its first axis: their masks cannot be drawn before the step.
    """
    shapes: dict[str, tuple[tuple[int, ...], float]] = {}
    hooks, seen = [], list[str]()
    repeated = samples[torch.arange(3, device=samples.device) % len(samples)]

    for name, layer in dropouts(model).items():

        def note(module: nn.Module, inputs: tuple[torch.Tensor], name: str = name) -> None:
            assert isinstance(module, MaskedDropout)
            if name in seen:
                raise CannotStack(f"its dropout layer '{name}' is called more than once in a pass")
            seen.append(name)
            if len(inputs[0]) != batch:
                raise CannotStack(f"its dropout layer '{name}' has other things than samples along its first axis")
            shapes[name] = (tuple(inputs[0].shape[1:]), module.p)

        hooks.append(layer.register_forward_pre_hook(note))
    try:
        with torch.no_grad():
            for batch in (2, 3) if hooks else ():
                seen.clear()
                model(repeated[:batch])
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


class DropoutMasks:
    """The masks of a stack's clients for one round, drawn step by step.

    On CPUs each client has the stream that the loop engine would lend it, so the masks are the loop's where every
    layer drops once a step. On other devices one generator draws for the whole stack, since a call for each client
    would cost more than the step.
    """

    def __init__(
        self, shapes: Shapes, seed: int, task: TrainTask, clients: Sequence[int], device: torch.device
    ) -> None:
        self.shapes, self.device = shapes, device
        whose = clients if device.type == "cpu" else clients[:1]
        seeds = [key(seed, task.purpose("train"), task.round, client, bits=32) for client in whose] if shapes else []
        ours = bool(seeds) and device.type == "cpu" and dropout.is_usable()
        self.streams = dropout.Streams(seeds) if ours else None
        self.generators = [] if ours else [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def draw(self, first: int, size: int, active: np.ndarray) -> dict[str, torch.Tensor]:
        """Masks [K, size, ...] of the clients from ``first`` on; those that are not ``active`` draw nothing."""
        masks = {}
        for name, (shape, p) in self.shapes.items():
            if p < 1:
                mask = torch.empty(len(active), size, *shape, device=self.device)
                self._fill(mask, p, first, active)
            else:
                mask = torch.zeros(len(active), size, *shape, device=self.device)
            masks[name] = mask
        return masks

    def _fill(self, mask: torch.Tensor, p: float, first: int, active: np.ndarray) -> None:
        if self.device.type != "cpu":
            mask.bernoulli_(1 - p, generator=self.generators[0]).div_(1 - p)
            return
        for k, draws in enumerate(active.tolist()):
            if not draws:
                mask[k].zero_()
            elif self.streams:
                self.streams.draw(first + k, mask[k], p)
            else:
                mask[k].bernoulli_(1 - p, generator=self.generators[first + k]).div_(1 - p)
