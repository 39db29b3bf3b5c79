"""Runs as their folders tell them, and which of them are one experiment with several seeds."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError
from fedblend.experiment.tables import read_toml
from fedblend.runs.directory import CONFIG, METRICS, RunDirectory

NOT_COMPARED = ("seed", "name", "checkpoint_every")
"""Fields in which two runs may differ and still be one experiment repeated."""

MAX_FIELDS_IN_NAME = 2
"""Up to so many differing fields tell two experiments apart by name; of more, the folder does."""


@dataclass(frozen=True)
class Outcome:
    """One run: its resolved configuration as plain data, its metrics, how it stands, and its facts.

    The configuration is not built into an :class:`~fedblend.experiment.config.Experiment`, so that a run can be
    read where a part of the user's own cannot be imported, and without PyTorch.
    """

    path: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    status: dict[str, Any]
    facts: dict[str, Any]

    @property
    def label(self) -> str:
        """What tables and figures call the method."""
        method = self.config["method"]
        return str(method.get("label") or method["name"])

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def rounds(self) -> int:
        """How many rounds the run was to make."""
        return int(self.config["rounds"])

    @property
    def round(self) -> int:
        """The last round of which there is a record; 0 before any."""
        return int(self.records[-1]["round"]) if self.records else 0

    @property
    def finished(self) -> bool:
        """Whether all rounds were made and recorded, or all until training converged or a callback ended the run."""
        if self.status.get("state") != "done" or not self.records:
            return False
        ended = str(self.status.get("reason", "")).startswith("ended by ")
        return self.round >= self.rounds or bool(self.records[-1].get("converged")) or ended

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The records of rounds in which the model was evaluated."""
        return [record for record in self.records if "loss" in record]

    @property
    def state(self) -> str:
        """``done``, ``running``, ``stopped``, ``failed``, ``killed`` or ``incomplete``."""
        if self.finished:
            return "done"
        # A run marked done whose metrics end early was cut by hand or by a damaged disk.
        return str(self.status["state"]).replace("done", "incomplete")

    @property
    def status_text(self) -> str:
        """``done``, or how far the run came: ``stopped at round 3 of 8 (interrupted)``."""
        if self.finished:
            return "done"
        if self.state == "killed":
            # Nobody was left to say how it goes on.
            place = f"at round {self.round} of {self.rounds}" if self.records else "before anything was recorded"
            return f"killed {place}; go on with: fedblend resume {shlex.quote(str(self.path))}"
        reason = f" ({self.status['reason']})" if self.status.get("reason") else ""
        return f"{self.progress_text}{reason}"

    @property
    def progress_text(self) -> str:
        """How far the run came, without the reason: ``stopped at round 3 of 8``."""
        return f"{self.state} at round {self.round} of {self.rounds}"

    @property
    def never_trained(self) -> bool:
        """Whether the run failed in its first round: what was evaluated is then the untrained model."""
        return self.state == "failed" and self.round == 0

    @property
    def data(self) -> str:
        """What the data set is called."""
        return str(self.facts.get("data", {}).get("name", self.config["data"]["name"]))

    @property
    def only_class(self) -> str | None:
        """The class of all samples, where the data set has just one: every model is then right."""
        classes = self.facts.get("data", {}).get("classes", [])
        return str(classes[0]) if len(classes) == 1 else None


