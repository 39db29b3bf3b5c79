"""Sharings: data that clients share before training."""

from fedblend.core.registry import part
from fedblend.core.sharing import ClientData, Payload, Sharing, SharingPlan


@part("sharing", "none")
class NoSharing(Sharing):
    """Share nothing before training (FedAvg, FedProx, LocalMix)."""

    plan = SharingPlan(when="never")


@part("sharing", "raw")
class Raw(Sharing):
    """Share all samples of every client, as stored (FedMix's Global Mixup). This breaks privacy.

    It is an upper bound, and needs ``unsafe = true`` in the experiment.
    """

    bytes_kind = "raw"
    plan = SharingPlan("raw")

    def share(self, local: ClientData) -> Payload | None:
        return {"x": local.x, "y": local.y} if len(local.y) else None
