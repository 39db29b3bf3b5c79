"""Layers of many clients at once on CPUs, as operators that PyTorch can differentiate and stack."""

from fedblend.kernels.dense import add_product, use_dense
from fedblend.kernels.operators import RAW, Convolution, MaxPool, conv, join_pools, makes, max_pool

__all__ = ["RAW", "Convolution", "MaxPool", "add_product", "conv", "join_pools", "makes", "max_pool", "use_dense"]
