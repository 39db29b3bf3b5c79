"""What was run, in words, and which settings the runs share."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.experiment import presets as methods
from fedblend.runs.directory import CONFIG
from fedblend.runs.groups import NOT_COMPARED, Group, Outcome, differing, flatten
from fedblend.runs.summary import NOTHING


@dataclass(frozen=True)
class Settings:
    """All that the page says about how runs were made.

    ``tiles`` are (number, what it counts); ``text`` is the paragraph; ``described`` says what each preset
    is; ``shared`` are the fields that all runs have in common, ``differs`` the others, a value a method;
    ``commands`` repeat the runs, and ``singly`` one method at a time where ``commands`` are as they were given.
    """

    title: str
    tiles: list[tuple[str, str]]
    short: str
    text: str
    described: list[tuple[str, str]]
    shared: list[tuple[str, str]]
    differs: list[tuple[str, list[str]]]
    sources: list[tuple[str, str]]
    commands: list[str]
    singly: list[str]


def settings(groups: Sequence[Group]) -> Settings:
    """What was run, from the runs' configurations and facts."""
    outcomes = [o for g in groups for o in g.outcomes]
    configs = [flatten(g.config) for g in groups]
    apart = differing([g.config for g in groups])
    first = flatten(outcomes[0].config)
    given = list(dict.fromkeys(o.facts["command"] for o in outcomes if o.facts.get("command")))
    own = [command(g) for g in groups]
    return Settings(
        title=_either(o.config.get("name", "") for o in outcomes),
        tiles=_tiles(groups, outcomes),
        short=_short(outcomes),
        text=" ".join([_data(groups, outcomes), _split(outcomes), _training(outcomes), _rounds(outcomes)]),
        described=_described(groups),
        shared=[(f, show(v)) for f, v in first.items() if f not in apart and f not in NOT_COMPARED],
        differs=[(f, [show(one.get(f)) for one in configs]) for f in apart],
        sources=_sources(outcomes),
        commands=given or own,
        singly=own if given else [],
    )


def show(value: Any) -> str:
    """A setting's value as it stands in an experiment file; a missing one as a dash.

    >>> show(True), show(0.001), show("mean"), show(None), show([])
    ('true', '0.001', 'mean', '—', '[]')
    """
    if value is None:
        return NOTHING
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def command(g: Group) -> str:
    """The command that repeats a group's runs from the configuration that its first run kept."""
    path = shlex.quote(str(g.outcomes[0].path / CONFIG))
    return f"fedblend run {path} --seeds {','.join(str(o.seed) for o in g.outcomes)}"


def _either(values: Iterable[Any]) -> str:
    """The value that all have, or the different ones side by side."""
    return " / ".join(dict.fromkeys(show(value) for value in values))


def _number(values: Iterable[int | None]) -> str:
    return " / ".join(dict.fromkeys(NOTHING if v is None else f"{v:,}" for v in values))


def _field(outcomes: Sequence[Outcome], path: str) -> str:
    return _either(flatten(o.config).get(path) for o in outcomes)


def _facts(outcomes: Sequence[Outcome], *path: str) -> list[Any]:
    """One fact of every run that has it."""
    values: list[Any] = [o.facts for o in outcomes]
    for step in path:
        values = [v[step] for v in values if isinstance(v, Mapping) and v.get(step) is not None]
    return values


