"""Run the experiments of a study, one after another or in parallel processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fedblend.core import registry
from fedblend.core.engine import OnStep
from fedblend.core.errors import FedblendError, Stopped, by_reason, listed
from fedblend.core.record import RoundRecord
from fedblend.engines.distributed.pipes import Parent
from fedblend.engines.distributed.processes import (
    WorkerProcess,
    defined_in_main,
    interrupts_deferred,
    interrupts_ignored,
    start_python,
)
from fedblend.engines.distributed.ranks import started_by_torchrun
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.study import Study
from fedblend.runs.directory import RunDirectory, has_runs, locked_study, remove_study, write_study
from fedblend.runs.faults import describe_fault, user_error
from fedblend.runs.groups import EXECUTION
from fedblend.runs.run_callbacks import Listener
from fedblend.runs.runner import (
    SAME_EXPERIMENT,
    execute,
    first_difference,
    is_ended_by,
    keep_failure,
    require_no_run,
    source_run,
)

OnRecord = Callable[[str, RoundRecord], None]

OnRunStep = Callable[[str, str, int, int], Any]
"""Receives a run's name and one of its steps (:data:`fedblend.core.engine.OnStep`)."""

STEP_SECONDS = 1.0  # Seconds between two steps of a run that a process sends
POLL_SECONDS = 0.2  # Seconds of one wait for the processes' messages, in which Windows handles no Ctrl-C


