"""fedblend over Flower: the ServerApp and the ClientApp that a Flower app names as its components.

    [tool.flwr.app.components]
    serverapp = "fedblend.flower:server_app"
    clientapp = "fedblend.flower:client_app"

``fedblend federation app`` writes such an app. Needs the extra ``flower``.
"""

from __future__ import annotations

from fedblend.errors import FedblendError

try:
    from fedblend.engines.flower.client import app as client_app
    from fedblend.engines.flower.server import app as server_app
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise FedblendError("Flower is not installed; install it with: pip install 'fedblend[flower]'") from None

__all__ = ["client_app", "server_app"]
