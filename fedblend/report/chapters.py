"""The chapters of a report: the runs on one data set, read once, with what is told and drawn of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedblend.analysis.plotting import Look, looks
from fedblend.report.guarantees import Guarantee, guarantees
from fedblend.report.privacy import gives_raw_away
from fedblend.report.settings import Settings, settings
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, by_data
from fedblend.runs.summary import curves_of, table_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Chapter:
    """The methods on one data set; ``looks`` are those of all chapters, so that a name looks alike in each."""

    name: str
    groups: list[Group]
    about: Settings
    curves: pd.DataFrame
    table: pd.DataFrame
    looks: Mapping[str, Look]
    guarantees: list[Guarantee]

    @property
    def unsafe(self) -> list[str]:
        """The methods that give raw samples away."""
        return [g.name for g in self.groups if gives_raw_away(g.config)]

    @property
    def unfinished(self) -> list[Group]:
        """The methods of which a run has not come to its end."""
        return [g for g in self.groups if g.unfinished]

    @property
    def targets(self) -> list[float]:
        """The accuracies that methods were to reach."""
        return list(dict.fromkeys(g.config["target"] for g in self.groups if g.config.get("target") is not None))


def chapters(runs: Sequence[RunDirectory]) -> list[Chapter]:
    """A chapter for each data set, in order of first appearance."""
    sets = by_data(runs)
    by_method = looks([g.name for groups in sets.values() for g in groups])
    return [
        Chapter(name, groups, settings(groups), curves_of(groups), table_of(groups), by_method, guarantees(groups))
        for name, groups in sets.items()
    ]
