"""``fedblend list``: print overviews of methods and parts, or the options of one name."""

from __future__ import annotations

import os
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedblend.core import registry
from fedblend.core.errors import FedblendError, did_you_mean
from fedblend.core.paths import import_from
from fedblend.experiment import presets
from fedblend.experiment.fields import Method
from fedblend.experiment.options import TABLE_CLASSES, Entry, kind_entries, part_entry, table_entry

LISTS = {"methods": None, "parts": None, "datasets": "dataset", "models": "model", "partitions": "partition"}
"""The overviews, and the kind of parts of each; ``None`` where an overview has no single kind."""


def show_list(word: str | None) -> None:
    """Print an overview of methods or parts, or the options of a table, a kind of parts, a part, or a method.

    Without a word print all words that can be listed. Raises :class:`FedblendError` with the nearest known word for an
    unknown one.
    """
    if word is None:
        Console().print(_contents())
    else:
        Console().print(_overview(word) if word in LISTS else Group(*_details(word)))


def _contents() -> RenderableType:
    """The words that can be listed, and the number of entries of each."""
    kinds = {kind: len(registry.known(kind)) for kind in registry.MODULES}
    counts = {word: kinds[kind] for word, kind in LISTS.items() if kind}
    counts |= {"methods": len(presets.presets()), "parts": sum(kinds.values())}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("fedblend list ...", no_wrap=True)
    table.add_column("how many", justify="right")
    table.add_column("of each kind")
    for word in LISTS:
        of_kinds = ", ".join(f"{kind} {number}" for kind, number in kinds.items()) if word == "parts" else ""
        table.add_row(word, str(counts[word]), of_kinds)
    names = ", ".join(TABLE_CLASSES)
    return Group(
        table, Text(f"\nWith any other name its options are listed: a table ({names}), a kind, a method, or a part.")
    )


def _overview(word: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    if word == "methods":
        table.add_column("method", no_wrap=True)
        table.add_column("what it is")
        for name, (text, _) in presets.presets().items():
            table.add_row(name, text)
        return table
    for column in ("kind", "name", "options"):
        table.add_column(column, no_wrap=column != "options")
    table.add_column("what it is")
    kind = LISTS[word]
    for entry in (entry for one in ([kind] if kind else registry.MODULES) for entry in kind_entries(one)):
        table.add_row(entry.kind, entry.name, ", ".join(o.name for o in entry.options), Text(entry.summary))
    return table


def _details(word: str) -> list[RenderableType]:
    """All entries of a word, which may name a method and parts of several kinds."""
    if ":" in word:
        # A file must name the part by this path, not by its registered name.
        return [_render(replace(part_entry(_own_part(word)), name=word))]
    entries = [table_entry(word)] if word in TABLE_CLASSES else []
    entries += kind_entries(word) if word in registry.MODULES else []
    sections: list[RenderableType] = []
    if word in presets.presets():
        own = _parts_of_method(word)
        sections = [_head(f"method {word}", presets.presets()[word][0], f'method = "{word}"'), *map(_render, own)]
        entries += [entry for entry in _named(word) if (entry.kind, entry.name) not in {(e.kind, e.name) for e in own}]
    else:
        entries += _named(word)
    sections += map(_render, entries)
    if not sections:
        raise FedblendError(
            f"list: {word!r} is not valid{did_you_mean(word, _words())}; valid: {', '.join(LISTS)}, a table "
            f"({', '.join(TABLE_CLASSES)}), a kind of parts ({', '.join(registry.MODULES)}), or any "
            "name in these lists"
        )
    return sections


def _own_part(path: str) -> type:
    """The class of a user's part, ``module:Class``; the module is installed, or in the current folder."""
    import_from([os.getcwd()])
    cls = registry.import_path(path, "list")
    if getattr(cls, "kind", None) not in registry.MODULES:
        raise FedblendError(f"list: '{path}' is not a part; declare it with @part(KIND, NAME)")
    return cls


def _words() -> list[str]:
    """All words that can be listed."""
    names = [name for kind in registry.MODULES for name in registry.known(kind)]
    return [*LISTS, *TABLE_CLASSES, *registry.MODULES, *presets.presets(), *names]


def _named(name: str) -> list[Entry]:
    """The parts of that name, of all kinds."""
    return [part_entry(registry.known(kind)[name]) for kind in registry.MODULES if name in registry.known(kind)]


def _parts_of_method(name: str) -> list[Entry]:
    """The parts of a preset that have options, with the values that the preset sets."""
    method = Method.model_validate(name)
    parts = [method.sharing, method.objective, *method.terms, method.aggregator, method.server_step]
    entries = [part_entry(type(part), registry.dump(part)) for part in parts]
    return [entry for entry in entries if entry.options]


def _render(entry: Entry) -> RenderableType:
    """A table of an entry's options below its name, summary and place in a file."""
    kind = "" if entry.kind == "table" else f"{entry.kind} "
    head = _head(f"{kind}{entry.name}", entry.summary, _example(entry))
    if not entry.options:
        return Group(head, Text("It has no options.\n"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("option", no_wrap=True)
    for column in ("type and range", "default", "what it is"):
        table.add_column(column)
    for option in entry.options:
        table.add_row(*map(Text, (option.name, option.type, option.default, option.text)))
    return Group(head, table, Text())


def _example(entry: Entry) -> str:
    """The line by which a file names a table or a part."""
    if entry.kind == "table":
        return f"[{entry.where}]" if entry.where else "at the top of the file, before the first [table]"
    if entry.kind == "term":
        return f'{entry.where} = ["{entry.name}"]'
    return f'{entry.where}.name = "{entry.name}"'


def _head(name: str, text: str, example: str) -> Text:
    return Text.assemble((name, "bold"), f": {text}\n", (f"in a file: {example}", "dim"))
