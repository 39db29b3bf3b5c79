"""The page: one HTML file that holds its pictures and scripts, so that it works offline and can be mailed."""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from fedblend.analysis.plotting import GRID, INK, MUTED
from fedblend.analysis.points import sheets
from fedblend.analysis.privacy.statements import MOST_ROUNDS, SCOPE
from fedblend.core.errors import FedblendError
from fedblend.core.files import make_folder_of, write_atomically
from fedblend.report.columns import BOLD_RULE, evaluations_note
from fedblend.report.curve_figures import BAND_TEXT, legend_sample
from fedblend.report.export import export
from fedblend.report.figures import Chart, Mark
from fedblend.report.guarantees import WORDS_NOTE
from fedblend.report.sections import DatasetSection, dataset_sections, section_charts, splits
from fedblend.report.shared_images import galleries
from fedblend.report.summary_figure import draw_summary
from fedblend.report.tables import section_tables
from fedblend.report.verdict import verdict
from fedblend.runs.directory import RunDirectory

MAX_IMAGE_BYTES = 600_000  # Bytes that images which left clients, and class interior points, may take on a page


def write(
    runs: Sequence[RunDirectory], file: Path, png: Path | None, baseline: str | None, folder: Path | None
) -> None:
    """Write the page, and the summary figure and the files of an export if given. See :func:`fedblend.report.write`."""
    if not runs:
        raise FedblendError("report: no runs given; name run directories, or folders of studies")
    for path in filter(None, (file, png)):
        _require_writable(path)
    sections = dataset_sections(runs, baseline)
    if folder is not None:
        export(sections, folder)
    write_atomically(file, page(sections))
    if png is not None:
        write_atomically(png, draw_summary(sections))


def page(sections: Sequence[DatasetSection]) -> str:
    """The page as text."""
    # Ids of the first section have no suffix, so that those of a page with one data set have none.
    values = [_template_values(section, f"-{i}" if i > 1 else "") for i, section in enumerate(sections, 1)]
    _leave_out_images(values)
    return _template().render(
        title=" / ".join(dict.fromkeys(section.description.title for section in sections)),
        runs=sum(len(g.outcomes) for section in sections for g in section.groups),
        sections=values,
        band=BAND_TEXT,
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedblend", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def _leave_out_images(values: Sequence[dict[str, Any]]) -> None:
    """Take the galleries and sheets beyond :data:`MAX_IMAGE_BYTES` out of the sections, and list their methods."""
    left = MAX_IMAGE_BYTES
    for one in values:
        one["left_out"] = []
        for kind in ("galleries", "sheets"):
            kept = []
            for images in one[kind]:
                if images.size <= left:
                    left -= images.size
                    kept.append(images)
                else:
                    one["left_out"] += images.methods if kind == "galleries" else [f"points of {images.method}"]
            one[kind] = kept


def _template_values(section: DatasetSection, suffix: str) -> dict[str, Any]:
    """The template's values for a section; the ids of its elements end in ``suffix``."""
    keys = {g.name: f"{i}{suffix}" for i, g in enumerate(section.groups)}

    def drawn(chart: Chart) -> dict[str, Any]:
        prefix = f"{chart.name}{suffix}"
        svg = inline_svg(chart.figure, prefix, chart.title, chart.marks, keys)
        return {"id": prefix, "title": chart.title, "svg": Markup(svg), "numbers": chart.shown}

    charts = section_charts(section)
    return {
        **vars(section),
        "suffix": suffix,
        "verdict": verdict(section.rows, section.baseline),
        "unsafe": section.unsafe,
        "only_class": section.groups[0].outcomes[0].only_class,
        "unfinished": [g for g in section.groups if g.unfinished],
        "missing_uploads": [text for g in section.groups for text in g.missing_uploads],
        "tables": section_tables(section),
        "legend": [
            (name, keys[name], Markup(inline_svg(legend_sample(section.styles[name]), f"key-{key}", name)))
            for name, key in keys.items()
        ],
        "curves": [drawn(chart) for chart in charts if chart.methods and chart.name != "epsilon"],
        "charts": {chart.name: drawn(chart) for chart in charts if not chart.methods or chart.name == "epsilon"},
        "splits": [(drawn(split.chart), split.measures) for split in splits(section.groups)],
        "scope": SCOPE,
        "epsilon_rounds": MOST_ROUNDS,
        "words_note": WORDS_NOTE,
        "rule": f"{BOLD_RULE} {evaluations_note(section.rows)}".rstrip(),
        "galleries": galleries(section.groups),
        "sheets": sheets.sheets(section.groups),
    }


def _resource(name: str) -> str:
    return files("fedblend.report").joinpath(name).read_text(encoding="utf-8")


def _require_writable(path: Path) -> None:
    if path.is_dir():
        raise FedblendError(f"{path}: is a folder; give the path of a file, such as {path / 'report.html'}")
    make_folder_of(path)


# A chart as SVG inside the page: it takes the page's letters and colours, and has texts for a pointer ----------------

PAGE_COLOURS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
"""The page's colour in the place of each colour for a white background."""


def inline_svg(
    figure: Figure,
    prefix: str,
    label: str,
    marks: Mapping[str, Mark] | None = None,
    keys: Mapping[str, str] | None = None,
) -> str:
    """A figure as an ``svg`` element whose ids begin with ``prefix``; ``label`` describes it.

    ``marks`` are the texts of drawn groups by their ids. ``keys`` are the values of the attribute ``data-method`` by
    method, which the page's script reads.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedblend", "path.simplify": False}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    # Nothing is drawn outside of the axes, so no clipping is needed.
    text = re.sub(r'<clipPath id="[^"]*">.*?</clipPath>', "", re.sub(r' clip-path="[^"]*"', "", text), flags=re.DOTALL)
    text = re.sub(r"<defs>\s*(<style[^>]*>.*?</style>)?\s*</defs>", "", text, flags=re.DOTALL)
    for gid, mark in (marks or {}).items():
        text = _with_titles(text, gid, mark, (keys or {}).get(mark.method, ""))
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r'(?<= )(d|x|y)="([^"]*)"', _rounded, text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    for colour, variable in PAGE_COLOURS.items():
        text = text.replace(colour, variable)
    head, _, rest = text.partition(">")
    (box,) = re.findall(r'viewBox="[^"]*"', head)
    body = re.sub(r"\n\s*", "\n", rest).strip()
    return f'<svg {box} role="img" aria-label="{html.escape(label)}">{body}'


def _with_titles(text: str, gid: str, mark: Mark, key: str) -> str:
    """Give a drawn line and its band the method's key, the line its title, and each of its points a title."""
    owned = f'<g data-method="{html.escape(key)}">'
    text = text.replace(f'<g id="{gid}-band">', owned)
    before, found, after = text.partition(f'<g id="{gid}">')
    if not found:
        return text
    points = iter(mark.points)
    after = re.sub(
        r"<use ([^>]*[^/])/>",
        lambda use: f"<use {use[1]}><title>{html.escape(next(points))}</title></use>",
        after,
        count=len(mark.points),
    )
    return f"{before}{owned}<title>{html.escape(mark.title)}</title>{after}"


def _rounded(attribute: re.Match[str]) -> str:
    numbers = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), attribute[2])
    return f'{attribute[1]}="{" ".join(numbers.split())}"'
