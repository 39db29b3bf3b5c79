"""The description of runs on the page: text, settings, data sources, and the commands that repeat them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.core import registry
from fedblend.core.errors import FedblendError, counted
from fedblend.experiment import presets
from fedblend.runs.directory import CONFIG, OWN_DATA
from fedblend.runs.groups import NOT_COMPARED, Group, Outcome, differing_fields, flatten
from fedblend.runs.summary import NOTHING


@dataclass(frozen=True)
class RunDescription:
    """The description of the runs on one data set."""

    title: str
    """The names of the experiments."""
    tiles: list[tuple[str, str]]
    """Numbers, each with the thing that it counts."""
    short: str
    """The experiment in one line."""
    text: str
    """The experiment as a paragraph."""
    presets: list[tuple[str, str]]
    shared: list[tuple[str, str]]
    """Fields with one value in all runs, with that value."""
    differs: list[tuple[str, list[str]]]
    """The other fields, with a value for each method."""
    sources: list[tuple[str, str]]
    """Data sources and checksums, the scale of inputs, versions."""
    commands: list[str]
    """Commands that repeat the runs: those that were given, or else one for each method."""
    commands_by_method: list[str]
    """A command for each method, where ``commands`` are those that were given; else empty."""


def describe_runs(groups: Sequence[Group]) -> RunDescription:
    """The description of runs, from their configurations and facts."""
    outcomes = [o for g in groups for o in g.outcomes]
    configs = [flatten(g.config) for g in groups]
    apart = differing_fields([g.config for g in groups])
    first, *others = (flatten(o.config) for o in outcomes)
    alike = {f: v for f, v in first.items() if all(other.get(f) == v for other in others)}
    commands = list(dict.fromkeys(o.facts["command"] for o in outcomes if o.facts.get("command")))
    by_method = [rerun_command(g) for g in groups]
    known, names = presets.presets(), dict.fromkeys(str(g.config["method"]["name"]) for g in groups)
    return RunDescription(
        title=_values_text(o.config.get("name", "") for o in outcomes),
        tiles=_tiles(groups, outcomes),
        short=_short(outcomes),
        text=" ".join([_data(groups, outcomes), _split(outcomes), _training(outcomes), _rounds(outcomes)]),
        presets=[(name, known[name][0]) for name in names if name in known],
        shared=[(f, setting_text(v)) for f, v in alike.items() if f not in apart and f not in NOT_COMPARED],
        differs=[(f, [setting_text(config.get(f)) for config in configs]) for f in apart],
        sources=_sources(outcomes),
        commands=commands or by_method,
        commands_by_method=by_method if commands else [],
    )


def setting_text(value: Any) -> str:
    """A setting's value as in an experiment file; a dash for a missing one.

    >>> setting_text(True), setting_text(0.001), setting_text("mean"), setting_text(None), setting_text([])
    ('true', '0.001', 'mean', '—', '[]')
    """
    if value is None:
        return NOTHING
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def rerun_command(g: Group) -> str:
    """The command that repeats a group's runs from the configuration in its first run's folder."""
    path = shlex.quote(str(g.outcomes[0].path / CONFIG))
    if g.outcomes[0].facts.get("partition", {}).get("rule") == OWN_DATA:
        return f"fedblend federation app {path} --out app --folder run  # and, with the same sites: flwr run app NAME"
    return f"fedblend run {path} --seeds {','.join(str(o.seed) for o in g.outcomes)}"


def _values_text(values: Iterable[Any]) -> str:
    return " / ".join(dict.fromkeys(setting_text(value) for value in values))


def _counts_text(values: Iterable[int | None]) -> str:
    return " / ".join(dict.fromkeys(NOTHING if v is None else f"{v:,}" for v in values))


def _field(outcomes: Sequence[Outcome], path: str) -> str:
    return _values_text(flatten(o.config).get(path) for o in outcomes)


def _facts(outcomes: Sequence[Outcome], *path: str) -> list[Any]:
    values: list[Any] = [o.facts for o in outcomes]
    for step in path:
        values = [v[step] for v in values if isinstance(v, Mapping) and v.get(step) is not None]
    return values


def _tiles(groups: Sequence[Group], outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    seeds = len({o.seed for o in outcomes})
    tiles = [
        *_counted(groups),
        (str(seeds), "seed" if seeds == 1 else "seeds"),
        (_counts_text(_facts(outcomes, "clients", "number")), "clients"),
        (_field(outcomes, "train.cohort"), f"clients a round{_chosen(outcomes)}"),
        (_counts_text(o.rounds for o in outcomes), "rounds"),
        (_counts_text(_facts(outcomes, "model", "parameters")), "model weights"),
    ]
    return [(number, word) for number, word in tiles if number]


def _chosen(outcomes: Sequence[Outcome]) -> str:
    names = dict.fromkeys(o.config.get("selection", {}).get("name", "uniform") for o in outcomes)
    return "" if [*names] == ["uniform"] else f", chosen by {', '.join(names)}"


def _counted(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """The number of methods, and of configurations (options, learning rates, ...) if these are more."""
    methods, configurations = len({_method(g) for g in groups}), len(groups)
    counts = [(str(methods), "method" if methods == 1 else "methods")]
    return counts if methods == configurations else [*counts, (str(configurations), "configurations")]


def _method(g: Group) -> tuple[str, ...]:
    """The name of a method and of its parts, which identify it; their options make a configuration."""
    table = g.config["method"]
    parts = [part for value in table.values() for part in (value if isinstance(value, list) else [value])]
    return (str(table["name"]), *(str(part["name"]) for part in parts if isinstance(part, Mapping)))


def _short(outcomes: Sequence[Outcome]) -> str:
    data = _values_text(_facts(outcomes, "data", "name")) or _field(outcomes, "data.name")
    clients = _counts_text(_facts(outcomes, "clients", "number"))
    return (
        f"{data}, {clients} clients by '{_field(outcomes, 'partition.name')}', {_field(outcomes, 'train.cohort')} "
        f"a round, {_field(outcomes, 'model.name')}"
    )


def _data(groups: Sequence[Group], outcomes: Sequence[Outcome]) -> str:
    methods = " in ".join(f"{number} {word}" for number, word in _counted(groups))
    seeds = sorted({o.seed for o in outcomes})
    data = _values_text(_facts(outcomes, "data", "name")) or _field(outcomes, "data.name")
    text = f"{counted(len(outcomes), 'run')} of {methods} (seed{'' if len(seeds) == 1 else 's'} "
    text += f"{', '.join(map(str, seeds))}) on the data set {data}"
    train, test = (_counts_text(_facts(outcomes, "data", half)) for half in ("train", "test"))
    if train and test:
        shape = _values_text(_sample(data) for data in _facts(outcomes, "data"))
        classes = _values_text(len(c) for c in _facts(outcomes, "data", "classes"))
        labels = _values_text(len(data.get("labels", ())) for data in _facts(outcomes, "data"))
        kind = f"{classes} classes" if classes != "0" else "regression" if labels == "0" else f"{labels} labels"
        text += f": {train} training samples and {test} test samples ({shape}; {kind})"
    return text + "."


def _sample(data: Mapping[str, Any]) -> str:
    """The shape of a sample in words: ``images of 1 by 28 by 28``."""
    shape = " by ".join(map(str, data.get("shape", [])))
    words = {"image": f"images of {shape}", "text": f"texts of {shape} characters", "tokens": f"{shape} tokens"}
    return words.get(str(data.get("kind")), f"{shape} features")


def _split(outcomes: Sequence[Outcome]) -> str:
    options = {
        f.removeprefix("partition."): _field(outcomes, f)
        for f in dict.fromkeys(f for o in outcomes for f in flatten(o.config))
        if f.startswith("partition.") and f not in ("partition.name", "partition.clients")
    }
    how = ", ".join(f"{name} = {value}" for name, value in options.items())
    number = _counts_text(_facts(outcomes, "clients", "number")) or NOTHING
    if OWN_DATA in _facts(outcomes, "partition", "rule"):
        text = f"These are the server's; the clients are {number} sites with data of their own"
    else:
        text = f"The samples are split over {number} clients by '{_field(outcomes, 'partition.name')}'"
        text += f" ({how})" if how else ""
    low, high = _facts(outcomes, "clients", "smallest"), _facts(outcomes, "clients", "largest")
    if low and high:
        span = " to ".join(dict.fromkeys([f"{min(low):,}", f"{max(high):,}"]))
        text += f", each with {span} training samples"
    kept = any(o.config.get("fraction", 1) != 1 for o in outcomes)
    notes = [f"after a fraction of {_field(outcomes, 'fraction')} was kept"] * kept
    if any(o.config.get("holdout") for o in outcomes):
        notes.append(f"besides a share of {_field(outcomes, 'holdout')} that is held out for testing")
    places = {"clients": "of each client's samples", "server": "of the training samples, at the server,"}
    for where, words in places.items():
        if any(flatten(o.config).get(f"validation.{where}") for o in outcomes):
            notes.append(f"besides a share of {_field(outcomes, f'validation.{where}')} {words} that is for validation")
    return text + (f" {' and '.join(notes)}" if notes else "") + "."


ADDITIONS = {
    "schedule_in_round.name": "within the round with the schedule",
    "momentum": "momentum",
    "weight_decay": "weight decay",
    "clip_norm": "gradients clipped to",
}
"""Fields of local training that the text names where they are set."""


def _training(outcomes: Sequence[Outcome]) -> str:
    def field(name: str) -> str:
        return _field(outcomes, f"train.{name}")

    idle = [o for o in outcomes if o.config["method"]["upload"]["name"] == "nothing"]
    if len(idle) == len(outcomes):
        return f"No client trains. The server trains the model '{_field(outcomes, 'model.name')}'."
    one = field("cohort") == "1"
    schedules = {str(flatten(o.config).get("train.schedule.name", "")) for o in outcomes}
    rate = f"{field('lr')} times {field('lr_decay')}^(round - 1)"
    if schedules != {""}:
        rate = f"{field('lr')} with the schedule {field('schedule.name')} over rounds"
    names = dict.fromkeys(_optimizer(o.config) for o in outcomes)
    text = (
        f"{'Where clients train, in' if idle else 'In'} every round {field('cohort')} "
        f"{'client trains' if one else 'clients train'} the model "
        f"'{_field(outcomes, 'model.name')}' for {_length(outcomes)} on batches of {field('batch_size')} by "
        f"{' or '.join(names)} at a learning rate of {rate}"
    )
    extra = [
        f"{words} {field(name)}"
        for name, words in ADDITIONS.items()
        if any(flatten(o.config).get(f"train.{name}") for o in outcomes)
    ]
    augments = dict.fromkeys(" and ".join(a["name"] for a in o.config["train"].get("augment", ())) for o in outcomes)
    if list(augments) != [""]:
        extra.append(f"pictures augmented by {' or '.join(names or 'nothing' for names in augments)}")
    if any(o.config["train"].get("accumulate", 1) > 1 for o in outcomes):
        extra.append(f"gradients of {field('accumulate')} batches accumulated")
    if any(o.config["train"].get("last_batch", "keep") != "keep" for o in outcomes):
        extra.append(f"smaller last batches: {field('last_batch')}")
    if any(o.config["train"].get("optimizer_state") == "keep" for o in outcomes):
        extra.append("each client keeps its optimizer's state")
    return text + (f" ({', '.join(extra)})" if extra else "") + "."


def _length(outcomes: Sequence[Outcome]) -> str:
    """How long clients train in a round: epochs, or steps where these are given."""
    tables = [o.config["train"] for o in outcomes]
    lengths = [(t["steps"], "step") if t.get("steps") else (t["epochs"], "local epoch") for t in tables]
    return " or ".join(counted(number, what) for number, what in dict.fromkeys(lengths))


def _optimizer(config: Mapping[str, Any]) -> str:
    """The name of the clients' optimiser; runs before there was a choice have SGD."""
    optimizer = config["train"].get("optimizer", {})
    names = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
    return names.get(optimizer.get("name", "sgd"), str(optimizer.get("path", optimizer.get("name"))))


