"""Aggregators: functions that combine the uploads of a round into one. Importing this package registers them all."""

from fedblend.core.aggregator import Aggregator
from fedblend.methods.aggregators.fednova import FedNova
from fedblend.methods.aggregators.krum import Krum, MultiKrum
from fedblend.methods.aggregators.mean import Sums, WeightedMean
from fedblend.methods.aggregators.order import IntervalMean, Median, TrimmedMean
from fedblend.methods.aggregators.secure import SecureMean, Total

__all__ = [
    "Aggregator",
    "FedNova",
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
