"""Dropout masks of stacks, drawn from each client's own keyed stream as in the loop engine."""

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
"""By dropout layer: the shape of its input without the batch axis, and its probability of dropping."""


def dropout_shapes(model: nn.Module, samples: torch.Tensor) -> dict[str, tuple[tuple[int, ...], float]]:
    """Return the shape of one sample at each dropout layer of a prepared model, and the layer's probability.

    The model runs on two and on three of the ``samples``. Raises :class:`CannotStack` for a layer that runs twice in a
    pass, and for one whose input has no batch axis first: such masks cannot be drawn before the step.
    """
    shapes: dict[str, tuple[tuple[int, ...], float]] = {}
    hooks, called = [], list[str]()
    repeated = samples[torch.arange(3, device=samples.device) % len(samples)]

    for name, layer in dropouts(model).items():

        def check(module: nn.Module, inputs: tuple[torch.Tensor], name: str = name) -> None:
            assert isinstance(module, MaskedDropout)
            if name in called:
                raise CannotStack(f"its dropout layer '{name}' is called more than once in a pass")
            called.append(name)
            if len(inputs[0]) != batch:
                raise CannotStack(f"its dropout layer '{name}' has an input whose first axis is not the batch")
            shapes[name] = (tuple(inputs[0].shape[1:]), module.p)

        hooks.append(layer.register_forward_pre_hook(check))
    try:
        with torch.no_grad():
            for batch in (2, 3) if hooks else ():
                called.clear()
                model(repeated[:batch])
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


class DropoutMasks:
    """The masks of a stack's clients for one round, drawn step by step.

    On CPUs each client uses the loop engine's stream, so the masks equal the loop's where every layer drops once a
    step. On other devices one generator draws for the whole stack: one call a client would cost more than the step.
    """

    def __init__(
        self, shapes: Shapes, seed: int, task: TrainTask, clients: Sequence[int], device: torch.device
    ) -> None:
        self.shapes, self.device = shapes, device
        seeded = clients if device.type == "cpu" else clients[:1]
        seeds = [key(seed, task.purpose("train"), task.round, client, bits=32) for client in seeded] if shapes else []
        native = bool(seeds) and device.type == "cpu" and dropout.is_usable()
        self.streams = dropout.Streams(seeds) if native else None
        self.generators = [] if native else [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def draw(self, first: int, size: int, active: np.ndarray) -> dict[str, torch.Tensor]:
        """Return masks [K, size, ...] of K clients from ``first`` on, by layer.

        ``active`` is bool [K]; a client that is not active draws nothing.
        """
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
        for k, is_active in enumerate(active.tolist()):
            if not is_active:
                mask[k].zero_()
            elif self.streams:
                self.streams.draw(first + k, mask[k], p)
            else:
                mask[k].bernoulli_(1 - p, generator=self.generators[first + k]).div_(1 - p)
