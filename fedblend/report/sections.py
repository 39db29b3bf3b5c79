"""The sections of a report, one for each data set, and the figures and measures of its splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedblend.analysis.plotting import LineStyle, line_styles
from fedblend.report import figures
from fedblend.report.description import RunDescription, describe_runs
from fedblend.report.privacy import Guarantee, guarantees, shares_raw_samples
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, Outcome, by_data
from fedblend.runs.summary import curves_of, table_of

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True)
class DatasetSection:
    """The methods on one data set, with the data of their tables and figures."""

    name: str
    groups: list[Group]
    description: RunDescription
    curves: pd.DataFrame
    table: pd.DataFrame
    styles: Mapping[str, LineStyle]
    """Line styles by method, the same in all sections of a report."""
    guarantees: list[Guarantee]

    @property
    def unsafe(self) -> list[str]:
        """The methods that share raw samples."""
        return [g.name for g in self.groups if shares_raw_samples(g.outcomes[0])]

    @property
    def unfinished(self) -> list[Group]:
        """The methods with an unfinished run."""
        return [g for g in self.groups if g.unfinished]

    @property
    def targets(self) -> list[float]:
        """The target accuracies of the methods."""
        configs = [g.config for g in self.groups if g.config.get("target_metric", "accuracy") == "accuracy"]
        return list(dict.fromkeys(config["target"] for config in configs if config.get("target") is not None))


def dataset_sections(runs: Sequence[RunDirectory]) -> list[DatasetSection]:
    """A section for each data set, in order of first appearance."""
    sets = by_data(runs)
    styles = line_styles([g.name for groups in sets.values() for g in groups])
    return [
        DatasetSection(
            name, groups, describe_runs(groups), curves_of(groups), table_of(groups), styles, guarantees(groups)
        )
        for name, groups in sets.items()
    ]


# Splits ----------------------------------------------------------------------------------------------------------

MAX_SPLITS = 4
"""Largest number of splits in a section; of more, the first are drawn."""

SPLIT_FIELDS = ("data", "partition", "fraction", "holdout", "validation")
"""Fields of an experiment that, with the seed, determine its split."""


@dataclass(frozen=True)
class SplitFigure:
    """The figure of a split and its measures."""

    name: str
    caption: str
    figure: go.Figure
    measures: list[tuple[str, str, str]]
    """Measures as (name, explanation, value as text)."""


def split_figures(groups: Sequence[Group]) -> list[SplitFigure]:
    """A figure for each different split, of the run with the lowest seed; splits without a record are left out."""
    by_fields: dict[str, list[Outcome]] = {}
    for outcome in (o for g in groups for o in g.outcomes):
        by_fields.setdefault(repr([outcome.config.get(field) for field in SPLIT_FIELDS]), []).append(outcome)
    drawn: list[SplitFigure] = []
    for outcomes in by_fields.values():
        first = min(outcomes, key=lambda o: o.seed)
        record = RunDirectory(first.path).split()
        figure = figures.split_figure(record)
        if figure is not None and len(drawn) < MAX_SPLITS:
            measures = _split_measures(record.get("measures", {}))
            drawn.append(SplitFigure(f"split-{len(drawn)}", _split_caption(first, outcomes, record), figure, measures))
    return drawn


def _split_caption(first: Outcome, outcomes: Sequence[Outcome], record: Mapping[str, Any]) -> str:
    data = first.facts.get("data", {}).get("name", first.config["data"]["name"])
    text = f"{data} by '{first.config['partition']['name']}', seed {first.seed}"
    shown, number = len(record.get("sizes", [])), first.facts.get("clients", {}).get("number", 0)
    if number > shown:
        text += f", the first {shown:,} of {number:,} clients"
    if len({o.seed for o in outcomes}) > 1:
        text += ". Each seed has its own split"
    return text + "."


def _split_measures(measures: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """The recorded measures of :func:`fedblend.data.measures.noniid_measures`."""
    rows = [
        (
            "classes a client",
            "mean ± deviation over clients; fewer classes: less IID",
            "{classes_mean:.2f} ± {classes_deviation:.2f}",
        ),
        (
            "KL divergence",
            "Kullback-Leibler, mean over pairs of clients of Σ pᵢ ln(pᵢ / pⱼ) over classes, with one sample added to "
            "each client in the proportions of the whole data; 0: all clients are equal",
            "{divergence:.3f} nats",
        ),
        (
            "distance to the whole",
            "mean over clients of Σ |pᵢ - p| over classes; 0: equal to the whole data, 2: no class in common",
            "{distance:.3f}",
        ),
        ("samples a client", "mean ± deviation over clients", "{size_mean:,.1f} ± {size_deviation:,.1f}"),
        ("smallest, median, largest", "samples a client", "{size_min:,.0f}, {size_median:,.0f}, {size_max:,.0f}"),
    ]
    recorded = []
    for name, explanation, pattern in rows:
        try:
            recorded.append((name, explanation, pattern.format(**measures)))
        except KeyError:
            continue
    return recorded
