"""The page: one HTML file with everything in it, so that it works offline and can be sent to anyone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblend.errors import FedblendError
from fedblend.report import figures, pictures, still
from fedblend.report.lines import BAND_TEXT
from fedblend.report.settings import settings
from fedblend.report.style import Look, looks
from fedblend.report.tables import by_client, by_kind, by_phase, results
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import write_atomically
from fedblend.runs.groups import Group, Outcome, group
from fedblend.runs.summary import curves_of, table_of

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

MOST_SPLITS = 4
"""Pictures of different splits on one page; of more the first are drawn."""

SPLIT_FIELDS = ("data", "partition", "fraction", "holdout")
"""Fields of an experiment that, with the seed, decide its split."""


def write(runs: Sequence[RunDirectory], html: Path, png: Path | None = None) -> None:
    """Write the page, and the still picture if it is given a path. See :func:`fedblend.report.write`."""
    if not runs:
        raise FedblendError("report: no runs given; name run directories, or folders of studies")
    for path in filter(None, (html, png)):
        _require_writable(path)
    groups = group(runs)
    curves, table = curves_of(groups), table_of(groups)
    write_atomically(html, page(groups, curves, table))
    if png is not None:
        title = settings(groups).title
        write_atomically(png, still.draw(curves, table, _looks(groups), title, _targets(groups)))


def page(groups: Sequence[Group], curves: pd.DataFrame, table: pd.DataFrame) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedblend", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    by_method = _looks(groups)
    drawn = _figures(groups, curves, table, by_method)
    splits = _splits(groups)
    drawn |= {f"split-{i}": figure for i, (_, figure, _) in enumerate(splits)}
    return environment.get_template("page.html").render(
        about=settings(groups),
        groups=groups,
        looks=by_method,
        unsafe=[g.name for g in groups if pictures.gives_raw_away(g.config)],
        unfinished=[g for g in groups if g.unfinished],
        results=results(table),
        kinds=by_kind(table),
        clients=by_client(groups),
        phases=by_phase(table),
        drawn=drawn,
        splits=[(f"split-{i}", caption, measures) for i, (caption, _, measures) in enumerate(splits)],
        galleries=pictures.galleries(groups),
        band=BAND_TEXT,
        data={name: Markup(_as_json(figure)) for name, figure in drawn.items()},
        plotly=Markup(get_plotlyjs()),
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def _figures(
    groups: Sequence[Group], curves: pd.DataFrame, table: pd.DataFrame, by_method: dict[str, Look]
) -> dict[str, go.Figure]:
    """The figures there are data for, by name."""
    made: dict[str, go.Figure | None] = {}
    if curves["accuracy"].notna().any():
        made["accuracy"] = figures.curve(curves, "accuracy", by_method, _targets(groups))
        made["cost"] = figures.cost(curves, "accuracy", by_method)
    elif len(curves):
        made["cost"] = figures.cost(curves, "loss", by_method)
    for column in ("loss", "train_loss"):
        if curves[column].notna().any():
            made[column] = figures.curve(curves, column, by_method)
    made["classes"] = figures.by_class(groups)
    if table["seconds"].sum() > 0:
        made["time"] = figures.time(table)
    return {name: figure for name, figure in made.items() if figure is not None}


def _splits(groups: Sequence[Group]) -> list[tuple[str, go.Figure, dict[str, float]]]:
    """Caption, picture and measures of each different split, of its lowest seed."""
    by_split: dict[str, list[Outcome]] = {}
    for g in groups:
        for outcome in g.outcomes:
            key = repr([outcome.config.get(field) for field in SPLIT_FIELDS])
            by_split.setdefault(key, []).append(outcome)
    made = []
    for outcomes in list(by_split.values())[:MOST_SPLITS]:
        first = min(outcomes, key=lambda o: o.seed)
        record = RunDirectory(first.path).split()
        figure = figures.split(record)
        if figure is not None:
            made.append((_split_caption(first, outcomes, record), figure, record.get("measures", {})))
    return made


def _split_caption(first: Outcome, outcomes: Sequence[Outcome], record: dict[str, Any]) -> str:
    data = first.facts.get("data", {}).get("name", first.config["data"]["name"])
    text = f"{data} by '{first.config['partition']['name']}', seed {first.seed}"
    shown, number = len(record.get("sizes", [])), first.facts.get("clients", {}).get("number", 0)
    if number > shown:
        text += f", the first {shown:,} of {number:,} clients"
    if len({o.seed for o in outcomes}) > 1:
        text += ". Each seed has a split of its own"
    return text + "."


def _targets(groups: Sequence[Group]) -> list[float]:
    return list(dict.fromkeys(g.config["target"] for g in groups if g.config.get("target") is not None))


def _looks(groups: Sequence[Group]) -> dict[str, Look]:
    return looks([g.name for g in groups])


def _as_json(figure: go.Figure) -> str:
    """A figure as JSON that can stand in a script: nothing in it can end the script early."""
    text: str = figure.to_json()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return files("fedblend.report").joinpath(name).read_text(encoding="utf-8")


def _require_writable(path: Path) -> None:
    if path.is_dir():
        raise FedblendError(f"{path}: is a folder; give the path of a file, such as {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{path.parent}: cannot be made: {error.strerror}; give another path") from None
