"""Sharings: what a client gives before training, and what is made of it."""

from fedblend.core.registry import part
from fedblend.core.sharing import ClientData, Payload, Pool, Sharing
from fedblend.methods.sharing.means import HiddenMeans, LocalMeans, Noise, SharedMeans
from fedblend.methods.sharing.raw import Raw
from fedblend.methods.sharing.secure_means import SecureMeans
from fedblend.methods.sharing.seeds import MixedSeeds, RawSeeds
from fedblend.methods.sharing.xor_seeds import BaseSamples, MixedTargetSeeds, XorSeeds

__all__ = [
    "BaseSamples",
    "ClientData",
    "HiddenMeans",
    "LocalMeans",
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
    "XorSeeds",
]


@part("sharing", "none")
class NoSharing(Sharing):
    """Nothing is shared before training (FedAvg, FedProx, LocalMix)."""

    leaves_client = False
    active = False
