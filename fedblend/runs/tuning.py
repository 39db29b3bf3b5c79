"""Search for the best values of an experiment's fields, on validation samples, with the same budget for each method.

A trial is a run with a folder of its own, named after its values. The choice of values depends on the seed and on the
earlier trials' scores alone. So a search that was interrupted goes on: its trials are found again, finished ones are
not run again, and the last one continues from its checkpoint. Optuna chooses the values (extra ``tune``).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblend.core.errors import FedblendError, Stopped, did_you_mean, missing_package
from fedblend.core.files import write_atomically, write_json
from fedblend.core.random import stream
from fedblend.core.record import RoundRecord
from fedblend.experiment.changes import change_field
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.parts import has_option
from fedblend.experiment.study import Interval, Tune, expand, read_tune, slugify
from fedblend.experiment.toml_tables import write_toml
from fedblend.runs import forms
from fedblend.runs.directory import RunDirectory, locked_study, read_json
from fedblend.runs.run_callbacks import RecordListener
from fedblend.runs.runner import SAME_EXPERIMENT, execute, first_difference, stops_alike

if TYPE_CHECKING:
    import optuna

BEST = "best.toml"  # The file with the best values, in the search's folder
SECONDS = "seconds.json"  # The file with the seconds that each trial took, in the search's folder


@dataclass(frozen=True)
class Trial:
    """One run with some values of the searched fields."""

    folder: Path
    values: dict[str, Any]
    score: float | None
    """The metric on validation samples at the best round; ``None`` for a trial that failed or measured none."""
    round: int
    rounds: int
    pruned: bool = False
    """Whether it was ended early, with fewer rounds than the experiment has."""
    failure: str = ""


@dataclass
class MethodSearch:
    """The search of one method."""

    label: str
    fields: dict[str, list[Any] | Interval]
    """The searched fields that the method has."""
    metric: str = ""
    """The metric by which trials are compared, known after the first of them."""
    larger_is_better: bool = True
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The trial with the best score; of equal ones the first."""
        scored = [trial for trial in self.trials if trial.score is not None]
        sign = 1 if self.larger_is_better else -1
        return max(scored, key=lambda trial: sign * (trial.score or 0.0), default=None)

    @property
    def at_an_end(self) -> dict[str, str]:
        """Fields whose best value is the "largest" or the "smallest" of at least three numbers in the file."""
        found = {}
        for path, value in (self.best.values if self.best else {}).items():
            listed = self.fields[path]
            numbers = {one for one in listed if type(one) in (int, float)} if isinstance(listed, list) else set()
            if len(numbers) >= 3 and value in (max(numbers), min(numbers)):
                found[path] = "largest" if value == max(numbers) else "smallest"
        return found


OnTrial = Callable[[str, Trial, int], Any]
"""A function of a method's label, its finished trial, and the most trials that it has."""


def tune(
    table: Mapping[str, Any],
    folder: Path,
    on_trial: OnTrial = lambda label, trial, most: None,
    foreign_fields: bool = False,
) -> list[MethodSearch]:
    """Search the fields of a file's table ``tune`` for each of its methods; go on with a search in ``folder``.

    The methods' experiments are those of the file, with its first seed. Writes ``best.toml``, a file that runs each
    method with its best values and all seeds. With ``foreign_fields``, fields that no method has are left out. Raises
    :class:`FedblendError` for such fields without it, for a file without samples for validation, and if no trial of a
    method succeeds; :class:`Stopped` on Ctrl-C.
    """
    settings = read_tune(table)
    plain = {key: value for key, value in table.items() if key != "tune"}
    seeds = plain.get("seeds")
    study = expand(plain, seeds=[seeds[0] if isinstance(seeds, list) and seeds else plain.get("seed", 0)])
    methods = plain.get("methods", [plain.get("method", "fedavg")])
    experiments = list(study.experiments.values())
    if not foreign_fields:
        _require_known(settings.fields, experiments)
    if not all(experiment.validation.active for experiment in experiments):
        told = "no samples are kept for validation, so that values would be chosen on the test samples"
        raise FedblendError(f"validation: {told}; add [validation] with server = 0.1 or clients = 0.1")
    one = {key: value for key, value in plain.items() if key not in ("methods", "seeds")}
    with locked_study(folder):
        searches = [
            _search({**one, "method": spec, "seed": experiment.seed}, experiment, settings, folder, on_trial)
            for spec, experiment in zip(methods, experiments, strict=True)
        ]
        # Paths are relative to the given file, which lies elsewhere.
        first = as_table(experiments[0])
        placed: dict[str, Any] = {key: first[key] for key in ("data", "start") if key in first}
        write_atomically(folder / BEST, _best_file({**plain, **placed}, methods, searches))
    return searches


