"""Models: the papers' networks, common ones, and any ``nn.Module`` by its path."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch import nn

from fedblend.core import registry
from fedblend.core.errors import FedblendError, listed
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
    trainable: tuple[str, ...] = ()
    """Parts of names, such as `lora_B` or `layers.1.*bias`: weights with other names are frozen, beside those that the
    class freezes. Empty freezes none."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Import the class and call it with the arguments."""
        model = module_at(self.path, self.arguments, "model.path", "model.arguments")
        if self.trainable:
            self._freeze_others(model)
        return model

    def _freeze_others(self, model: nn.Module) -> None:
        """Freeze what ``trainable`` does not name. Raises :class:`FedblendError` for an entry that names nothing."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = {one: {name for name in trained if fnmatchcase(name, f"*{one}*")} for one in self.trainable}
        if unused := [one for one, names in found.items() if not names]:
            raise FedblendError(
                f"model.trainable: '{unused[0]}' is in no name of a weight that {self.path} trains; valid: parts of "
                f"{listed(list(trained)) or 'none'}"
            )
        for name in trained.keys() - set().union(*found.values()):
            trained[name].requires_grad_(False)
