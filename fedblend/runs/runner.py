"""Run one experiment in a run directory: start, resume, record, checkpoint."""

from __future__ import annotations

import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedblend import __version__, engines
from fedblend.core import registry
from fedblend.core.callbacks import Callback, require_own_files
from fedblend.core.engine import Engine, OnStep, no_step
from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.loop import RoundLoop
from fedblend.core.record import EngineChoice, RoundRecord
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.core.trees import differing, in_order
from fedblend.data.measures import class_counts, noniid_measures
from fedblend.engines.autotune import EnginePlan
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.privacy_facts import privacy_facts
from fedblend.runs import checkpoint
from fedblend.runs.directory import METRICS, RunDirectory, how_to_resume, is_federated
from fedblend.runs.groups import EXECUTION, flatten
from fedblend.runs.predictor import require_one_model
from fedblend.runs.run_callbacks import Checkpoints, KeepBest, Listener, MetricsLog, PeakMemory, RecordListener
from fedblend.runs.trackers import Tracker

Federate = Callable[[Setup], tuple[Setup, Engine, EnginePlan]]
"""Returns the engine of a real federation, and the setup with its participating clients."""

SPLIT_CLIENTS = 500  # Largest number of clients whose class counts a run directory has
TARGET = ("target", "target_metric", "stop_at_target")  # Fields of the target

MAY_CHANGE = {*TARGET, *EXECUTION, "rounds", "callbacks"}
"""Fields that may differ in a resumed run: none of them changes a finished round."""

SAME_EXPERIMENT = (
    f"a run goes on with the experiment it began with (only {', '.join(sorted(MAY_CHANGE))} may change); name the "
    "folder of another run with --out"
)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    directory: RunDirectory
    setup: Setup
    state: RunState


def execute(
    experiment: Experiment,
    path: Path,
    resume: bool = False,
    listener: Listener | None = None,
    processors: int = 1,
    federate: Federate | None = None,
    callbacks: Sequence[Callback] = (),
    on_step: OnStep = no_step,
) -> FinishedRun:
    """Run an experiment in ``path``; with ``resume``, continue from its checkpoint.

    ``listener`` is called with every record; in a resumed run, with the earlier records first. Up to ``processors``
    ranks are started if the experiment gives no number; ``federate`` returns another engine instead. ``on_step``
    receives the steps before and within a round. Ctrl-C marks the run stopped and raises :class:`Stopped`, and
    so do :class:`KeyboardInterrupt` and :class:`Stopped` of a callback. Any other error marks the run failed.
    """
    directory = RunDirectory(path)
    exists = RunDirectory.has_begun(path)
    if exists and not resume:
        how = "resume it (fedblend resume; resume=True), or give another folder"
        raise FedblendError(f"{path}: already holds a run; {how}")
    if exists and (field := first_difference(directory, experiment)):
        raise FedblendError(f"{field} in {path}; {SAME_EXPERIMENT}")
    require_own_files([*experiment.callbacks, *callbacks])
    # A resumed run keeps its finished rounds, even if fewer are configured.
    experiment = experiment.model_copy(update={"rounds": max(experiment.rounds, checkpoint.round_of(path) or 0)})
    with _failure_kept(path, experiment):
        # Built before the folder is created, so that an invalid experiment leaves no empty run.
        setup = replace(make_setup(experiment), folder=path)
        if exists:
            directory.require_same_data(setup.data)
        engines.require_device(experiment.device)
    with one_thread(), _failure_kept(path, experiment):
        if federate is not None:
            setup, engine, choice = federate(setup)
        else:
            choice = _choose_plan(directory, setup, processors, on_step)
            engine = engines.make(setup, choice, on_step)
        try:
            # Order: callbacks and the listener may end the run, so that its last round is evaluated; then the best
            # model is kept, trackers see the record, it is written, and made final by the checkpoint.
            given = [*experiment.callbacks, *callbacks]
            ending = [one for one in given if not isinstance(one, KeepBest | Tracker)]
            watching = [one for one in given if isinstance(one, KeepBest | Tracker)]
            memory, listeners = PeakMemory(), [RecordListener(listener)] if listener else []
            log = MetricsLog(directory)
            checkpoints = Checkpoints(directory, experiment.checkpoint_every, experiment.rounds)
            loop = RoundLoop(setup, engine, [memory, *ending, *listeners, *watching, log, checkpoints])
            state = _run(directory, loop, choice, [memory, *listeners, log], checkpoints)
        finally:
            engine.close()
    return FinishedRun(directory, setup, state)


