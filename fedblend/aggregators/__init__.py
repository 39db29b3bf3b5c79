"""Aggregators: how uploads become one. Importing this package registers them all."""

from fedblend.aggregators.base import Aggregator
from fedblend.aggregators.interval import IntervalMean
from fedblend.aggregators.krum import Krum, MultiKrum
from fedblend.aggregators.mean import Sums, WeightedMean
from fedblend.aggregators.order import Median, TrimmedMean
from fedblend.aggregators.secure import SecureMean, Total

__all__ = [
    "Aggregator",
    "IntervalMean",
    "Krum",
    "Median",
    "MultiKrum",
    "SecureMean",
    "Sums",
    "Total",
    "TrimmedMean",
    "WeightedMean",
]
