"""The splits that runs were made on: a picture and the measures of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedblend.report import figures
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, Outcome

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST = 4
"""Pictures of different splits on one page; of more the first are drawn."""

FIELDS = ("data", "partition", "fraction", "holdout")
"""Fields of an experiment that, with the seed, decide its split."""


@dataclass(frozen=True)
class Split:
    """A picture of a split, and its measures as (word, explanation, number in words)."""

    name: str
    caption: str
    figure: go.Figure
    measures: list[tuple[str, str, str]]


def splits(groups: Sequence[Group]) -> list[Split]:
    """Each different split, as the run of its lowest seed had it; splits that no run tells of are left out."""
    by_fields: dict[str, list[Outcome]] = {}
    for outcome in (o for g in groups for o in g.outcomes):
        by_fields.setdefault(repr([outcome.config.get(field) for field in FIELDS]), []).append(outcome)
    made: list[Split] = []
    for outcomes in by_fields.values():
        first = min(outcomes, key=lambda o: o.seed)
        record = RunDirectory(first.path).split()
        figure = figures.split(record)
        if figure is not None and len(made) < MOST:
            name = f"split-{len(made)}"
            made.append(Split(name, _caption(first, outcomes, record), figure, _measures(record.get("measures", {}))))
    return made


def _caption(first: Outcome, outcomes: Sequence[Outcome], record: Mapping[str, Any]) -> str:
    data = first.facts.get("data", {}).get("name", first.config["data"]["name"])
    text = f"{data} by '{first.config['partition']['name']}', seed {first.seed}"
    shown, number = len(record.get("sizes", [])), first.facts.get("clients", {}).get("number", 0)
    if number > shown:
        text += f", the first {shown:,} of {number:,} clients"
    if len({o.seed for o in outcomes}) > 1:
        text += ". Each seed has a split of its own"
    return text + "."


def _measures(measures: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """The measures that the run tells, of those of :func:`fedblend.data.measures.noniid_measures`."""
    rows = [
        (
            "classes a client",
            "mean ± deviation over clients; the fewer, the less IID",
            "{classes_mean:.2f} ± {classes_deviation:.2f}",
        ),
        (
            "KL divergence",
            "Kullback-Leibler, mean over pairs of clients of Σ pᵢ ln(pᵢ / pⱼ) over classes, each client lent one "
            "sample that is spread as the whole data; 0: all are alike",
            "{divergence:.3f} nats",
        ),
        (
            "distance to the whole",
            "mean over clients of Σ |pᵢ - p| over classes; 0: as the whole data, 2: nothing in common",
            "{distance:.3f}",
        ),
        ("samples a client", "mean ± deviation over clients", "{size_mean:,.1f} ± {size_deviation:,.1f}"),
        ("smallest, median, largest", "samples a client", "{size_min:,.0f}, {size_median:,.0f}, {size_max:,.0f}"),
    ]
    told = []
    for word, why, pattern in rows:
        try:
            told.append((word, why, pattern.format(**measures)))
        except KeyError:
            continue
    return told
