"""Models: the papers' networks, common ones, and any ``nn.Module`` by its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch import nn

from fedblend.core import registry
from fedblend.core.module import module_at
from fedblend.core.registry import part


@part("model", "module")
class UserModule:
    """Any ``nn.Module``, as ``path = "package.module:Class"`` with ``arguments`` for its constructor.

    The module must take a batch of inputs and return one row of outputs for each sample.
    """

    path: Annotated[str, AfterValidator(lambda path: registry.require_trusted(path, "model.path"))]
    """The class, a subclass of `nn.Module`, as `package.module:Class`; its file may be beside the experiment file."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the constructor, by name."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Import the class and call it with the arguments."""
        return module_at(self.path, self.arguments, "model.path", "model.arguments")
