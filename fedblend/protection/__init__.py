"""Protections: what is done to what leaves a client."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fedblend.parts import part

__all__ = ["NoProtection", "Protection"]


class Protection:
    """Base of all protections."""

    def protect(
        self, upload: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor], rng: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """What is sent in place of ``upload``, given the weights ``start`` that the round began with."""
        raise TypeError(f"{type(self).__name__} defines no protect")


@part("protection", "none")
class NoProtection(Protection):
    """Uploads leave as they are."""

    def protect(
        self, upload: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor], rng: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """The upload itself."""
        return dict(upload)