@dataclass(frozen=True)
class Group:
    """Runs of one experiment that differ in their seed, under the name that tells them from the others."""

    name: str
    outcomes: list[Outcome]

    @property
    def counted(self) -> list[Outcome]:
        """The runs that averages are made of: the finished ones, or all where none is finished."""
        return [o for o in self.outcomes if o.finished] or self.outcomes

    @property
    def unfinished(self) -> list[Outcome]:
        """The runs that have not come to their end."""
        return [o for o in self.outcomes if not o.finished]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the first run."""
        return self.outcomes[0].config


def read(run: RunDirectory) -> Outcome:
    """A run from its folder. Raises :class:`FedblendError` if the folder is no run, or is damaged."""
    if not RunDirectory.is_run(run.path):
        raise FedblendError(f"{run.path}: is not a run directory (it has no {CONFIG})")
    config = read_toml(run.path / CONFIG)
    for field, kind in (("method", Mapping), ("seed", int), ("rounds", int), ("data", Mapping)):
        if not isinstance(config.get(field), kind):
            raise FedblendError(
                f"{run.path / CONFIG}: {field}: {config.get(field)!r} is not valid; a run directory holds the "
                "full configuration that fedblend wrote"
            )
    records, status = run.metrics(), run.status()
    if status["state"] == "done" and not records:
        raise FedblendError(f"{run.path / METRICS}: is missing or empty, though the run is done; put it back")
    return Outcome(run.path, config, records, status, run.facts())


def group(runs: Iterable[RunDirectory]) -> list[Group]:
    """Runs grouped by method label and configuration but for the seed, in order of first appearance.

    The same folder given twice counts once. Where one label stands for several configurations, the
    groups' names say in which fields they differ, or in which folder they lie.
    """
    return _make_groups(_read_all(runs))


def by_data(runs: Iterable[RunDirectory]) -> dict[str, list[Group]]:
    """As :func:`group`, but for each data set apart, by its name: results on different data do not compare.

    Data sets are told apart by what the runs' facts say of their samples and classes. Of several under one
    name, the later ones are numbered.
    """
    apart: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in _read_all(runs):
        apart[_data_key(outcome)].append(outcome)
    named: dict[str, list[Group]] = {}
    times: Counter[str] = Counter()
    for outcomes in apart.values():
        name = outcomes[0].data
        times[name] += 1
        named[name if times[name] == 1 else f"{name} ({times[name]})"] = _make_groups(outcomes)
    return named


def _read_all(runs: Iterable[RunDirectory]) -> list[Outcome]:
    unique = {run.path.resolve(): run for run in runs}
    return [read(run) for run in unique.values()]


def _data_key(outcome: Outcome) -> str:
    """What two runs must have in common to be on one data set; not the paths, which differ between machines."""
    facts = outcome.facts.get("data", {})
    told = {name: facts[name] for name in ("name", "kind", "train", "test", "shape", "classes") if name in facts}
    return json.dumps(told or outcome.config["data"], sort_keys=True, default=str)


def _make_groups(outcomes: Iterable[Outcome]) -> list[Group]:
    by_key: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_key[outcome.label, _fingerprint(outcome.config)].append(outcome)
    made = [part for outcomes in by_key.values() for part in _split_repeated_seeds(outcomes)]
    by_label: dict[str, list[list[Outcome]]] = defaultdict(list)
    for outcomes in made:
        by_label[outcomes[0].label].append(outcomes)
    names = {
        id(outcomes): name
        for alike in by_label.values()
        for outcomes, name in zip(alike, _group_names(alike), strict=True)
    }
    return [Group(names[id(o)], sorted(o, key=lambda one: one.seed)) for o in made]


def flatten(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as ``a.b.c`` -> value; lists stay whole.

    >>> flatten({"train": {"lr": 0.1}, "terms": [1]})
    {'train.lr': 0.1, 'terms': [1]}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{before}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def differing_fields(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields that are not the same in all configurations, but for those that are never compared."""
    flat = [flatten(config) for config in configs]
    fields = dict.fromkeys(field for one in flat for field in one)
    return [f for f in fields if f not in NOT_COMPARED and any(one.get(f) != flat[0].get(f) for one in flat)]


def _fingerprint(config: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in config.items() if k not in NOT_COMPARED}, sort_keys=True, default=str)


def _split_repeated_seeds(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """One list, or one a folder where a seed occurs twice: a run made twice is not two seeds."""
    if len({o.seed for o in outcomes}) == len(outcomes):
        return [outcomes]
    by_folder: dict[Path, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_folder[outcome.path.resolve().parent].append(outcome)
    return [
        part
        for inside in by_folder.values()
        for part in ([inside] if len({o.seed for o in inside}) == len(inside) else [[o] for o in inside])
    ]


def _group_names(alike: list[list[Outcome]]) -> list[str]:
    """A name for each group of one label."""
    label = alike[0][0].label
    if len(alike) == 1:
        return [label]
    fields = differing_fields([outcomes[0].config for outcomes in alike])
    flat = [flatten(outcomes[0].config) for outcomes in alike]
    by_fields = [", ".join(f"{f.split('.')[-1]}={one.get(f)}" for f in fields) for one in flat]
    by_parent = [outcomes[0].path.resolve().parent.name for outcomes in alike]
    by_path = [str(outcomes[0].path) for outcomes in alike]
    wanted = [by_fields, by_parent, by_path] if len(fields) <= MAX_FIELDS_IN_NAME else [by_parent, by_path]
    chosen = next((words for words in wanted if len(set(words)) == len(words)), by_path)
    return [f"{label} ({word})" for word in chosen]
