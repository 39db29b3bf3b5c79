"""FedPer, FedRep and FedBN: layers of the model stay at each client, and the others are learned together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Personal
from fedblend.core.registry import Fraction, Int, part

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm)
"""Normalisation layers."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OwnHead(Personal):
    """Base of the methods with a shared body and an own head: the last ``layers`` layers of the model.

    A layer is a module with trained weights of its own, such as a dense layer or a convolution, in the order in which
    the model declares them.
    """

    layers: Annotated[Int, Field(ge=0)] = 1
    """Last layers with trained weights that stay at the client; 0 leaves FedAvg."""

    def own_layers(self, model: nn.Module) -> Collection[str]:
        """Weights and buffers of the last layers. Raises :class:`FedblendError` for a model of fewer layers."""
        trained = [n for n, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        if self.layers >= len(trained):
            raise FedblendError(
                f"method.personal.layers: {self.layers} is not valid: the model has {len(trained)} layers with trained "
                f"weights, of which one must be shared; valid: 0 to {len(trained) - 1}"
            )
        last = trained[len(trained) - self.layers :]
        return _tensors_of(model, last)


@part("personal", "fedper")
class FedPer(OwnHead):
    """Keep the last layers at each client, and train them with the shared body (Arivazhagan et al. 2019).

    A client's head begins as the run's first weights, is trained with the body in each of its rounds, and never leaves
    the client. The body is averaged. Each client is tested with its own head; one that has not trained yet has the
    first one.
    """


@part("personal", "fedrep")
class FedRep(OwnHead):
    """Keep the last layers at each client, and train them before the shared body, not with it (Collins et al. 2021).

    In a round a client first trains its head with the round's body, and then the body with its new head (Algorithm 1).
    All else is as in FedPer. The paper makes ten passes for the head, and one or five for the body.
    """

    head_share: Fraction = 0.5
    """Share of a client's steps that train the head; the steps after these train the body."""

    def own_steps(self, steps: int) -> int | None:
        """So many of the steps, rounded, and of two or more steps at least one for each phase that has a share.

        ``None``, that is both phases at once, for a single step, and where no layer is a client's own.
        """
        if not self.layers or (steps == 1 and 0 < self.head_share < 1):
            return None
        least, most = int(self.head_share > 0), steps - int(self.head_share < 1)
        return min(max(round(self.head_share * steps), least), most)


@part("personal", "fedbn")
class FedBN(Personal):
    """Keep the normalisation layers at each client: weights, biases and running statistics (Li et al. 2021).

    The paper's are batch norms; layers of group, layer and instance norm stay likewise. Each client is tested with its
    own layers; one that has not trained yet has the first ones.
    """

    def own_layers(self, model: nn.Module) -> Collection[str]:
        """All tensors of normalisation layers. Raises :class:`FedblendError` for a model without them."""
        own = _tensors_of(model, [name for name, module in model.named_modules() if isinstance(module, NORMS)])
        if not own:
            raise FedblendError(
                "method.personal: 'fedbn' keeps normalisation layers at clients, and the model has none with weights; "
                'valid: a model with such layers (for cnn and resnet18: norm = "batch" or "group")'
            )
        return own


def _tensors_of(model: nn.Module, layers: Collection[str]) -> list[str]:
    return [name for name in model.state_dict() if name.rpartition(".")[0] in layers]
