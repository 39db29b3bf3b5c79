"""Dropout for stacks: each client's masks from its own keyed stream, as the loop engine draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from fedblend.engines.stacking import MaskedDropout, dropouts
from fedblend.random import key

Shapes = Mapping[str, tuple[tuple[int, ...], float]]


def dropout_shapes(model: nn.Module, sample: torch.Tensor) -> dict[str, tuple[tuple[int, ...], float]]:
    """Of each dropout layer of a prepared model: the shape of one sample there, and the share that is dropped."""
    shapes: dict[str, tuple[tuple[int, ...], float]] = {}
    hooks = []
    for name, layer in dropouts(model).items():

        def note(module: nn.Module, inputs: tuple[torch.Tensor], name: str = name) -> None:
            assert isinstance(module, MaskedDropout)
            shapes[name] = (tuple(inputs[0].shape[1:]), module.p)

        hooks.append(layer.register_forward_pre_hook(note))
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


class Masks:
    """The masks of a stack's clients for one round, drawn step by step.

    On CPUs each client has the generator that the loop engine would lend it, so the masks are the loop's where
    every layer drops once a step. On other devices one generator draws for the whole stack, since a call for each
    client would cost more than the step.
    """

    def __init__(self, shapes: Shapes, seed: int, round: int, clients: Sequence[int], device: torch.device) -> None:
        self.shapes, self.device = shapes, device
        whose = clients if device.type == "cpu" else clients[:1]
        self.generators = [torch.Generator(device) for _ in whose] if shapes else []
        for generator, client in zip(self.generators, whose, strict=False):
            generator.manual_seed(key(seed, "train", round, client, bits=32))

    def draw(self, first: int, size: int, active: np.ndarray) -> dict[str, torch.Tensor]:
        """Masks [K, size, ...] of the clients from ``first`` on; those that are not ``active`` draw nothing."""
        masks = {}
        for name, (shape, p) in self.shapes.items():
            mask = torch.ones(len(active), size, *shape, device=self.device)
            if self.device.type == "cpu":
                for k in np.flatnonzero(active):
                    mask[k].bernoulli_(1 - p, generator=self.generators[first + k])
            else:
                mask.bernoulli_(1 - p, generator=self.generators[0])
            masks[name] = mask.div_(1 - p) if p < 1 else mask.zero_()
        return masks
