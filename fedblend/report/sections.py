"""The sections of a report, one for each data set, and the figures and measures of its splits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedblend.analysis.plotting import LineStyle, line_styles
from fedblend.report.columns import MethodRow, method_rows
from fedblend.report.curve_figures import BY_BYTES, BY_ROUND, BY_TIME, by_epsilon, curve_chart, lines
from fedblend.report.description import RunDescription, describe_runs
from fedblend.report.figures import Chart, class_chart, split_chart, time_chart
from fedblend.report.guarantees import Guarantee, epsilon_by_round, guarantees
from fedblend.runs.differences import baselines
from fedblend.runs.directory import OWN_DATA, RunDirectory
from fedblend.runs.groups import Group, Outcome, by_data
from fedblend.runs.summary import curves_of, validates


@dataclass(frozen=True)
class DatasetSection:
    """The methods on one data set, with the data of their tables and figures."""

    name: str
    groups: list[Group]
    description: RunDescription
    curves: pd.DataFrame
    rows: list[MethodRow]
    styles: Mapping[str, LineStyle]
    """Line styles by method, the same in all sections of a report."""
    guarantees: list[Guarantee]
    baseline: str | None
    """The method to which the others are compared."""

    @property
    def unsafe(self) -> list[str]:
        """The methods that share raw samples."""
        return [row["method"] for row in self.rows if row["unsafe"]]

    @property
    def by_objective(self) -> dict[str, list[str]]:
        """The methods by the objective and terms of their local training; losses are comparable within one alone."""
        found: dict[str, list[str]] = {}
        for g in self.groups:
            found.setdefault(_objective_text(g.config["method"]), []).append(g.name)
        return found

    @property
    def targets(self) -> list[float]:
        """The target accuracies of the methods, without those on validation samples."""
        configs = [g.config for g in self.groups if g.config.get("target_metric", "accuracy") == "accuracy"]
        configs = [config for config in configs if not validates(config)]
        return list(dict.fromkeys(config["target"] for config in configs if config.get("target") is not None))


def _objective_text(method: Mapping[str, Any]) -> str:
    """The names of a method's objective, of those that it wraps, and of its terms: ``fedmix + proximal``."""
    objective, names = method.get("objective", {}), []
    while isinstance(objective, Mapping) and "name" in objective:
        names.append(str(objective["name"]))
        objective = objective.get("base")
    if len(names) > 1 and names[-1] == "plain":
        names.pop()
    terms = [str(term.get("name")) for term in method.get("terms", []) if isinstance(term, Mapping)]
    return " + ".join([" of ".join(names) or "unknown", *sorted(terms)])


def dataset_sections(runs: Sequence[RunDirectory], baseline: str | None = None) -> list[DatasetSection]:
    """A section for each data set, in order of first appearance; ``baseline`` is the method to compare with."""
    sets = by_data(runs)
    chosen = baselines(sets, baseline)
    styles = line_styles([g.name for groups in sets.values() for g in groups])
    return [
        DatasetSection(name, g, describe_runs(g), curves_of(g), method_rows(g), styles, guarantees(g), chosen[name])
        for name, g in sets.items()
    ]


MEASURED = {
    "taylor_failed": "Share of samples whose loss FedMix's Taylor term predicts below 0",
    "interior_own": "Share of clients' points that are interior to their class on the client's model",
    "interior_global": "Share of the best points that are interior to their class on the aggregate",
}
"""What parts measure (:attr:`~fedblend.core.record.RoundRecord.measured`), as titles of charts."""

# Charts ----------------------------------------------------------------------------------------------------------