@contextmanager
def _failure_kept(path: Path, experiment: Experiment) -> Iterator[None]:
    """Keep an error in code inside the context, such as the user's model, as the status of a run; not one in fields."""
    try:
        yield
    except FedblendError:
        raise
    except Exception as error:
        keep_failure(path, experiment, str(error) or type(error).__name__)
        raise


def keep_failure(path: Path, experiment: Experiment, reason: str) -> None:
    """Make the folder of a run that failed before it began; one that has begun, or a full disk, stays as it is."""
    with suppress(FedblendError, OSError):
        RunDirectory(path).create_failed(experiment, _process_facts(), reason)


def require_no_run(folder: Path) -> None:
    """Raise :class:`FedblendError` if a folder for several runs is itself a run directory."""
    if RunDirectory.is_run(folder):
        _require_no_federation(RunDirectory(folder))
        how = f"go on with its run (fedblend resume {folder}), or name another folder with --out"
        raise FedblendError(f"{folder}: is itself a run directory, and no folder for runs; {how}")


def require_free(folder: Path, option: str, remedy: str, resume: bool = False) -> None:
    """Raise :class:`FedblendError` unless ``option`` names a folder for runs: no run, no file, and new or to resume."""
    require_no_run(folder)
    if folder.exists() and not folder.is_dir():
        raise FedblendError(f"{option} {folder}: is a file; name a folder")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise FedblendError(f"{option} {folder}: already holds files; {remedy}")


def _require_no_federation(directory: RunDirectory) -> None:
    if is_federated(directory.facts()):
        how = "resume it as it was started, with flwr run or fedblend federation up"
        raise FedblendError(f"{directory.path}: is a run of a real federation; {how}")


def _choose_plan(directory: RunDirectory, setup: Setup, processors: int, on_step: OnStep) -> EnginePlan:
    """Return the run's engine plan. A resumed run keeps its plan, so that its rounds are bit-identical."""
    experiment, earlier = setup.experiment, directory.facts().get("engine")
    _require_no_federation(directory)
    if earlier and experiment.engine == "auto":
        return replace(EnginePlan(**earlier), ranks=experiment.ranks or earlier["ranks"])
    return engines.plan_engine(setup, processors, experiment.rounds, on_step)


def _run(
    directory: RunDirectory, loop: RoundLoop, plan: EnginePlan, records: list[Callback], checkpoints: Checkpoints
) -> RunState:
    experiment = loop.setup.experiment
    with directory.locked():
        before, started = directory.status(), False
        checkpoints.saved_round = before["round"]
        try:
            cut = None
            if RunDirectory.has_begun(directory.path):
                cut = directory.experiment() if before["state"] != "done" else None
                directory.set_experiment(experiment)
                directory.update_facts({"engine": plan.table()})
            else:
                facts = collect_facts(loop.setup) | {"engine": plan.table()}
                directory.create(experiment, facts, describe_split(loop.setup))
            state, record = _start_or_resume(directory, loop, plan, records, cut)
            checkpoints.saved_round, started = state.round, True
            try:
                state = loop.run(state, record)
            finally:
                if reason := engines.missing_kernels():
                    directory.update_facts({"kernels": f"not used: {reason}"})
        except (KeyboardInterrupt, Stopped):
            directory.set_status("stopped", checkpoints.saved_round, "interrupted")
            how = how_to_resume(directory.path, {"engine": plan.table()})
            raise Stopped(f"stopped; kept up to round {checkpoints.saved_round}. Go on with: {how}") from None
        except Exception as error:
            # A finished run stays done if its checkpoint cannot be read.
            if started or before["state"] != "done":
                with suppress(FedblendError):  # on a full disk, which is the error that is raised
                    directory.set_status("failed", checkpoints.saved_round, str(error) or type(error).__name__)
            raise
        directory.set_status("done", state.round, f"ended by {loop.ended_by}" if loop.ended_by else "")
    return state


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside the context, and restore the number of threads afterwards.

    Results then do not depend on the number of cores, and small models are fastest. Several cores are used by
    parallel runs and ranks.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_difference(directory: RunDirectory, experiment: Experiment) -> str:
    """Return the first field in which an experiment differs from a run's; empty if the run may be resumed."""
    old, new = flatten(as_table(directory.experiment())), flatten(as_table(experiment))
    for field in dict.fromkeys([*new, *old]):
        if field not in MAY_CHANGE and old.get(field) != new.get(field):
            values = [repr(one[field]) if field in one else "nothing" for one in (new, old)]
            return f"{field}: {values[0]} differs from {values[1]}"
    return ""


