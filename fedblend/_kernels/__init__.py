"""Kernels for the layers of many clients, as operators that PyTorch can differentiate and stack.

They are written in C++ for CPUs and in Triton for GPUs.
"""

from fedblend._kernels.lowrank import LowRank, Rows, Weights, is_worth_it, lerp_towards, use_low_rank
from fedblend._kernels.operators import RAW, Convolution, MaxPool, are_usable, conv, join_pools, makes, max_pool

__all__ = [
    "RAW",
    "Convolution",
    "LowRank",
    "MaxPool",
    "Rows",
    "Weights",
    "are_usable",
    "conv",
    "is_worth_it",
    "join_pools",
    "lerp_towards",
    "makes",
    "max_pool",
    "use_low_rank",
]
