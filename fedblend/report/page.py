"""The page: one HTML file with everything in it, so that it works offline and can be sent to anyone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from fedblend.errors import FedblendError
from fedblend.report import figures, pictures, still
from fedblend.report.lines import BAND_TEXT
from fedblend.report.privacy import NOTE, gives_raw_away
from fedblend.report.settings import settings
from fedblend.report.splits import splits
from fedblend.report.style import Look, looks
from fedblend.report.tables import by_client, by_kind, by_phase, results
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import write_atomically
from fedblend.runs.groups import Group, group
from fedblend.runs.summary import curves_of, table_of

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


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
        about = settings(groups)
        notes = {g.name: NOTE for g in groups if gives_raw_away(g.config)}
        heads = still.Heads(about.title, about.short, notes, _targets(groups))
        write_atomically(png, still.draw(curves, table, _looks(groups), heads))


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
    pictured = splits(groups)
    drawn |= {split.name: split.figure for split in pictured}
    return environment.get_template("page.html").render(
        about=settings(groups),
        groups=groups,
        looks=by_method,
        unsafe=[g.name for g in groups if gives_raw_away(g.config)],
        unfinished=[g for g in groups if g.unfinished],
        results=results(table),
        kinds=by_kind(table),
        clients=by_client(groups),
        phases=by_phase(table),
        drawn=drawn,
        curves=[(name, title) for name, title in _titles(drawn) if name in drawn],
        splits=pictured,
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


def _titles(drawn: Collection[str]) -> list[tuple[str, str]]:
    """The curves in order, with their titles; without accuracies the loss takes their place."""
    cost = ("cost", f"{'Accuracy' if 'accuracy' in drawn else 'Loss'} against what was sent")
    loss = ("loss", "Loss on the test samples")
    first = [("accuracy", "Accuracy by round"), cost, loss] if "accuracy" in drawn else [loss, cost]
    return [*first, ("train_loss", "Loss in local training")]


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
