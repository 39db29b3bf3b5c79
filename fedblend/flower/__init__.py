"""fedblend over Flower: a whole federation of fedblend's, or its methods in a Flower app of your own.

The ServerApp and the ClientApp that a Flower app names as its components:

    [tool.flwr.app.components]
    serverapp = "fedblend.flower:server_app"
    clientapp = "fedblend.flower:client_app"

``fedblend federation app`` writes such an app. Or, with model, data and training loop of your own: a
:class:`Strategy` around one of Flower's, :func:`blend_mod` around your training function, in which
:func:`blended_loss` gives the loss of a batch, and :func:`add_sharing` where clients share means. docs/flower.md tells
how. Needs the extra ``flower``.
"""

from __future__ import annotations

from fedblend.core.errors import FedblendError

try:
    from fedblend.flower.app.inputs import Inputs
    from fedblend.flower.app.loss import BlendedLoss, blended_loss
    from fedblend.flower.app.mod import add_sharing, blend_mod
    from fedblend.flower.app.strategy import Strategy
    from fedblend.flower.client import app as client_app
    from fedblend.flower.server import app as server_app
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise FedblendError("Flower is not installed; install it with: pip install 'fedblend[flower]'") from None

__all__ = [
    "BlendedLoss",
    "Inputs",
    "Strategy",
    "add_sharing",
    "blend_mod",
    "blended_loss",
    "client_app",
    "server_app",
]
