"""The page: one HTML file that holds all its data and scripts, so that it works offline and can be mailed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblend.analysis.points import sheets
from fedblend.analysis.privacy.statements import SCOPE
from fedblend.core.errors import FedblendError
from fedblend.report import figures
from fedblend.report.privacy import epsilon_by_round
from fedblend.report.sections import DatasetSection, dataset_sections, split_figures
from fedblend.report.shared_images import galleries
from fedblend.report.summary_figure import draw_summary
from fedblend.report.tables import bytes_table, client_table, results_table, time_table
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import write_atomically

if TYPE_CHECKING:
    import plotly.graph_objects as go


def write(runs: Sequence[RunDirectory], html: Path, png: Path | None = None) -> None:
    """Write the page, and the summary figure if ``png`` is given. See :func:`fedblend.report.write`."""
    if not runs:
        raise FedblendError("report: no runs given; name run directories, or folders of studies")
    for path in filter(None, (html, png)):
        _require_writable(path)
    sections = dataset_sections(runs)
    write_atomically(html, page(sections))
    if png is not None:
        write_atomically(png, draw_summary(sections, _title(sections)))


def page(sections: Sequence[DatasetSection]) -> str:
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
    # Ids of the first section have no suffix, so that those of a page with one data set have none.
    values = [_template_values(section, f"-{i}" if i > 1 else "") for i, section in enumerate(sections, 1)]
    all_figures = {name: figure for one in values for name, figure in one.pop("figures").items()}
    return environment.get_template("page.html").render(
        title=_title(sections),
        runs=sum(len(g.outcomes) for section in sections for g in section.groups),
        sections=values,
        band=figures.BAND_TEXT,
        data={name: Markup(_as_json(figure)) for name, figure in all_figures.items()},
        plotly=Markup(get_plotlyjs()),
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def _title(sections: Sequence[DatasetSection]) -> str:
    """The names of the experiments."""
    return " / ".join(dict.fromkeys(section.description.title for section in sections))


def _template_values(section: DatasetSection, suffix: str) -> dict[str, Any]:
    """The template's values for a section; the ids of its elements end in ``suffix``."""
    splits = split_figures(section.groups)
    drawn = _figures(section) | {split.name: split.figure for split in splits}
    return {
        "name": section.name,
        "suffix": suffix,
        "description": section.description,
        "groups": section.groups,
        "styles": section.styles,
        "unsafe": section.unsafe,
        "only_class": section.groups[0].outcomes[0].only_class,
        "unfinished": section.unfinished,
        "results": results_table(section.table),
        "kinds": bytes_table(section.table),
        "clients": client_table(section.groups),
        "phases": time_table(section.table),
        "drawn": set(drawn),
        "curves": [(name, title) for name, title in _curve_titles(drawn) if name in drawn],
        "splits": splits,
        "guarantees": section.guarantees,
        "scope": SCOPE,
        "galleries": galleries(section.groups),
        "sheets": sheets.sheets(section.groups),
        "figures": {f"{name}{suffix}": figure for name, figure in drawn.items()},
    }


def _figures(section: DatasetSection) -> dict[str, go.Figure]:
    """The figures that have data, by name."""
    curves, styles = section.curves, section.styles
    drawn: dict[str, go.Figure | None] = {}
    if curves["accuracy"].notna().any():
        drawn["accuracy"] = figures.figure_by_round(curves, "accuracy", styles, section.targets)
        drawn["cost"] = figures.figure_by_bytes(curves, "accuracy", styles)
    elif len(curves):
        drawn["cost"] = figures.figure_by_bytes(curves, "loss", styles)
    if len(curves) and curves["clock"].max() > 0:
        drawn["clock"] = figures.figure_by_time(curves, "accuracy" if "accuracy" in drawn else "loss", styles)
    for column in ("loss", "train_loss"):
        if curves[column].notna().any():
            drawn[column] = figures.figure_by_round(curves, column, styles)
    if curves["accuracy"].notna().any():
        drawn["epsilon"] = figures.figure_by_epsilon(curves, styles, epsilon_by_round(section.guarantees))
    drawn["classes"] = figures.class_figure(section.groups)
    if section.table["seconds"].sum() > 0:
        drawn["time"] = figures.time_figure(section.table)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _curve_titles(drawn: Collection[str]) -> list[tuple[str, str]]:
    """The names and titles of the curves, in order; without accuracies the loss comes first."""
    measure = "Accuracy" if "accuracy" in drawn else "Loss"
    cost, clock = ("cost", f"{measure} against bytes sent"), ("clock", f"{measure} against time")
    loss = ("loss", "Loss on the test samples")
    first = [("accuracy", "Accuracy by round"), cost, clock, loss] if "accuracy" in drawn else [loss, cost, clock]
    return [*first, ("train_loss", "Loss in local training")]


def _as_json(figure: go.Figure) -> str:
    """A figure as JSON for a script element, escaped so that it cannot end the element."""
    text: str = figure.to_json()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return files("fedblend.report").joinpath(name).read_text(encoding="utf-8")


def _require_writable(path: Path) -> None:
    """Create the folder of a file. Raises :class:`FedblendError` if that fails, or ``path`` is a folder."""
    if path.is_dir():
        raise FedblendError(f"{path}: is a folder; give the path of a file, such as {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{path.parent}: cannot be created: {error.strerror}; give another path") from None