def _tiles(groups: Sequence[Group], outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    seeds = sorted({o.seed for o in outcomes})
    tiles = [
        *_counted(groups),
        (str(len(seeds)), "seed" if len(seeds) == 1 else "seeds"),
        (_number(_facts(outcomes, "clients", "number")), "clients"),
        (_field(outcomes, "train.cohort"), "clients a round"),
        (_number(o.rounds for o in outcomes), "rounds"),
        (_number(_facts(outcomes, "model", "parameters")), "model weights"),
    ]
    return [(number, word) for number, word in tiles if number]


def _counted(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """How many methods there are, and in how many configurations (options, learning rates, ...) if these are more."""
    methods, configurations = len({_method(g) for g in groups}), len(groups)
    counts = [(str(methods), "method" if methods == 1 else "methods")]
    return counts if methods == configurations else [*counts, (str(configurations), "configurations")]


def _method(g: Group) -> tuple[str, ...]:
    """A method is one by its name and the names of its parts; their options make a configuration."""
    table = g.config["method"]
    parts = [part for value in table.values() for part in (value if isinstance(value, list) else [value])]
    return (str(table["name"]), *(str(part["name"]) for part in parts if isinstance(part, Mapping)))


def _short(outcomes: Sequence[Outcome]) -> str:
    """The experiment in one line."""
    data = _either(_facts(outcomes, "data", "name")) or _field(outcomes, "data.name")
    clients = _number(_facts(outcomes, "clients", "number"))
    return (
        f"{data}, {clients} clients by '{_field(outcomes, 'partition.name')}', {_field(outcomes, 'train.cohort')} "
        f"a round, {_field(outcomes, 'model.name')}"
    )


def _data(groups: Sequence[Group], outcomes: Sequence[Outcome]) -> str:
    runs = f"{len(outcomes)} run{'' if len(outcomes) == 1 else 's'}"
    counted = " in ".join(f"{number} {word}" for number, word in _counted(groups))
    seeds = sorted({o.seed for o in outcomes})
    of_seeds = f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
    text = f"{runs} of {counted} ({of_seeds})"
    text += f" on the data set {_either(_facts(outcomes, 'data', 'name')) or _field(outcomes, 'data.name')}"
    train, test = (_number(_facts(outcomes, "data", half)) for half in ("train", "test"))
    if train and test:
        shape = _either(_sample(data) for data in _facts(outcomes, "data"))
        classes = _either(len(c) for c in _facts(outcomes, "data", "classes"))
        kind = "regression" if classes == "0" else f"{classes} classes"
        text += f": {train} samples to train on and {test} to test on ({shape}; {kind})"
    return text + "."


def _sample(data: Mapping[str, Any]) -> str:
    """What one sample is: ``images of 1 by 28 by 28``."""
    shape = " by ".join(map(str, data.get("shape", [])))
    return {"image": f"images of {shape}", "text": f"texts of {shape} characters"}.get(
        str(data.get("kind")), f"{shape} features"
    )


def _split(outcomes: Sequence[Outcome]) -> str:
    options = {
        f.removeprefix("partition."): _field(outcomes, f)
        for f in dict.fromkeys(f for o in outcomes for f in flatten(o.config))
        if f.startswith("partition.") and f not in ("partition.name", "partition.clients")
    }
    how = ", ".join(f"{name} = {value}" for name, value in options.items())
    number = _number(_facts(outcomes, "clients", "number")) or NOTHING
    text = f"They are split over {number} clients by '{_field(outcomes, 'partition.name')}'{f' ({how})' if how else ''}"
    low, high = _facts(outcomes, "clients", "smallest"), _facts(outcomes, "clients", "largest")
    if low and high:
        text += f", each with {_span(min(low), max(high))} training samples"
    notes = []
    if any(flatten(o.config).get("fraction", 1) != 1 for o in outcomes):
        notes.append(f"after a fraction of {_field(outcomes, 'fraction')} was kept")
    if any(o.config.get("holdout") for o in outcomes):
        notes.append(f"besides a share of {_field(outcomes, 'holdout')} that it holds out to test on")
    return text + (f" {' and '.join(notes)}" if notes else "") + "."


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _training(outcomes: Sequence[Outcome]) -> str:
    def of(name: str) -> str:
        return _field(outcomes, f"train.{name}")

    idle = [o for o in outcomes if o.config["method"]["upload"]["name"] == "nothing"]
    if len(idle) == len(outcomes):
        return f"No client trains; the server does, the model '{_field(outcomes, 'model.name')}'."
    one = of("cohort") == "1"
    text = (
        f"{'Where clients train, in' if idle else 'In'} every round {of('cohort')} "
        f"{'client trains' if one else 'clients train'} the model "
        f"'{_field(outcomes, 'model.name')}' for {of('epochs')} local epoch{'' if of('epochs') == '1' else 's'} on "
        f"batches of {of('batch_size')} by SGD at a learning rate of {of('lr')} times {of('lr_decay')}^round"
    )
    extra = []
    for name, words in (
        ("momentum", "momentum"),
        ("weight_decay", "weight decay"),
        ("clip_norm", "gradients clipped to"),
    ):
        if any(flatten(o.config).get(f"train.{name}") for o in outcomes):
            extra.append(f"{words} {of(name)}")
    return text + (f" ({', '.join(extra)})" if extra else "") + "."


def _judged(config: Mapping[str, Any]) -> str:
    """Whose model is tested."""
    evaluate_model = config.get("evaluate_model") or (
        "device" if config["method"].get("stateful_clients") else "server"
    )
    return {"server": "the server's model", "device": "one device's model", "each": "each client's model"}[
        evaluate_model
    ]


def _rounds(outcomes: Sequence[Outcome]) -> str:
    every = _field(outcomes, "eval_every")
    when = "after every round" if every == "1" else f"every {every} rounds"
    whose = list(dict.fromkeys(_judged(o.config) for o in outcomes))
    text = f"{' or '.join(whose)} is tested {when}, {_number(o.rounds for o in outcomes)} rounds in all."
    text = text[0].upper() + text[1:]
    return text + f" Inputs are on the scale '{_field(outcomes, 'scale.name')}'."


def _described(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """What each preset is that a method is made from."""
    known = methods.presets()
    names = dict.fromkeys(str(g.config["method"]["name"]) for g in groups)
    return [(name, known[name][0]) for name in names if name in known]


def _sources(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Where data came from, their checksums, the scale in numbers, and versions."""
    rows: dict[tuple[str, str], None] = {}
    for o in outcomes:
        data = o.facts.get("data", {})
        pairs = [("source of the data", data.get("source")), ("notes on the data", data.get("notes"))]
        pairs += [(f"SHA-256 of {name}", digest) for name, digest in data.get("files", {}).items()]
        pairs += [(f"scale: {name}", _brief(v)) for name, v in o.facts.get("scale", {}).items()]
        pairs += [(f"split: {name}", _brief(v)) for name, v in o.facts.get("partition", {}).items()]
        pairs += [(f"version of {name}", v) for name, v in o.facts.get("versions", {}).items()]
        pairs += [(f"machine: {name}", v) for name, v in o.facts.get("machine", {}).items()]
        rows |= {(name, show(value)): None for name, value in pairs if value not in (None, "")}
    return list(rows)


def _brief(value: Any) -> str:
    """A value, with long lists cut short."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 12:
        return f"[{', '.join(map(str, value[:12]))}, ... {len(value)} in all]"
    return show(value)
