"""Sharings: what a client gives before training, and what is made of it."""

from fedblend.parts import part
from fedblend.sharing.base import Local, Payload, Pool, Sharing
from fedblend.sharing.means import HiddenMeans, LocalMeans, Means, Noise
from fedblend.sharing.raw import Raw
from fedblend.sharing.seeds import MixedSeeds, RawSeeds
from fedblend.sharing.sums import SecureMeans
from fedblend.sharing.targets import BaseSamples, MixedTargetSeeds, XorSeeds

__all__ = [
    "BaseSamples",
    "HiddenMeans",
    "Local",
    "LocalMeans",
    "Means",
    "MixedSeeds",
    "MixedTargetSeeds",
    "NoSharing",
    "Noise",
    "Payload",
    "Pool",
    "Raw",
    "RawSeeds",
    "SecureMeans",
    "Sharing",
    "XorSeeds",
]


@part("sharing", "none")
class NoSharing(Sharing):
    """Nothing is shared before training (FedAvg, FedProx, LocalMix)."""

    travels = False
    active = False