def section_charts(section: DatasetSection) -> list[Chart]:
    """The charts that have data: curves, accuracy by class, time by phase. Splits have their own."""
    curves, styles = section.curves, section.styles
    measure = "accuracy" if curves["accuracy"].notna().any() else "loss"
    scores, losses = lines(curves, measure), lines(curves, "loss")
    word = f"Test {measure}"
    drawn = [curve_chart("accuracy", "Test accuracy by round", scores, BY_ROUND, measure, styles, section.targets)]
    if measure == "loss":
        drawn = [curve_chart("loss", "Test loss by round", losses, BY_ROUND, "loss", styles)]
    drawn.append(curve_chart("cost", f"{word} by megabytes sent", scores, BY_BYTES, measure, styles))
    if len(curves) and curves["clock"].max() > 0:
        drawn.append(curve_chart("clock", f"{word} by time", scores, BY_TIME, measure, styles))
    if measure == "accuracy":
        drawn.append(curve_chart("loss", "Test loss by round", losses, BY_ROUND, "loss", styles))
    trained = lines(curves, "train_loss")
    for i, (objective, methods) in enumerate(section.by_objective.items(), 1):
        of_objective = [line for line in trained if line.method in methods]
        name, title = f"train_loss-{i}", f"Training loss by round, objective: {objective}"
        drawn.append(curve_chart(name, title, of_objective, BY_ROUND, "train_loss", styles))
    for column in (name for name in curves.columns if name.startswith("measured.")):
        name = column.removeprefix("measured.")
        title = f"{MEASURED.get(name, name)}, by round"
        drawn.append(curve_chart(f"measured-{name}", title, lines(curves, column), BY_ROUND, column, styles))
    if measure == "accuracy" and (spent := epsilon_by_round(section.guarantees)):
        drawn.append(curve_chart("epsilon", "Test accuracy by epsilon", scores, by_epsilon(spent), measure, styles))
    drawn += [class_chart(section.groups), time_chart(section.rows)]
    return [chart for chart in drawn if chart is not None]


# Splits ----------------------------------------------------------------------------------------------------------

MAX_SPLITS = 4  # Largest number of splits in a section; of more, the first are drawn

SPLIT_FIELDS = ("data", "partition", "fraction", "holdout", "validation")
"""Fields of an experiment that, with the seed, determine its split."""

SPLIT_MEASURES = (
    ("classes a client", "mean ± deviation over clients; fewer classes: less IID",
     "{classes_mean:.2f} ± {classes_deviation:.2f}"),
    ("KL divergence", "Kullback-Leibler, mean over pairs of clients of Σ pᵢ ln(pᵢ / pⱼ) over classes, with one sample "
     "added to each client in the proportions of the whole data; 0: all clients are equal", "{divergence:.3f} nats"),
    ("distance to the whole", "mean over clients of Σ |pᵢ - p| over classes; 0: equal to the whole data, 2: no class "
     "in common", "{distance:.3f}"),
    ("samples a client", "mean ± deviation over clients", "{size_mean:,.1f} ± {size_deviation:,.1f}"),
    ("smallest, median, largest", "samples a client", "{size_min:,.0f}, {size_median:,.0f}, {size_max:,.0f}"),
)  # fmt: skip
"""The measures of a split: name, explanation, and its value's form."""


@dataclass(frozen=True)
class Split:
    """The chart of a split and its measures."""

    chart: Chart
    measures: list[tuple[str, str, str]]
    """Measures as (name, explanation, value as text)."""


def splits(groups: Sequence[Group]) -> list[Split]:
    """A chart for each different split, of the run with the lowest seed; splits without a record are left out."""
    by_fields: dict[str, list[Outcome]] = {}
    for outcome in (o for g in groups for o in g.outcomes):
        by_fields.setdefault(repr([outcome.config.get(field) for field in SPLIT_FIELDS]), []).append(outcome)
    drawn: list[Split] = []
    for outcomes in by_fields.values():
        first = min(outcomes, key=lambda o: o.seed)
        record = RunDirectory(first.path).split()
        if len(drawn) < MAX_SPLITS:
            chart = split_chart(record, f"split-{len(drawn)}", _split_caption(first, outcomes, record))
            if chart is not None:
                drawn.append(Split(chart, _split_measures(record.get("measures", {}))))
    return drawn


def _split_caption(first: Outcome, outcomes: Sequence[Outcome], record: Mapping[str, Any]) -> str:
    data = first.facts.get("data", {}).get("name", first.config["data"]["name"])
    own = first.facts.get("partition", {}).get("rule") == OWN_DATA
    text = f"{data} by '{first.config['partition']['name']}', seed {first.seed}"
    text = f"samples of each site, seed {first.seed}" if own else text
    shown, number = len(record.get("sizes", [])), first.facts.get("clients", {}).get("number", 0)
    if number > shown:
        text += f", the first {shown:,} of {number:,} clients"
    others = {o.seed: o for o in outcomes if o.seed != first.seed}.values()
    if others:
        splits = [RunDirectory(o.path).split() for o in others]
        alike = all(one.get(name) == record.get(name) for one in splits for name in ("counts", "sizes", "measures"))
        text += ". Each seed has the same numbers" if alike else ". Each seed has its own split"
    return text + "."


def _split_measures(measures: Mapping[str, float]) -> list[tuple[str, str, str]]:
    recorded = []
    for name, explanation, form in SPLIT_MEASURES:
        with contextlib.suppress(KeyError):
            recorded.append((name, explanation, form.format(**measures)))
    return recorded