def _evaluated_model(config: Mapping[str, Any]) -> str:
    default = "device" if config["method"].get("stateful_clients") else "server"
    with contextlib.suppress(FedblendError):  # a part of the user's, whose code is not imported here
        if registry.build("personal", config["method"].get("personal", "none")).keeps == "layers":
            default = "each"
    names = {"server": "the server's model", "device": "one device's model", "each": "each client's model"}
    return names[config.get("evaluate_model") or default]


def _rounds(outcomes: Sequence[Outcome]) -> str:
    every = _field(outcomes, "eval_every")
    when = "after every round" if every == "1" else f"every {every} rounds"
    models = list(dict.fromkeys(_evaluated_model(o.config) for o in outcomes))
    text = f"{' or '.join(models)} is tested {when}, {_counts_text(o.rounds for o in outcomes)} rounds in total."
    text = text[0].upper() + text[1:]
    return text + f" Inputs are on the scale '{_field(outcomes, 'scale.name')}'."


def _sources(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    rows: dict[tuple[str, str], None] = {}
    for o in outcomes:
        data = o.facts.get("data", {})
        pairs = [("source of the data", data.get("source")), ("notes on the data", data.get("notes"))]
        pairs += [(f"SHA-256 of {name}", digest) for name, digest in data.get("files", {}).items()]
        pairs += [(f"scale: {name}", _brief(v)) for name, v in o.facts.get("scale", {}).items()]
        pairs += [(f"split: {name}", _brief(v)) for name, v in o.facts.get("partition", {}).items()]
        pairs += [(f"version of {name}", v) for name, v in o.facts.get("versions", {}).items()]
        pairs += [(f"machine: {name}", v) for name, v in o.facts.get("machine", {}).items()]
        rows |= {(name, setting_text(value)): None for name, value in pairs if value not in (None, "")}
    return list(rows)


def _brief(value: Any) -> str:
    """A value as text, with at most twelve items of a list."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 12:
        return f"[{', '.join(map(str, value[:12]))}, ... {len(value)} items]"
    return setting_text(value)
