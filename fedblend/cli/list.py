"""``fedblend list``: print overviews of methods and parts, or the options of one name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedblend.cli.console import Console
from fedblend.core.errors import FedblendError, brief, did_you_mean
from fedblend.core.paths import import_from
from fedblend.experiment import presets
from fedblend.experiment.index import Entry, index

LISTS = {"methods": None, "parts": None, "datasets": "dataset", "models": "model", "partitions": "partition"}
"""The overviews, and the kind of parts of each; ``None`` where an overview has no single kind."""

COSTS = (
    "sends: what leaves a client, in each of its rounds or once. traffic: models up and down in a round; FedAvg's one "
    "up and one down are 1x. All other data are extra; their bytes depend on the data, and every run counts them.\n"
    "Which of these help on which data, and at which price: docs/which-blend.md, and fedblend advise FILE."
)

METHOD_PARTS = ("sharing", "objective", "term", "personal", "aggregator", "server_step")


def show_list(word: str | None = None) -> None:
    """Print all words that can be listed, an overview of one, or the options of a table, a kind, a part or a method."""
    if word is None:
        Console().print(_contents())
    else:
        Console().print(_overview(word) if word in LISTS else Group(*_details(word)))


def _contents() -> RenderableType:
    kinds = {kind: len(parts) for kind, parts in index().parts.items()}
    counts = {word: kinds[kind] for word, kind in LISTS.items() if kind}
    counts |= {"methods": len(presets.presets()), "parts": sum(kinds.values())}
    table = _table("fedblend list ...")
    table.add_column("how many", justify="right")
    table.add_column("of each kind")
    for word in LISTS:
        of_kinds = ", ".join(f"{kind} {number}" for kind, number in kinds.items()) if word == "parts" else ""
        table.add_row(word, str(counts[word]), of_kinds)
    names = ", ".join(index().tables)
    return Group(
        table, Text(f"\nWith any other name its options are listed: a table ({names}), a kind, a method, or a part.")
    )


def _methods() -> RenderableType:
    """Five methods to start with, then all by family, with what each sends and costs; of FedProx's the names."""
    families = presets.families()
    *described, named = families
    width = max(len(name) for family in described for name in families[family])
    everything = presets.presets()
    lists = {"To start with": {name: everything[name] for name in presets.START}}
    lists |= {family: families[family] for family in described}
    sections: list[RenderableType] = []
    for family, methods in lists.items():
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, min_width=width)
        table.add_column()
        for name, (text, _) in methods.items():
            facts = index().methods[name]
            shown = f"sends {', '.join(facts.leaves) or 'nothing'}; {', '.join(facts.costs)}"
            table.add_row(name, Text.assemble(text, "\n", (shown, "dim")))
        sections += [Text(family, "bold"), table, Text()]
    head = Text.assemble((named, "bold"), " (each sends and costs what it does without)")
    return Group(*sections, head, *map(Text, families[named]), Text(f"\n{COSTS}"))


def _overview(word: str) -> RenderableType:
    if word == "methods":
        return _methods()
    table = _table("kind", "name")
    for column in ("options", "what it is"):
        table.add_column(column)
    kind, parts = LISTS[word], index().parts
    for entry in (entry for one in ([kind] if kind else parts) for entry in parts[one].values()):
        table.add_row(entry.kind, entry.name, ", ".join(o.name for o in entry.options), Text(entry.summary))
    return table


def _details(word: str) -> list[RenderableType]:
    """All entries of a word, which may name a method and parts of several kinds."""
    if ":" in word:
        return [_render(_own_part(word))]
    tables, parts = index().tables, index().parts
    entries = [*([tables[word]] if word in tables else []), *parts.get(word, {}).values()]
    sections: list[RenderableType] = []
    if word in presets.presets():
        own = _parts_of_method(word)
        sections = [_head(f"method {word}", presets.presets()[word][0], f'method = "{word}"'), *map(_render, own)]
        entries += [entry for entry in _named(word) if (entry.kind, entry.name) not in {(e.kind, e.name) for e in own}]
    else:
        entries += _named(word)
    sections += map(_render, entries)
    if not sections:
        words = [*LISTS, *tables, *parts, *presets.presets(), *(name for kind in parts.values() for name in kind)]
        meant = did_you_mean(word, words)
        valid = f"; valid: {', '.join(LISTS)}, or the name of a table, a kind, a method or a part: fedblend list"
        raise FedblendError(f"list: {brief(word)} is not valid{meant or valid}")
    return sections


def _own_part(path: str) -> Entry:
    """The entry of a user's part, ``module:Class``; the module is installed, or in the current folder."""
    # These import PyTorch.
    from fedblend.core import registry
    from fedblend.experiment.options import part_entry

    import_from([os.getcwd()])
    cls = registry.import_path(path, "list")
    if getattr(cls, "kind", None) not in registry.MODULES:
        raise FedblendError(f"list: '{path}' is not a part; declare it with @part(KIND, NAME)")
    # A file must name the part by this path, not by its registered name.
    return replace(part_entry(cls), name=path)


def _named(name: str) -> list[Entry]:
    return [parts[name] for parts in index().parts.values() if name in parts]


def _parts_of_method(name: str) -> list[Entry]:
    given = presets.expand({"name": name})
    defaults = {option.name: option.default for option in index().tables["method"].options}
    entries = []
    for kind in METHOD_PARTS:
        parts = index().parts[kind]
        field = next(iter(parts.values())).where.removeprefix("method.")
        specs = given.get(field, json.loads(defaults[field]))
        for spec in specs if isinstance(specs, list) else [specs]:
            values = spec if isinstance(spec, Mapping) else {"name": spec}
            part = parts[values["name"]]
            options = [replace(o, default=json.dumps(values[o.name])) if o.name in values else o for o in part.options]
            entries.append(replace(part, options=tuple(options)))
    return [entry for entry in entries if entry.options]


def _render(entry: Entry) -> RenderableType:
    kind = "" if entry.kind == "table" else f"{entry.kind} "
    head = _head(f"{kind}{entry.name}", entry.summary, _example(entry))
    if not entry.options:
        return Group(head, Text("It has no options.\n"))
    table = _table("option")
    for column in ("type and range", "default", "what it is"):
        table.add_column(column)
    for option in entry.options:
        table.add_row(*map(Text, (option.name, option.type, option.default, option.text)))
    return Group(head, table, Text())


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _example(entry: Entry) -> str:
    if entry.kind == "table":
        return f"[{entry.where}]" if entry.where else "at the top of the file, before the first [table]"
    if entry.kind == "term":
        return f'{entry.where} = ["{entry.name}"]'
    return f'{entry.where}.name = "{entry.name}"'


def _head(name: str, text: str, example: str) -> Text:
    return Text.assemble((name, "bold"), f": {text}\n", (f"in a file: {example}", "dim"))
