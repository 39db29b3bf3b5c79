"""Aggregators: how uploads become one."""

from fedblend.aggregators.mean import Aggregator, WeightedMean

__all__ = ["Aggregator", "WeightedMean"]
