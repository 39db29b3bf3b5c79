"""Accuracy at each of the data's own clients, site by site: what a federation is worth to each of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedblend.core.errors import FedblendError
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, by_data

NOTHING = "—"


def sites_of(group: Group) -> dict[str, float]:
    """A method's final accuracy at each site, the mean over its seeds; empty where its runs tell of no sites."""
    told = [o.evaluated[-1].get("sites", {}) for o in group.counted if o.evaluated]
    names = dict.fromkeys(name for one in told for name in one)
    return {name: fmean(one[name] for one in told if name in one) for name in names}


def sites_table(runs: Sequence[RunDirectory]) -> RenderableType:
    """A table for each data set: a row a site, a column a method, and below the mean and the worst over sites.

    Raises :class:`FedblendError` if no run tells of sites.
    """
    tables = []
    for name, groups in by_data(runs).items():
        columns = {group.name: sites for group in groups if (sites := sites_of(group))}
        if columns:
            tables.append(_table(name, columns))
    if not tables:
        raise FedblendError(
            "sites: none of these runs tells of accuracy by site; valid: runs on data with 1 to 50 clients of their "
            "own, such as heart and har"
        )
    return Stack(*tables)


def _table(name: str, columns: dict[str, dict[str, float]]) -> Table:
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0), header_style="bold")
    made.title, made.title_justify, made.title_style = Text(f"{name}: accuracy in % at each site"), "left", "bold"
    made.add_column("site", no_wrap=True)
    for method in columns:
        made.add_column(Text(method), justify="right")
    for site in dict.fromkeys(site for sites in columns.values() for site in sites):
        made.add_row(Text(site), *_cells([sites.get(site) for sites in columns.values()]))
    made.add_section()
    made.add_row("mean over sites", *_cells([fmean(sites.values()) for sites in columns.values()]))
    made.add_row("worst site", *_cells([min(sites.values()) for sites in columns.values()]))
    return made


def _cells(values: Sequence[float | None]) -> list[Text]:
    """Per cent, the best in bold."""
    texts = [NOTHING if value is None else f"{100 * value:.1f}" for value in values]
    best = f"{100 * max(value for value in values if value is not None):.1f}"
    return [Text(text, style="bold" if text == best and len(set(texts)) > 1 else "") for text in texts]