def run_all(
    study: Study,
    folder: Path,
    resume: bool,
    jobs: int | None,
    on_record: OnRecord,
    on_step: OnRunStep = lambda slug, what, done, total: None,
) -> dict[str, str]:
    """Run every experiment of a study in ``folder``; return the error message of each failed run, by its name.

    ``jobs`` is the number of parallel runs (default: processors divided by the largest number of ranks, at most the
    number of runs). Runs with parts from the user's main script run one after another in this process, with a warning.
    A failed run does not stop the others. Ctrl-C raises :class:`Stopped`; all runs can then be resumed. Raises
    :class:`FedblendError` before the first run if a run to resume has another experiment, or ``folder`` is a run.
    """
    require_no_run(folder)
    ranks = max((e.ranks or 1 for e in study.experiments.values()), default=1)
    jobs = 1 if started_by_torchrun() else min(len(study.experiments), jobs or max(1, processors() // ranks))
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with locked_study(folder):
            return _run_locked(study, folder, resume, jobs, on_record, on_step)
    finally:
        if created and not has_runs(folder):
            # An invalid experiment leaves no empty study.
            remove_study(folder, created)


def _run_locked(
    study: Study, folder: Path, resume: bool, jobs: int, on_record: OnRecord, on_step: OnRunStep
) -> dict[str, str]:
    if resume:
        _require_same_experiments(study, folder)
    # Written before the first run, so that a resume includes runs that this one does not reach. Without ``resume`` a
    # run that is there is refused. How a run was executed stays: a device may turn out not to be there.
    going = {}
    for slug, experiment in study.experiments.items():
        if not RunDirectory.has_begun(folder / slug):
            going[slug] = as_table(experiment)
        elif resume:
            before = RunDirectory(folder / slug).experiment()
            going[slug] = as_table(experiment.model_copy(update={field: getattr(before, field) for field in EXECUTION}))
    write_study(folder, study.name, going)
    if resume:
        left: dict[str, Experiment] = {}
        for slug, experiment in study.experiments.items():
            run = RunDirectory(folder / slug)
            if not _has_ended(run, experiment):
                left[slug] = experiment
            elif run.experiment() != experiment:  # such as another target, which tables show
                with run.locked():
                    run.set_experiment(experiment)
        study = Study(study.name, left)
    try:
        failed: dict[str, str] = {}
        for wave in waves(study):
            parallel = min(jobs, len(wave.experiments))
            own = next(filter(None, (defined_in_main(as_table(e)) for e in wave.experiments.values())), "")
            if parallel > 1 and own:
                warnings.warn(
                    f"the runs are made one after another in this process: no other process can import '{own}', which "
                    "this script or notebook defines; move it to a module of its own (my_parts.py) to run in parallel",
                    stacklevel=2,
                )
            if parallel <= 1 or own:
                share = 1 if own else processors()
                failed |= _run_sequentially(wave, folder, resume, on_record, on_step, share)
            else:
                failed |= _run_in_parallel(wave, folder, resume, parallel, on_record, on_step)
        for slug, reason in failed.items() if has_runs(folder) else ():
            keep_failure(folder / slug, study.experiments[slug], reason)
        return failed
    except (KeyboardInterrupt, Stopped):
        if not has_runs(folder):
            raise Stopped("stopped before the first run began") from None
        how = f"fedblend resume {folder}"
        raise Stopped(f"stopped; each run is kept up to its last checkpoint. Go on with: {how}") from None


def waves(study: Study) -> list[Study]:
    """Split a study into stages: each run follows the run that it starts from (``start``).

    Raises :class:`FedblendError` for a cycle.
    """
    depth: dict[str, int] = {}
    for slug in study.experiments:
        chain = [slug]
        while (source := source_run(study.experiments[chain[-1]])) in study.experiments:
            if source in chain:
                raise FedblendError(f"start: '{source}' begins with itself in the end; valid: no cycles")
            chain.append(source)
        depth[slug] = len(chain) - 1
    return [
        Study(study.name, {slug: e for slug, e in study.experiments.items() if depth[slug] == level})
        for level in range(max(depth.values(), default=0) + 1)
    ]


def join_failures(faults: Mapping[str, str], runs: int) -> str:
    """Join the error messages of ``runs`` runs; a message that several runs share appears once.

    >>> join_failures({"a-seed0": "no such file", "a-seed1": "no such file"}, 2)
    'all 2 runs: no such file'
    """
    messages = []
    for fault, names in by_reason(faults.items()).items():
        messages.append(f"all {runs} runs: {fault}" if len(names) == runs > 1 else f"{listed(names)}: {fault}")
    return "; ".join(messages)


def _require_same_experiments(study: Study, folder: Path) -> None:
    started = {slug: e for slug, e in study.experiments.items() if RunDirectory.has_begun(folder / slug)}
    fields = {slug: first_difference(RunDirectory(folder / slug), experiment) for slug, experiment in started.items()}
    different = {slug: field for slug, field in fields.items() if field}
    if different:
        raise FedblendError(f"{join_failures(different, len(study.experiments))} in {folder}; {SAME_EXPERIMENT}")


def _has_ended(run: RunDirectory, experiment: Experiment) -> bool:
    """Whether a run ended early by what the experiment still has: it would make one round more in each resume."""
    if not RunDirectory.is_run(run.path) or (status := run.status())["state"] != "done":
        return False
    before, _, names = str(status.get("reason", "")).partition("ended by ")
    return bool(names) and not before and is_ended_by(names, run.experiment(), experiment)


def processors() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_sequentially(
    study: Study, folder: Path, resume: bool, on_record: OnRecord, on_step: OnRunStep, processors: int
) -> dict[str, str]:
    messages = {
        slug: run_one(one, folder / slug, resume, partial(on_record, slug), processors, partial(on_step, slug))
        for slug, one in study.experiments.items()
    }
    return {slug: message for slug, message in messages.items() if message}


def run_one(
    experiment: Experiment, path: Path, resume: bool, listener: Listener, processors: int, on_step: OnStep
) -> str:
    """Run one experiment; return its error message, or an empty text. Raises :class:`Stopped` on Ctrl-C."""
    try:
        execute(experiment, path, resume, listener, processors, on_step=on_step)
    except Stopped:
        raise
    except FedblendError as error:
        return str(error)
    except Exception as error:
        if (message := user_error(error)) is not None:
            return message
        if not registry.imported_from:
            return describe_fault(error, path if path.is_dir() else None)
        # An error in a user-defined part: its author needs the traceback, and the other runs continue.
        traceback.print_exc()
        return f"{type(error).__name__}: {error} (the traceback is above)"
    finally:
        # glibc keeps freed memory, and a study of many runs would come to hold gigabytes.
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    return ""


def _run_in_parallel(
    study: Study, folder: Path, resume: bool, jobs: int, on_record: OnRecord, on_step: OnRunStep
) -> dict[str, str]:
    waiting, share = list(study.experiments), max(1, processors() // jobs)
    inbox: queue.SimpleQueue[tuple[WorkerProcess, dict[str, Any] | None]] = queue.SimpleQueue()
    workers: list[WorkerProcess] = []
    running: dict[WorkerProcess, str] = {}
    failed: dict[str, str] = {}

    def start_next_run(worker: WorkerProcess) -> None:
        slug = running[worker] = waiting.pop(0)
        table = as_table(study.experiments[slug])
        worker.send({"table": table, "path": str(folder / slug), "resume": resume, "processors": share})

    def start_workers(number: int) -> None:
        with interrupts_deferred():
            for _ in range(number):
                workers.append(WorkerProcess(start_python("fedblend.runs.parallel:serve_runs"), inbox))
                start_next_run(workers[-1])

    try:
        start_workers(jobs)
        while running:
            try:
                worker, message = inbox.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if worker not in running:
                # It has ended without a run.
                continue
            if message is None:
                slug = running.pop(worker)
                failed[slug] = f"its process {worker.how_it_ended()}; go on with: fedblend resume {folder}"
                start_workers(1 if waiting else 0)
            elif "record" in message:
                on_record(running[worker], RoundRecord.from_dict(message["record"]))
            elif "step" in message:
                on_step(running[worker], *message["step"])
            elif "warning" in message:
                # Python shows a warning once, also if several processes send it.
                warnings.warn(message["warning"], stacklevel=2)
            else:
                failed[running.pop(worker)] = message["failure"]
                if waiting:
                    start_next_run(worker)
    finally:
        # A second Ctrl-C must not interrupt the shutdown.
        with interrupts_ignored():
            for worker in workers:
                worker.send(STOP)
            for worker in workers:
                worker.wait()
    return {slug: failed[slug] for slug in study.experiments if failed[slug]}


STOP = {"stop": True}  # The message that stops a worker's run after its last checkpoint, and ends the worker


def serve_runs(parent: Parent) -> None:
    """Run the experiments that the parent sends, one after another, in a worker process, until it sends STOP."""
    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    stopped = threading.Event()

    def handle(message: dict[str, Any]) -> None:
        if message == STOP:
            stopped.set()
            signal.raise_signal(signal.SIGINT)
        tasks.put(message)

    def show_warning(message: Warning | str, *place: object, **more: object) -> None:
        parent.send({"warning": str(message)})

    warnings.showwarning = show_warning
    parent.listen(handle)
    while (task := tasks.get()) != STOP:
        parent.send({"failure": _run_in_worker(parent, stopped, **task)})


def _run_in_worker(
    parent: Parent, stopped: threading.Event, table: dict[str, Any], path: str, resume: bool, processors: int
) -> str:
    """Run one experiment in a worker process; Ctrl-C stops it after its last checkpoint."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Only once: terminal and parent both send the signal, and the second would interrupt the shutdown.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    sent = time.monotonic()

    def send_step(what: str, done: int, total: int) -> None:
        nonlocal sent
        if time.monotonic() - sent >= STEP_SECONDS:
            sent = time.monotonic()
            parent.send({"step": [what, done, total]})

    def send_record(record: RoundRecord) -> None:
        parent.send({"record": record.as_dict()})

    ended = "stopped"
    try:
        signal.signal(signal.SIGINT, interrupt)
        try:
            # The signal may have come before its handler.
            if not stopped.is_set():
                ended = run_one(resolve(table), Path(path), resume, send_record, processors, send_step)
        finally:
            # The signal may still come while this line is executed.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except (Stopped, KeyboardInterrupt):
        pass
    except FedblendError as error:
        ended = str(error)
    sys.stderr.flush()
    return ended
