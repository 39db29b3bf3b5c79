"""Running one experiment in a run directory: start, resume, record, checkpoint."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend import engines
from fedblend.core import registry
from fedblend.core.callbacks import Callback
from fedblend.core.engine import Engine
from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.loop import RoundLoop
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.data.measures import class_counts, noniid_measures
from fedblend.engines.autotune import EnginePlan
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.callbacks import Checkpoints, Listener, MetricsLog, RecordListener
from fedblend.runs.directory import METRICS, RunDirectory
from fedblend.runs.groups import flatten
from fedblend.runs.warm_start import first_weights

Federate = Callable[[Setup], tuple[Setup, Engine, EnginePlan]]
"""Gives the engine of a federation whose clients are real, and the world with the clients that take part in it."""

SPLIT_CLIENTS = 500
"""Clients whose class counts a run directory keeps for the picture of the split."""

MAY_CHANGE = {
    "rounds",
    "engine",
    "stack",
    "ranks",
    "memory_format",
    "device",
    "cuda_graphs",
    "checkpoint_every",
    "callbacks",
}
"""Fields that may differ when a run goes on: none of them changes a round that was already made."""

SAME_EXPERIMENT = f"a run goes on with the experiment it began with (only {', '.join(sorted(MAY_CHANGE))} may change)"


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end, with the world and the state it ended in."""

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
) -> FinishedRun:
    """Run an experiment in ``path``; with ``resume`` go on from its checkpoint.

    Calls ``listener`` with every record, those of an earlier part of the run first. Up to ``processors`` ranks are
    started where the experiment leaves their number open; ``federate`` gives another engine in place of these. Ctrl-C
    raises :class:`Stopped` after marking the run; any :class:`FedblendError` marks it failed.
    """
    directory = RunDirectory(path)
    exists = RunDirectory.is_run(path)
    if exists and not resume:
        raise FedblendError(
            f"{path}: already holds a run; go on with it (fedblend resume; resume=True), or give another folder as out"
        )
    if exists and (field := first_difference(directory, experiment)):
        raise FedblendError(f"{field} in {path}; {SAME_EXPERIMENT}")
    # Rounds that were made are not unmade.
    experiment = experiment.model_copy(update={"rounds": max(experiment.rounds, checkpoint.round_of(path) or 0)})
    # Made before the folder is touched, so that a mistake in the experiment leaves no empty run behind.
    setup = make_setup(experiment)
    engines.require_device(experiment.device)
    with one_thread():
        if federate is not None:
            setup, engine, choice = federate(setup)
        else:
            choice = _choose_plan(directory, setup, processors)
            engine = engines.make(setup, choice)
        try:
            # The record is on the disk before anybody sees it, and seen before the checkpoint that makes it final.
            records = [MetricsLog(directory), *([RecordListener(listener)] if listener else [])]
            checkpoints = Checkpoints(directory, experiment.checkpoint_every, experiment.rounds)
            loop = RoundLoop(setup, engine, [*records, checkpoints, *experiment.callbacks, *callbacks])
            state = _run(directory, loop, choice, records, checkpoints)
        finally:
            engine.close()
    return FinishedRun(directory, setup, state)


def _choose_plan(directory: RunDirectory, setup: Setup, processors: int) -> EnginePlan:
    """How the run is computed: as before where it goes on, so that its rounds come out the same to the last bit."""
    asked, earlier = setup.experiment, directory.facts().get("engine")
    if earlier and earlier["engine"] == "flower":
        raise FedblendError(
            f"{directory.path}: is a run of a real federation; go on with it as it was begun, by flwr run or "
            "fedblend federation up"
        )
    if earlier and asked.engine == "auto":
        return replace(EnginePlan(**earlier), ranks=asked.ranks or earlier["ranks"])
    return engines.plan_engine(setup, processors, asked.rounds)


