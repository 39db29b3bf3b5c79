"""A chart as SVG inside a page: it takes the page's letters and colours, and has texts for a pointer."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping

import matplotlib
from matplotlib.figure import Figure

from fedblend.analysis.plotting import GRID, INK, MUTED
from fedblend.report.figures import Mark

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