def is_ended_by(names: str, before: Experiment, now: Experiment) -> bool:
    """Whether what ended a run, by name, still ends it now, so that a resume makes no further round."""
    if (before.rounds, before.callbacks) != (now.rounds, now.callbacks):
        return False
    by = set(names.split(", "))
    if any(one.counts_anew for one in now.callbacks if one.name in by):
        return False
    return by != {"target"} or stops_alike(before, now)


def stops_alike(before: Experiment, now: Experiment) -> bool:
    """Whether two experiments end at the same target, or both at none."""
    if not (before.stop_at_target or now.stop_at_target):
        return True
    return all(getattr(before, field) == getattr(now, field) for field in TARGET)


def _start_or_resume(
    directory: RunDirectory, loop: RoundLoop, plan: EnginePlan, watching: list[Callback], cut: Experiment | None
) -> tuple[RunState, RoundRecord]:
    """Return the state to continue from, the checkpoint's or a new one, and its record.

    ``cut`` is the earlier experiment of a run that is not done. Such a run may have been cut after its callbacks had
    ended it; it makes no further round then.
    """
    setup, state = loop.setup, checkpoint.read(directory.path)
    if state is None:
        directory.truncate_metrics(-1)
        state, record = loop.start(first_weights(setup, directory.path))
        record.machine["engine"] = cast(EngineChoice, plan.table())
        for callback in watching:
            callback.on_round_end(state, record)
        checkpoint.write_frozen(directory.path, {name: state.weights[name] for name in setup.frozen})
        checkpoint.write(directory.path, state)
    else:
        state = checkpoint.match_model(state, setup.weights(), len(setup.population), directory.path)
        if setup.frozen and "frozen" not in directory.facts()["model"]:
            told = f"was begun by a version that sent frozen tensors; from round {state.round + 1} they do not travel"
            why = "frozen batch norms keep their statistics, so that bytes and accuracies change"
            warnings.warn(f"{directory.path}: {told}, and {why}; begin again to compare", stacklevel=2)
        records = directory.truncate_metrics(state.round)
        # Length first: a damaged checkpoint may contain a round number beyond any list.
        if len(records) != state.round + 1 or any(record.round != i for i, record in enumerate(records)):
            told = f"rounds are missing below the checkpoint's, {state.round}; the log was damaged"
            remedy = "Restore the file, or remove this run and begin again"
            raise FedblendError(f"{directory.path / METRICS}: {told}. {remedy}")
        record = records[-1]
        for callback in watching:
            if isinstance(callback, RecordListener):
                for earlier in records:
                    callback.listener(earlier)
        if state.ended_by and not (cut and is_ended_by(state.ended_by, cut, setup.experiment)):
            # Written before the status: a run that is killed in its next round still goes on.
            state = replace(state, ended_by="")
            checkpoint.write(directory.path, state)
    directory.set_status("running", state.round)
    return state, record


