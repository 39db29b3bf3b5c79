"""fedblend over Flower: a whole federation, or fedblend's methods in a Flower app of your own.

A Flower app names these two components:

    [tool.flwr.app.components]
    serverapp = "fedblend.flower:server_app"
    clientapp = "fedblend.flower:client_app"

``fedblend federation app`` writes such an app (docs/deployment.md).

An app with model, data and training loop of your own uses :class:`Strategy` around one of Flower's strategies,
:func:`blend_mod` around the training function, :func:`blended_loss` for the loss of a batch, and :func:`add_sharing`
where clients share means (docs/flower.md). Needs the extra ``flower``.
"""

from __future__ import annotations

from fedblend.core.errors import missing_package

try:
    from fedblend.flower.app.blending import BlendedLoss, add_sharing, blend_mod, blended_loss
    from fedblend.flower.app.inputs import Inputs
    from fedblend.flower.app.strategy import Strategy
    from fedblend.flower.client import app as client_app
    from fedblend.flower.server import app as server_app
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise missing_package("fedblend.flower", "flwr", "flower") from None

__all__ = ["BlendedLoss", "Inputs", "Strategy", "add_sharing", "blend_mod", "blended_loss", "client_app", "server_app"]
