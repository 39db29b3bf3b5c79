"""The page ``docs/configuration.md``, made from the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedblend import methods, parts
from fedblend.data.measures import noniid_measures, smoothed
from fedblend.reference.layout import LAYOUT, UNITS
from fedblend.reference.options import Entry, of_kind, tables

HEAD = """\
# Configuration

Every field of an experiment file, and of `fedblend.Experiment`. `fedblend list NAME` prints the same for one name.

<!-- Made from the code by `python -m fedblend.reference > docs/configuration.md`; write there, not here. -->
"""


def page() -> str:
    """The whole page, as Markdown."""
    experiment, *inner = tables()
    return "\n".join(
        [
            HEAD,
            LAYOUT,
            UNITS,
            *_section("## The experiment", experiment),
            *(line for entry in inner for line in _section(f"## `[{entry.where}]`", entry)),
            *(line for kind in parts.MODULES for line in _kind(kind)),
            *_presets(),
            "## Measures of a split\n",
            "`fedblend data show FILE` prints them, and every report has them beside the picture of the split.\n",
            markdown(inspect.getdoc(noniid_measures) or ""),
            "`smoothed`: " + markdown(inspect.getdoc(smoothed) or ""),
        ]
    )


def markdown(docstring: str) -> str:
    """A docstring's reStructuredText as Markdown, with an empty line at its end.

    >>> markdown("See :func:`a.b.fit` in :mod:`a.b` for ``x``.")
    'See `fit` in `a.b` for `x`.\\n'
    """
    modules = re.sub(r":mod:`(.+?)`", r"`\1`", docstring)
    names = re.sub(r":\w+:`(?:[\w.]+\.)?(\w+)`", r"`\1`", modules)
    return re.sub(r"``(.+?)``", r"`\1`", names).replace("::\n", ":\n").strip() + "\n"


def _kind(kind: str) -> Iterable[str]:
    """A section for each part of a kind that comes with fedblend."""
    entries = [entry for entry in of_kind(kind) if parts.find(kind, entry.name).__module__.startswith("fedblend.")]
    yield f"## Parts: {kind}\n"
    yield f"In a file: `{entries[0].where}`.\n"
    for entry in entries:
        yield from _section(f"### {kind} `{entry.name}`", entry)


def _section(head: str, entry: Entry) -> Iterable[str]:
    yield head + "\n"
    yield markdown(entry.text)
    if entry.options:
        rows = [[f"`{o.name}`", o.type, _code(o.default), o.text] for o in entry.options]
        yield _table(["option", "type and range", "default", "what it is"], rows)


def _code(default: str) -> str:
    return default if default in ("required", "not given", "its defaults") else f"`{default}`"


def _presets() -> Iterable[str]:
    yield "## Methods\n"
    yield "Presets of parts, by name. What is not named is the default of `[method]`.\n"
    rows = [[f"`{name}`", text, _parts(spec)] for name, (text, spec) in methods.presets().items()]
    yield _table(["method", "what it is", "parts"], rows)


def _parts(spec: Mapping[str, Any]) -> str:
    """A preset's parts with the options that it sets: ``sharing `means`, terms `proximal```."""
    words = []
    for field, given in spec.items():
        if not isinstance(given, (Mapping, list)):
            words.append(f"{field} `{given}`")
            continue
        for part in given if isinstance(given, list) else [given]:
            options = "".join(f", {name} = {value}" for name, value in part.items() if name != "name")
            words.append(f"{field} `{part['name']}{options}`")
    return "; ".join(words) or "the defaults"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
