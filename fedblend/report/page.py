"""The page: one HTML file with everything in it, so that it works offline and can be sent to anyone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblend.analysis.points import sheets
from fedblend.analysis.privacy.statements import SCOPE
from fedblend.core.errors import FedblendError
from fedblend.report import figures, pictures, still
from fedblend.report.chapters import Chapter, chapters
from fedblend.report.guarantees import drawable
from fedblend.report.lines import BAND_TEXT
from fedblend.report.splits import splits
from fedblend.report.tables import by_client, by_kind, by_phase, results
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import write_atomically

if TYPE_CHECKING:
    import plotly.graph_objects as go


def write(runs: Sequence[RunDirectory], html: Path, png: Path | None = None) -> None:
    """Write the page, and the still picture if it is given a path. See :func:`fedblend.report.write`."""
    if not runs:
        raise FedblendError("report: no runs given; name run directories, or folders of studies")
    for path in filter(None, (html, png)):
        _require_writable(path)
    told = chapters(runs)
    write_atomically(html, page(told))
    if png is not None:
        write_atomically(png, still.draw(told, _title(told)))


def page(told: Sequence[Chapter]) -> str:
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
    # The first chapter's parts are called by their plain names, so that an only one has no number.
    filled = [_filled(chapter, f"-{i}" if i > 1 else "") for i, chapter in enumerate(told, 1)]
    drawn = {name: figure for one in filled for name, figure in one.pop("figures").items()}
    return environment.get_template("page.html").render(
        title=_title(told),
        runs=sum(len(g.outcomes) for chapter in told for g in chapter.groups),
        chapters=filled,
        band=BAND_TEXT,
        data={name: Markup(_as_json(figure)) for name, figure in drawn.items()},
        plotly=Markup(get_plotlyjs()),
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def _title(told: Sequence[Chapter]) -> str:
    """The names of the experiments."""
    return " / ".join(dict.fromkeys(chapter.about.title for chapter in told))


def _filled(chapter: Chapter, mark: str) -> dict[str, Any]:
    """What the template says of a chapter; names of its figures end in ``mark``."""
    drawn = _figures(chapter)
    pictured = splits(chapter.groups)
    drawn |= {split.name: split.figure for split in pictured}
    return {
        "name": chapter.name,
        "mark": mark,
        "about": chapter.about,
        "groups": chapter.groups,
        "looks": chapter.looks,
        "unsafe": chapter.unsafe,
        "only_class": chapter.groups[0].outcomes[0].only_class,
        "unfinished": chapter.unfinished,
        "results": results(chapter.table),
        "kinds": by_kind(chapter.table),
        "clients": by_client(chapter.groups),
        "phases": by_phase(chapter.table),
        "drawn": set(drawn),
        "curves": [(name, title) for name, title in _titles(drawn) if name in drawn],
        "splits": pictured,
        "guarantees": chapter.guarantees,
        "scope": SCOPE,
        "galleries": pictures.galleries(chapter.groups),
        "sheets": sheets.sheets(chapter.groups),
        "figures": {f"{name}{mark}": figure for name, figure in drawn.items()},
    }


def _figures(chapter: Chapter) -> dict[str, go.Figure]:
    """The figures there are data for, by name."""
    curves, looks = chapter.curves, chapter.looks
    made: dict[str, go.Figure | None] = {}
    if curves["accuracy"].notna().any():
        made["accuracy"] = figures.curve(curves, "accuracy", looks, chapter.targets)
        made["cost"] = figures.cost(curves, "accuracy", looks)
    elif len(curves):
        made["cost"] = figures.cost(curves, "loss", looks)
    if len(curves) and curves["clock"].max() > 0:
        made["clock"] = figures.clock(curves, "accuracy" if "accuracy" in made else "loss", looks)
    for column in ("loss", "train_loss"):
        if curves[column].notna().any():
            made[column] = figures.curve(curves, column, looks)
    if curves["accuracy"].notna().any():
        made["epsilon"] = figures.against_epsilon(curves, looks, drawable(chapter.guarantees))
    made["classes"] = figures.by_class(chapter.groups)
    if chapter.table["seconds"].sum() > 0:
        made["time"] = figures.time(chapter.table)
    return {name: figure for name, figure in made.items() if figure is not None}


def _titles(drawn: Collection[str]) -> list[tuple[str, str]]:
    """The curves in order, with their titles; without accuracies the loss takes their place."""
    cost = ("cost", f"{'Accuracy' if 'accuracy' in drawn else 'Loss'} against what was sent")
    loss = ("loss", "Loss on the test samples")
    clock = ("clock", f"{'Accuracy' if 'accuracy' in drawn else 'Loss'} against time")
    first = [("accuracy", "Accuracy by round"), cost, clock, loss] if "accuracy" in drawn else [loss, cost, clock]
    return [*first, ("train_loss", "Loss in local training")]


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
