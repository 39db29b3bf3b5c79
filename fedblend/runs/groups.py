"""Outcomes of runs, read from their folders, and groups of runs that differ only in the seed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError, legible
from fedblend.core.record import RoundRecord
from fedblend.runs.directory import METRICS, OWN_DATA, RunDirectory, how_to_resume

NOT_COMPARED = ("seed", "name", "checkpoint_every")  # Fields that say nothing about a run's numbers

EXECUTION = ("engine", "stack", "ranks", "memory_format", "device", "cuda_graphs", "checkpoint_every", "min_uploads")
"""Fields that say how a run is executed. A resumed run may have others than the runs of its method's other seeds.

`callbacks` are not among them, because a callback may end a run.
"""

MAX_MISSING = 5  # Most clients whose missing uploads are told
MAX_FIELDS_IN_NAME = 2  # Largest number of differing fields in a group's name; beyond it, the name has the folder


@dataclass(frozen=True)
class Outcome:
    """One run, read from its folder.

    The configuration stays plain data, so that a run is readable without PyTorch and without user-defined parts.
    """

    path: Path
    config: dict[str, Any]
    records: list[RoundRecord]
    status: dict[str, Any]
    """State, round and reason, as :meth:`RunDirectory.status` returns them."""
    facts: dict[str, Any]

    @property
    def label(self) -> str:
        """The method's name in tables and figures."""
        method = self.config["method"]
        return str(method.get("label") or method["name"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def rounds(self) -> int:
        return int(self.config["rounds"])

    @property
    def round(self) -> int:
        """The last recorded round; 0 before any."""
        return self.records[-1].round if self.records else 0

    @property
    def finished(self) -> bool:
        """Whether all rounds are recorded, or all until training converged or a callback ended the run."""
        if self.status.get("state") != "done" or not self.records:
            return False
        ended = str(self.status.get("reason", "")).startswith("ended by ")
        return self.round >= self.rounds or bool(self.records[-1].converged) or ended

    @property
    def evaluated(self) -> list[RoundRecord]:
        """The records of rounds in which the model was evaluated."""
        return [record for record in self.records if record.evaluated]

    @property
    def state(self) -> str:
        """``done``, ``running``, ``stopped``, ``failed``, ``killed`` or ``incomplete``."""
        if self.finished:
            return "done"
        # The metrics of a run marked done end early if the file was edited or the disk damaged.
        return str(self.status["state"]).replace("done", "incomplete")

    @property
    def status_text(self) -> str:
        """``done``, or state, round and reason: ``stopped at round 3 of 8 (interrupted)``."""
        if self.finished:
            return "done"
        if self.state == "killed":
            # A killed process printed no command to resume.
            where = f"at round {self.round} of {self.rounds}" if self.records else "before anything was recorded"
            return f"killed {where}; go on with: {how_to_resume(self.path, self.facts)}"
        reason = f" ({self.status['reason']})" if self.status.get("reason") else ""
        return f"{self.progress_text}{reason}"

    @property
    def progress_text(self) -> str:
        """State and round without the reason: ``stopped at round 3 of 8``."""
        return f"{self.state} at round {self.round} of {self.rounds}"

    @property
    def missing_uploads(self) -> str:
        """Whose uploads were refused or did not arrive, in how many of the client's rounds, and why the last time."""
        partition = self.facts.get("partition", {})
        names, reasons = partition.get("sites", []), defaultdict[int, list[str]](list)
        for record in self.records:
            for one in record.refused or ():
                reasons[one["client"]].append(one["reason"])
        asked = Counter(client for record in self.records for client in record.cohort or ())
        often = sorted(reasons.items(), key=lambda one: -len(one[1]))
        found = [(c, f"in {len(whys)} of {asked[c]} rounds ({legible(whys[-1], 150)})") for c, whys in often]
        if partition.get("rule") == OWN_DATA:
            absent = [client for client, samples in enumerate(partition.get("samples", [])) if not samples]
            found += [(client, "in all rounds (it was not connected when the run began)") for client in absent]
        lines = [f"client {c}{f' ({names[c]})' if c < len(names) and names[c] else ''} {why}" for c, why in found]
        more = [f"and {len(lines) - MAX_MISSING} more clients"] if len(lines) > MAX_MISSING else []
        return "; ".join([*lines[:MAX_MISSING], *more])

    @property
    def data(self) -> str:
        """The name of the data set."""
        return str(self.facts.get("data", {}).get("name", self.config["data"]["name"]))

    @property
    def only_class(self) -> str | None:
        """The only class of the data set, if it has just one; every model is then always right."""
        classes = self.facts.get("data", {}).get("classes", [])
        return str(classes[0]) if len(classes) == 1 else None


@dataclass(frozen=True)
class Group:
    """Runs of one experiment that differ only in the seed, with a unique name."""

    name: str
    outcomes: list[Outcome]

    @property
    def counted(self) -> list[Outcome]:
        """The runs in averages: the finished ones, or all if none is finished."""
        return [o for o in self.outcomes if o.finished] or self.outcomes

    @property
    def unfinished(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.finished]

    @property
    def missing_uploads(self) -> list[str]:
        """What is missing of the runs, each with its seed."""
        return [f"{self.name}, seed {o.seed}: {o.missing_uploads}" for o in self.outcomes if o.missing_uploads]

    @property
    def config(self) -> dict[str, Any]:
        return self.outcomes[0].config


def read(run: RunDirectory) -> Outcome:
    """Read a run from its folder."""
    run.require_run()
    config = run.config()
    records, status = run.records(), run.status()
    if status["state"] == "done" and not records:
        raise FedblendError(f"{run.path / METRICS}: is missing or empty, though the run is done; restore the file")
    return Outcome(run.path, config, records, status, run.facts())


def group(runs: Iterable[RunDirectory]) -> list[Group]:
    """Group runs by method label and configuration without seed and execution, in order of first appearance.

    The same folder given twice counts once. If one label has several configurations, the groups' names contain the
    fields in which they differ, or their folder.
    """
    return _make_groups(_read_all(runs))


def by_data(runs: Iterable[RunDirectory]) -> dict[str, list[Group]]:
    """Group runs as :func:`group` does, separately for each data set, by its name.

    Data sets are distinguished by the samples and classes in the runs' facts. If several have one name, the later ones
    are numbered.
    """
    by_key: dict[str, list[Outcome]] = defaultdict(list)
    outcomes = _read_all(runs)
    # A run that failed before its data were known belongs to those with the same data in their fields.
    known = {str(one.config["data"]): _data_key(one) for one in outcomes if "data" in one.facts}
    for outcome in outcomes:
        key = _data_key(outcome)
        by_key[key if "data" in outcome.facts else known.get(str(outcome.config["data"]), key)].append(outcome)
    named: dict[str, list[Group]] = {}
    times: Counter[str] = Counter()
    for outcomes in by_key.values():
        name = outcomes[0].data
        times[name] += 1
        named[name if times[name] == 1 else f"{name} ({times[name]})"] = _make_groups(outcomes)
    return named


def _read_all(runs: Iterable[RunDirectory]) -> list[Outcome]:
    unique = {run.path.resolve(): run for run in runs}
    return [read(run) for run in unique.values()]


def _data_key(outcome: Outcome) -> str:
    """Return a key that is equal for runs on the same data; without paths, which differ between machines."""
    facts = outcome.facts.get("data", {})
    identity = {name: facts[name] for name in ("name", "kind", "train", "test", "shape", "classes") if name in facts}
    if "files" in facts:
        identity["files"] = sorted(facts["files"].values())
    return json.dumps(identity or outcome.config["data"], sort_keys=True, default=str)


def _make_groups(outcomes: Iterable[Outcome]) -> list[Group]:
    by_key: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        compared = {k: v for k, v in outcome.config.items() if k not in (*NOT_COMPARED, *EXECUTION)}
        by_key[outcome.label, json.dumps(compared, sort_keys=True, default=str)].append(outcome)
    seed_groups = [part for outcomes in by_key.values() for part in _split_repeated_seeds(outcomes)]
    names: dict[str, Iterator[str]] = {}
    for label in {outcomes[0].label for outcomes in seed_groups}:
        names[label] = iter(_group_names([outcomes for outcomes in seed_groups if outcomes[0].label == label]))
    return [Group(next(names[o[0].label]), sorted(o, key=lambda one: one.seed)) for o in seed_groups]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to ``a.b.c`` -> value; lists stay unchanged.

    >>> flatten({"train": {"lr": 0.1}, "terms": [1]})
    {'train.lr': 0.1, 'terms': [1]}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def differing_fields(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields that differ between configurations, without :data:`NOT_COMPARED`."""
    flat = [flatten(config) for config in configs]
    fields = dict.fromkeys(field for one in flat for field in one)
    return [f for f in fields if f not in NOT_COMPARED and any(one.get(f) != flat[0].get(f) for one in flat)]


def _split_repeated_seeds(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """Return one list, or one for each folder if a seed occurs twice: a repeated run is not a second seed."""

    def all_differ(some: Sequence[Outcome]) -> bool:
        return len({one.seed for one in some}) == len(some)

    if all_differ(outcomes):
        return [outcomes]
    by_folder: dict[Path, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_folder[outcome.path.resolve().parent].append(outcome)
    return [part for some in by_folder.values() for part in ([some] if all_differ(some) else [[one] for one in some])]


def _group_names(groups: list[list[Outcome]]) -> list[str]:
    label = groups[0][0].label
    if len(groups) == 1:
        return [label]
    fields = differing_fields([outcomes[0].config for outcomes in groups])
    flat = [flatten(outcomes[0].config) for outcomes in groups]
    by_fields = [", ".join(f"{f.split('.')[-1]}={one.get(f)}" for f in fields) for one in flat]
    by_parent = [outcomes[0].path.resolve().parent.name for outcomes in groups]
    by_path = [str(outcomes[0].path) for outcomes in groups]
    candidates = [by_fields, by_parent, by_path] if len(fields) <= MAX_FIELDS_IN_NAME else [by_parent, by_path]
    chosen = next((words for words in candidates if len(set(words)) == len(words)), by_path)
    return [f"{label} ({word})" for word in chosen]
