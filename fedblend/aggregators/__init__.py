"""Aggregators: how uploads become one."""

from fedblend.aggregators.mean import Aggregator, Sums, WeightedMean

__all__ = ["Aggregator", "Sums", "WeightedMean"]