def _run(
    directory: RunDirectory, loop: RoundLoop, plan: EnginePlan, records: list[Callback], checkpoints: Checkpoints
) -> RunState:
    """Make the rounds that are left, in the run's folder."""
    experiment = loop.experiment
    with directory.locked():
        before, begun = directory.status(), False
        checkpoints.saved_round = before["round"]
        try:
            if RunDirectory.is_run(directory.path):
                directory.set_experiment(experiment)
                directory.update_facts({"engine": plan.table()})
            else:
                facts = collect_facts(loop.setup) | {"engine": plan.table()}
                directory.create(experiment, facts, describe_split(loop.setup))
            state, record = _start_or_resume(directory, loop, plan, records)
            checkpoints.saved_round, begun = state.round, True
            state = loop.run(state, record)
        except KeyboardInterrupt:
            directory.set_status("stopped", checkpoints.saved_round, "interrupted")
            raise Stopped(
                f"stopped; kept up to round {checkpoints.saved_round}. Go on with: fedblend resume {directory.path}"
            ) from None
        except Exception as error:
            # A run that was done stays done where its checkpoint cannot be read.
            if begun or before["state"] != "done":
                _mark_failed(directory, checkpoints.saved_round, str(error) or type(error).__name__)
            raise
        directory.set_status("done", state.round, f"ended by {loop.ended_by}" if loop.ended_by else "")
    return state


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside, and on as many as before afterwards.

    So results are the same on every machine's number of cores, and small models are fastest; several runs at
    once are how several cores are used.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_difference(directory: RunDirectory, experiment: Experiment) -> str:
    """The first field in which an experiment differs from the one a run began with; empty where it may go on."""
    old, new = flatten(as_table(directory.experiment())), flatten(as_table(experiment))
    for field in dict.fromkeys([*new, *old]):
        if field not in MAY_CHANGE and old.get(field) != new.get(field):
            values = [repr(one[field]) if field in one else "nothing" for one in (new, old)]
            return f"{field}: {values[0]} differs from {values[1]}"
    return ""


def _start_or_resume(
    directory: RunDirectory, loop: RoundLoop, plan: EnginePlan, watching: list[Callback]
) -> tuple[RunState, RoundRecord]:
    """The state to go on from, the last checkpoint's or a fresh one, and the last record."""
    setup, state = loop.setup, checkpoint.read(directory.path)
    if state is None:
        directory.truncate_metrics(-1)
        state, record = loop.start(first_weights(setup, directory.path))
        record.machine["engine"] = plan.table()
        for callback in watching:
            callback.on_round_end(state, record)
        checkpoint.write(directory.path, state)
    else:
        state = checkpoint.match_model(state, setup.weights(), len(setup.population), directory.path)
        records = directory.truncate_metrics(state.round)
        # Compared by length first: a damaged file may name more rounds than any list can hold.
        if len(records) != state.round + 1 or any(record["round"] != i for i, record in enumerate(records)):
            raise FedblendError(
                f"{directory.path / METRICS}: rounds are missing below the checkpoint's, {state.round}; the log was "
                "damaged. Put it back, or remove this run and begin again"
            )
        record = RoundRecord.from_dict(records[-1])
        for callback in watching:
            if isinstance(callback, RecordListener):
                for table in records:
                    callback.listener(table)
    directory.set_status("running", state.round)
    return state, record


def _mark_failed(directory: RunDirectory, round: int, reason: str) -> None:
    try:
        directory.set_status("failed", round, reason)
    except FedblendError:
        # The disk that is full is the reason itself, and it is about to be told.
        return


def collect_facts(setup: Setup) -> dict[str, Any]:
    """What a reader needs to repeat a run and to read its numbers."""
    sizes = setup.population.sizes
    return {
        "command": shlex.join(["fedblend", *sys.argv[1:]]) if Path(sys.argv[0]).name.startswith("fedblend") else "",
        "versions": {
            "fedblend": version("fedblend"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "data": {
            "name": setup.data.name,
            "kind": setup.data.kind,
            "train": len(setup.data.train),
            "test": len(setup.data.test),
            "shape": list(setup.data.train.x.shape[1:]),
            "classes": list(setup.data.classes),
            **setup.data.facts,
        },
        "scale": setup.scale.describe(),
        "model": {
            "name": setup.experiment.model.name,
            "parameters": sum(p.numel() for p in setup.model.parameters()),
        },
        "clients": {
            "number": len(setup.population),
            "holding": int((sizes > 0).sum()),
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
        },
        "partition": setup.population.notes,
        "import_from": sorted(registry.imported_from),
    }


def describe_split(setup: Setup) -> dict[str, Any]:
    """Classes by clients and the split's non-IID measures (AggEnhance, section 4.3).

    Empty in regression, and where samples lie at sites of their own.
    """
    if not setup.data.classes or setup.population.elsewhere:
        return {
            "classes": [],
            "counts": [],
            "sizes": setup.population.sizes[:SPLIT_CLIENTS].tolist(),
            "measures": {},
        }
    counts = class_counts(setup.population, setup.data.train.y.numpy(), len(setup.data.classes))
    return {
        "classes": list(setup.data.classes),
        "counts": counts[:SPLIT_CLIENTS].tolist(),
        "sizes": setup.population.sizes[:SPLIT_CLIENTS].tolist(),
        "measures": noniid_measures(counts),
    }