@contextmanager
def repeating(directory: RunDirectory, setup: Setup) -> Iterator[RoundLoop]:
    """The loop that repeats rounds of a run, in this process and with the run's engine."""
    plan = directory.facts().get("engine")
    engines.require_device(setup.experiment.device)
    with one_thread():
        chosen = EnginePlan(**{**plan, "ranks": 1}) if plan else engines.plan_engine(setup, 1, 1)
        with closing(engines.make(setup, chosen)) as engine:
            yield RoundLoop(setup, engine)


def first_weights(setup: Setup, folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights of the run that ``start`` names, for a run in ``folder``; ``None`` without ``start``."""
    if setup.experiment.start is None:
        return None
    # A name alone is a run of the same study. An absolute path stays unchanged when joined.
    path, field = folder.parent / source_run(setup.experiment), f"start: '{setup.experiment.start}'"
    state = checkpoint.read(path)
    if state is None:
        valid = "the folder of an earlier run, or the name of an earlier run of this study"
        raise FedblendError(f"{field}: {path} has no checkpoint; valid: {valid}")
    source = RunDirectory(path)
    if source.status().get("state") != "done":
        raise FedblendError(f"{field}: {path} is not done; finish it first with: {how_to_resume(path, source.facts())}")
    try:
        require_one_model(source.experiment(), path)
    except FedblendError as error:
        raise FedblendError(f"{field}: {error}; valid: a run of another method") from None
    own = setup.weights()
    if different := differing(own, state.weights):
        raise FedblendError(f"{field}: the model of {path} is another ('{different[0]}' differs); use the same")
    # The file has tensors in order of name; all code expects the model's order.
    return in_order(state.weights, own)


def source_run(experiment: Experiment) -> str:
    """Return the run that an experiment starts from, with its seed filled in; empty without a warm start."""
    return (experiment.start or "").replace("{seed}", str(experiment.seed))


def _process_facts() -> dict[str, Any]:
    return {
        "command": shlex.join(["fedblend", *sys.argv[1:]]) if Path(sys.argv[0]).name.startswith("fedblend") else "",
        "versions": {
            "fedblend": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "import_from": sorted(registry.imported_from),
    }


def collect_facts(setup: Setup) -> dict[str, Any]:
    """Return the facts that are needed to repeat a run and to interpret its numbers."""
    sizes, device = setup.population.sizes, setup.experiment.device
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
    return _process_facts() | {
        "machine": {"system": platform.system(), "processor": platform.machine(), **gpu},
        "data": {
            "name": setup.data.name,
            "kind": setup.data.kind,
            "train": len(setup.data.train),
            "test": len(setup.data.test),
            "shape": list(setup.data.train.x.shape[1:]),
            "classes": list(setup.data.classes),
            "outputs": setup.data.outputs,
            **({"labels": list(setup.data.labels)} if setup.data.labels else {}),
            **setup.data.facts,
        },
        "scale": setup.scale.describe(),
        "model": {
            "name": setup.experiment.model.name,
            "parameters": sum(p.numel() for p in setup.model.parameters()),
            "frozen": setup.frozen_digest(setup.weights()),
        },
        "clients": {
            "number": len(setup.population),
            "holding": int((sizes > 0).sum()),
            "samples": int(sizes.sum()),
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
        },
        "partition": setup.population.notes,
        "privacy": privacy_facts(setup.experiment),
        "metrics": {metric.label: metric.larger_is_better for metric in setup.experiment.metrics},
    }


def describe_split(setup: Setup) -> dict[str, Any]:
    """Return class counts by client and the split's non-IID measures (AggEnhance, section 4.3), if known."""
    classes = [] if setup.population.elsewhere else list(setup.data.classes)
    counts = class_counts(setup.population, setup.data.train.y.numpy(), len(classes)) if classes else np.empty((0, 0))
    return {
        "classes": classes,
        "counts": counts[:SPLIT_CLIENTS].tolist(),
        "sizes": setup.population.sizes[:SPLIT_CLIENTS].tolist(),
        "names": setup.population.names(setup.data)[:SPLIT_CLIENTS],
        "measures": noniid_measures(counts) if classes else {},
    }