def _require_known(fields: Iterable[str], experiments: Sequence[Experiment]) -> None:
    for path in fields:
        if not any(has_option(experiment, path) for experiment in experiments):
            meant = did_you_mean(path, [one for experiment in experiments for one in _paths(as_table(experiment))])
            valid = "; valid: paths such as train.lr, method.objective.lambda or method.terms.proximal.mu"
            raise FedblendError(f"tune.fields: no method of the file has '{path}'{meant or valid}")


def _paths(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The paths of all options in an experiment's table; parts of a list stand by their names."""
    found = []
    for key, value in table.items():
        if isinstance(value, list) and all(isinstance(part, Mapping) and "name" in part for part in value):
            value = {str(part["name"]): part for part in value}
        found += _paths(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
    return found


def _with(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(table))
    for path, value in values.items():
        change_field(changed, path, value)
    return changed


# One method ------------------------------------------------------------------------------------------------


def _search(
    table: dict[str, Any], experiment: Experiment, settings: Tune, folder: Path, on_trial: OnTrial
) -> MethodSearch:
    label = experiment.method.label or experiment.method.name
    fields = {path: values for path, values in settings.fields.items() if has_option(experiment, path)}
    if not fields:
        raise FedblendError(f"tune.fields: {label} has none of {', '.join(settings.fields)}")
    search = MethodSearch(label, fields)
    chooser = _Chooser(settings, fields, experiment)
    most, place = settings.trials_of(fields), folder / slugify(label)
    known: dict[str, float] = read_json(folder / SECONDS, forms.TrialSeconds).get("seconds", {})
    seconds: dict[str, float] = {}
    for _ in range(most):
        rounds = sum(trial.rounds for trial in search.trials)
        if rounds >= (settings.rounds or math.inf) or sum(seconds.values()) >= 60 * (settings.minutes or math.inf):
            break
        asked, values = chooser.ask()
        # Named after its values, so that the same values are not run twice.
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        path = place / f"trial-{digest[:10]}"
        before, begun = _recorded_seconds(path), time.monotonic()
        trial = _run(_with(table, values), path, values, search, chooser.prunes(asked))
        # A trial that an earlier call finished takes no time now, and counts with what it took then.
        run, now = f"{place.name}/{path.name}", before + time.monotonic() - begun
        seconds[run] = max(known.get(run, now), _recorded_seconds(path))
        if known.get(run) != seconds[run]:
            known[run] = seconds[run]
            write_json(folder / SECONDS, {"seconds": known})
        chooser.tell(asked, trial, search.larger_is_better)
        search.trials.append(trial)
        on_trial(label, trial, most)
    if search.best is None:
        reasons = list(dict.fromkeys(trial.failure or "no round was evaluated" for trial in search.trials))
        raise FedblendError(f"{label}: none of {len(search.trials)} trials succeeded: {'; '.join(reasons[:3])}")
    return search


def _recorded_seconds(folder: Path) -> float:
    """The seconds in the records of a trial's rounds; 0 if there are none, or if they are damaged."""
    try:
        return sum(sum(record.machine.get("seconds", {}).values()) for record in RunDirectory(folder).records())
    except FedblendError:
        return 0.0


def _run(
    table: Mapping[str, Any],
    folder: Path,
    values: dict[str, Any],
    search: MethodSearch,
    prunes: Callable[[int, float], bool],
) -> Trial:
    """Run a trial, or go on with it; ``prunes(round, score)`` says whether it ends early (larger scores are better)."""
    scores: dict[int, float] = {}
    diverged: list[int] = []
    pruned = False

    def listen(record: RoundRecord) -> bool:
        nonlocal pruned
        score = record.score_of(search.metric, validation=True)
        # A search that goes on may have fewer rounds than its earlier trials made.
        if score is not None and 0 < record.round <= experiment.rounds:
            if math.isfinite(score):
                scores[record.round] = score
                pruned = prunes(record.round, score if search.larger_is_better else -score)
            else:
                diverged.append(record.round)
        return pruned

    try:
        experiment = resolve(table)
    except FedblendError as error:
        return Trial(folder, values, None, 0, 0, failure=str(error))
    begun = RunDirectory(folder) if RunDirectory.has_begun(folder) else None
    if begun and (changed := first_difference(begun, experiment)):
        raise FedblendError(f"{changed} in {folder}; {SAME_EXPERIMENT}")
    try:
        if not search.metric:
            data = experiment.data.load()
            search.metric = experiment.validation.metric or ("accuracy" if data.task == "classification" else "loss")
            larger = {"loss": False, **{metric.label: metric.larger_is_better for metric in experiment.metrics}}
            search.larger_is_better = larger.get(search.metric, True)
        # A trial that was ended early is done, and would otherwise make the rounds that are left.
        before = begun.experiment() if begun and begun.status()["state"] == "done" else None
        if begun and before and before.rounds >= experiment.rounds and stops_alike(before, experiment):
            for record in begun.records():
                listen(record)
        else:
            execute(experiment, folder, resume=True, listener=listen)
    except Stopped:
        raise
    except FedblendError as error:
        return Trial(folder, values, None, 0, max(scores, default=0), failure=str(error))
    sign = 1 if search.larger_is_better else -1
    best = max(scores, key=lambda round: sign * scores[round], default=0)
    rounds = min(experiment.rounds, RunDirectory(folder).records()[-1].round)
    failure = "" if scores or not diverged else f"no score is finite, from round {diverged[0]} on"
    ended_by = str(RunDirectory(folder).status().get("reason", "")).removeprefix("ended by ")
    pruned = rounds < experiment.rounds and ended_by == RecordListener.name
    return Trial(folder, values, scores.get(best), best, rounds, pruned, failure)


class _Chooser:
    """Optuna's choice of values and of trials that end early, without a file of its own: trials are told again."""

    def __init__(self, settings: Tune, fields: Mapping[str, list[Any] | Interval], experiment: Experiment) -> None:
        try:
            import optuna
        except ImportError:
            raise missing_package("fedblend tune", "optuna", "tune") from None
        optuna.logging.set_verbosity(logging.WARNING)
        seed = int(stream(experiment.seed, "tune").integers(2**31))
        samplers = optuna.samplers
        sampler = samplers.TPESampler(seed=seed) if settings.search == "tpe" else samplers.RandomSampler(seed)
        # Earlier rounds say little of non-IID clients: at first the accuracy jumps from round to round.
        self.fields, self.third, self.rounds = fields, max(1, experiment.rounds // 3), experiment.rounds
        halving, never = optuna.pruners.SuccessiveHalvingPruner(self.third, 3), optuna.pruners.NopPruner()
        pruner = halving if settings.halving else never
        self.study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        self.states = optuna.trial.TrialState
        if settings.search == "grid":
            # A value of a list is given by its place: values may be tables.
            lists = [values for values in fields.values() if isinstance(values, list)]
            cells = list(itertools.product(*(range(len(values)) for values in lists)))
            for place in stream(experiment.seed, "tune", 1).permutation(len(cells)):
                self.study.enqueue_trial(dict(zip(fields, cells[place], strict=True)))

    def ask(self) -> tuple[optuna.Trial, dict[str, Any]]:
        trial = self.study.ask()
        values: dict[str, Any] = {}
        for path, given in self.fields.items():
            if isinstance(given, list):
                values[path] = given[trial.suggest_categorical(path, list(range(len(given))))]
            elif isinstance(given.low, int) and isinstance(given.high, int):
                values[path] = trial.suggest_int(path, given.low, given.high, log=given.log)
            else:
                values[path] = float(f"{trial.suggest_float(path, given.low, given.high, log=given.log):.4g}")
        return trial, values

    def prunes(self, trial: optuna.Trial) -> Callable[[int, float], bool]:
        """A function of a round and its score: whether the trial ends. It is judged once, before its last round."""
        judged = False

        def ends(round: int, score: float) -> bool:
            nonlocal judged
            if judged or not self.third <= round < self.rounds:
                return False
            judged = True
            # As of the third, also if a later round is the first that is evaluated: it may be that of the next rung.
            trial.report(score, self.third)
            return trial.should_prune()

        return ends

    def tell(self, asked: optuna.Trial, trial: Trial, larger_is_better: bool) -> None:
        if trial.score is None or trial.pruned:
            self.study.tell(asked, state=self.states.PRUNED if trial.pruned else self.states.FAIL)
        else:
            self.study.tell(asked, trial.score if larger_is_better else -trial.score)


# The best values -------------------------------------------------------------------------------------------


def _best_file(plain: Mapping[str, Any], methods: list[Any], searches: list[MethodSearch]) -> str:
    """An experiment file with each method's best values: the first at the top, the others as variants."""
    kept = {key: value for key, value in plain.items() if key not in ("methods", "method")}
    tables = []
    for given, search in zip(methods, searches, strict=True):
        assert search.best is not None
        spec = {"name": given} if isinstance(given, str) else dict(given)
        # Two methods of one name are told apart by their labels.
        if search.label != spec.get("name"):
            spec["label"] = search.label
        tables.append((spec, search.best.values))
    first, *others = tables
    table = _with({**kept, "method": first[0]}, first[1])
    # With all options of a part: those of the first method's would stay in a variant.
    variants = [
        _with({"method": spec}, _whole(_with({**kept, "method": spec}, values), values)) for spec, values in others
    ]
    return write_toml({**table, **({"variants": variants} if variants else {})})


def _whole(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Searched values, parts with all their options, as the experiment of a table resolves them."""
    resolved = as_table(resolve({key: value for key, value in table.items() if key != "seeds"}))
    whole = dict(values)
    for path, value in values.items():
        found: Any = resolved
        for word in path.removesuffix(".name").split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        if isinstance(value, (str, Mapping)) and isinstance(found, Mapping):
            del whole[path]
            whole[path.removesuffix(".name")] = found
    return whole
