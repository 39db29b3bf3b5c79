"""What is measured of an item's cells: parts of the kind ``measure``, named in a paper's file.

A measure says whether its cell's experiment is run first (``trains``) and gives one number of what it has seen, or the
path of a picture. Work that is long is done once and kept (:meth:`CellRun.once`), so that it goes on where it
was stopped.
"""

from __future__ import annotations

from fedblend.papers.measures.attack import AttackFigure
from fedblend.papers.measures.base import CellRun, Measure
from fedblend.papers.measures.devices import Devices
from fedblend.papers.measures.memory import StepMemory
from fedblend.papers.measures.pictures import PointsPicture, SeedsPicture
from fedblend.papers.measures.points import PointsFigure
from fedblend.papers.measures.privacy import SamplePrivacy, SeedPrivacy
from fedblend.papers.measures.runs import Accuracy, AccuracyAt, Clients, Costs, LabelAccuracy, RoundsTo, Split

__all__ = [
    "Accuracy",
    "AccuracyAt",
    "AttackFigure",
    "CellRun",
    "Clients",
    "Costs",
    "Devices",
    "LabelAccuracy",
    "Measure",
    "PointsFigure",
    "PointsPicture",
    "RoundsTo",
    "SamplePrivacy",
    "SeedPrivacy",
    "SeedsPicture",
    "Split",
    "StepMemory",
]
