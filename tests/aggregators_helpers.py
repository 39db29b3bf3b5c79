"""What several tests of aggregators take."""

from __future__ import annotations

from fedblend.core.aggregator import Aggregator
from fedblend.methods.aggregators.robust import IntervalMean, Krum, Median, MultiKrum, TrimmedMean

GATHERING: list[Aggregator] = [
    Median(),
    TrimmedMean(share=0.2),
    IntervalMean(low=-2, high=2),
    Krum(byzantine=1),
    MultiKrum(byzantine=1, kept=2),
]
