"""Convolutions and max pools of many clients at once on CPUs, as operators that PyTorch can differentiate and stack."""

from fedblend.kernels.operators import RAW, Convolution, MaxPool, conv, max_pool

__all__ = ["RAW", "Convolution", "MaxPool", "conv", "max_pool"]
