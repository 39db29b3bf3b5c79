"""What the site's pages on fields and methods hold between two marks, made from the code when the site is built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from fedblend.core import registry
from fedblend.data.measures import noniid_measures, smoothed
from fedblend.experiment import presets
from fedblend.experiment.fields import Method
from fedblend.experiment.index import NOT_GIVEN, Entry
from fedblend.experiment.options import kind_entries, table_entries


def fields() -> str:
    """A section for each table of a file, and the measures of a split."""
    experiment, *inner = table_entries()
    return "\n".join(
        [
            *_section("## The experiment", experiment),
            *(line for entry in inner for line in _section(f"## `[{entry.where}]`", entry)),
            "## Measures of a split\n",
            "`fedblend data show FILE` prints them, and every report shows them next to the figure of the split.\n",
            markdown(inspect.getdoc(noniid_measures) or ""),
            "`smoothed`: " + markdown(inspect.getdoc(smoothed) or ""),
        ]
    )


def contents() -> str:
    """Links to the sections of a file's tables, and to the page of each kind of part and its parts."""
    links = ", ".join(f"[`[{entry.where}]`](#{entry.where})" for entry in table_entries()[1:])
    rows = [
        [
            f'<span id="parts-{kind}"></span>[{kind}](reference/{kind}.md)',
            ", ".join(f"[`{entry.name}`](reference/{kind}.md#{entry.name})" for entry in kind_entries(kind)),
        ]
        for kind in registry.MODULES
    ]
    return (
        f"[The experiment](#the-experiment) has the top-level fields; the tables of a file are {links}.\n\n"
        + _table(["kind of part", "parts"], rows)
    )


def part_pages() -> dict[str, str]:
    """A page for each kind of part: a section for each part that fedblend declares; users' parts are left out."""
    pages = {}
    for kind in registry.MODULES:
        entries = kind_entries(kind)
        sections = [line for entry in entries for line in _section(f"## `{entry.name}`", entry)]
        pages[kind] = "\n".join([f"# Parts: {kind}\n", f"In a file: `{entries[0].where}`.\n", *sections])
    return pages


def markdown(docstring: str) -> str:
    """A docstring's reStructuredText as Markdown, ending in a newline. A sign "less than" does not begin a tag of HTML.

    >>> markdown("See :func:`a.b.fit` in :mod:`a.b` for ``x`` and <y, z>.")
    'See `fit` in `a.b` for `x` and &lt;y, z>.\\n'
    """
    modules = re.sub(r":mod:`(.+?)`", r"`\1`", docstring)
    names = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", modules)
    text = re.sub(r"``(.+?)``", r"`\1`", names).replace("::\n", ":\n").strip() + "\n"
    # Not in code: between backquotes, or in lines that are indented.
    return re.sub(r"(`[^`]*`|^ {4}.*$)|<(?=[a-zA-Z/!])", lambda found: found[1] or "&lt;", text, flags=re.MULTILINE)


def _section(head: str, entry: Entry) -> Iterable[str]:
    yield head + "\n"
    yield markdown(entry.text)
    if entry.options:
        words = ("required", NOT_GIVEN, "its defaults")
        rows = [
            [f"`{o.name}`", o.type, o.default if o.default in words else f"`{o.default}`", o.text]
            for o in entry.options
        ]
        yield _table(["option", "type and range", "default", "what it is"], rows)


def methods_of(family: str) -> str:
    """The methods of a family with links to their parts, as Markdown for a page in ``docs/methods/``."""
    rows = []
    for name, (text, spec) in presets.families()[family].items():
        parts = ", ".join(f"{kind} [`{part}`](../reference/{kind}.md#{part})" for kind, part in _parts_of(spec))
        rows.append([f"`{name}`", text, parts or "the defaults", _leaving(Method.model_validate(name))])
    return _table(["method", "what it is", "parts", "leaves a client"], rows).rstrip()


def _parts_of(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parts that a preset names, by kind and name; an objective's base, too."""
    found: list[tuple[str, str]] = []
    for field, given in spec.items():
        kind = "term" if field == "terms" else field
        for part in given if isinstance(given, list) else [given]:
            if isinstance(part, str):
                found.append((kind, part))
            elif isinstance(part, Mapping):
                found += [(kind, one["name"]) for one in (part, part.get("base")) if one]
    return found


def _leaving(method: Method) -> str:
    """The kinds of payload that leave a client, as a site's file names them, with how often."""
    sharing = method.sharing
    often = sharing.plan.when.replace("-", " ")
    kinds = [
        (f"`{sharing.bytes_kind}`, {often}", sharing.plan.leaves),
        ("`raw`, once", method.server_step.works_on == "raw"),
        (f"`{method.upload.bytes_kind}`, each round", method.upload.trains),
        ("`answers`, each round", method.server_step.works_on == "answers"),
    ]
    return "; ".join(kind for kind, leaves in kinds if leaves) or "nothing"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def fill(page: str, makers: Mapping[str, Callable[[], str]]) -> str:
    r"""The page with the text between ``<!-- NAME -->`` and ``<!-- end -->`` replaced by that of the maker NAME.

    >>> fill("<!-- sum -->\nold\n<!-- end -->", {"sum": lambda: "2"})
    '<!-- sum -->\n2\n<!-- end -->'
    """

    def replacement(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{makers[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (?!end)(.+?) -->\n.*?<!-- end -->", replacement, page, flags=re.DOTALL)


def filled(page: str) -> str:
    """A page of docs/ with what stands between its marks made from the code: fields, or the methods of a family."""
    families = {f"methods: {family}": partial(methods_of, family) for family in presets.families()}
    makers: dict[str, Callable[[], str]] = {"contents": contents, "fields": fields, **families}
    return fill(page, makers) if any(f"<!-- {mark} -->" in page for mark in makers) else page
