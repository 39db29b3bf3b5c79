"""Kernels for the layers of many clients, as operators that PyTorch can differentiate and stack.

They are written in C++ for CPUs and in Triton for GPUs.
"""
