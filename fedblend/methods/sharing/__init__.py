"""Sharings: data that clients share before training. Importing this package registers them all."""

from fedblend.core.registry import part
from fedblend.core.sharing import ClientData, Payload, Pool, Sharing, SharingPlan
from fedblend.methods.sharing.channel_statistics import ChannelStatistics
from fedblend.methods.sharing.class_noise import ClassNoise
from fedblend.methods.sharing.feature_statistics import FeatureStatistics
from fedblend.methods.sharing.features import Features
from fedblend.methods.sharing.matched_samples import MatchedSamples
from fedblend.methods.sharing.means import HiddenMeans, LocalMeans, Noise, SharedMeans
from fedblend.methods.sharing.secure_means import SecureMeans
from fedblend.methods.sharing.seeds import MixedSeeds, RawSeeds
from fedblend.methods.sharing.xor_seeds import BaseSamples, MixedTargetSeeds, XorSeeds

__all__ = [
    "BaseSamples",
    "ChannelStatistics",
    "ClassNoise",
    "ClientData",
    "FeatureStatistics",
    "Features",
    "HiddenMeans",
    "LocalMeans",
    "MatchedSamples",
    "MixedSeeds",
    "MixedTargetSeeds",
    "NoSharing",
    "Noise",
    "Payload",
    "Pool",
    "Raw",
    "RawSeeds",
    "SecureMeans",
    "SharedMeans",
    "Sharing",
    "SharingPlan",
    "XorSeeds",
]


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
        """Samples x and targets y as stored."""
        return {"x": local.x, "y": local.y} if len(local.y) else None
