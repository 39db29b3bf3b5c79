"""Measures of an item's cells: parts of the kind ``measure``, named in a paper's file.

A measure returns one number of a cell, or the path of a picture; ``trains`` states whether the cell's experiment is run
first. Long work is kept in files (:meth:`CellRun.cached`), so that it is done once and resumes after a stop.
"""

from __future__ import annotations

from fedblend.papers.measures.attack import AttackFigure
from fedblend.papers.measures.base import CellRun, Measure
from fedblend.papers.measures.memory import StepMemory
from fedblend.papers.measures.models import AfterTraining, Devices, PointsFigure
from fedblend.papers.measures.pictures import PointsPicture, SeedsPicture
from fedblend.papers.measures.privacy import SamplePrivacy, SeedPrivacy
from fedblend.papers.measures.runs import Accuracy, AccuracyAt, Clients, Costs, LabelAccuracy, RoundsTo, Split

__all__ = [
    "Accuracy",
    "AccuracyAt",
    "AfterTraining",
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
