"""Run the experiments of a study, one after another or in parallel processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType
from typing import Any

from fedblend.core.errors import FedblendError, Stopped, by_reason, listed
from fedblend.engines.distributed.ranks import started_by_torchrun
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.study import Study
from fedblend.runs.callbacks import Listener
from fedblend.runs.directory import RunDirectory, has_runs, locked_study, remove_study, write_study
from fedblend.runs.runner import SAME_EXPERIMENT, execute, first_difference
from fedblend.runs.warm_start import source_run

OnRecord = Callable[[str, dict[str, Any]], None]

POLL_SECONDS = 0.2
"""Seconds between two checks of the processes' records and of the stop event."""


def run_all(study: Study, folder: Path, resume: bool, jobs: int | None, on_record: OnRecord) -> dict[str, str]:
    """Run every experiment of a study in ``folder``; return the error message of each failed run, by its name.

    ``jobs`` is the number of parallel runs (default: the number of processors, at most the number of runs). A failed
    run does not stop the others. Ctrl-C raises :class:`Stopped`; all runs can then be resumed. Raises
    :class:`FedblendError` before the first run if a run to resume has another experiment.
    """
    jobs = 1 if started_by_torchrun() else min(len(study.experiments), jobs or _default_jobs(study))
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with locked_study(folder):
            return _run_locked(study, folder, resume, jobs, on_record)
    finally:
        if created and not has_runs(folder):
            # An invalid experiment leaves no empty study.
            remove_study(folder, created)


def _run_locked(study: Study, folder: Path, resume: bool, jobs: int, on_record: OnRecord) -> dict[str, str]:
    if resume:
        _require_same_experiments(study, folder)
    # Written before the first run, so that a resume includes runs that have not started.
    write_study(folder, study.name, {slug: as_table(e) for slug, e in study.experiments.items()})
    try:
        failed: dict[str, str] = {}
        for wave in waves(study):
            parallel = min(jobs, len(wave.experiments))
            if parallel <= 1:
                failed |= _run_sequentially(wave, folder, resume, on_record)
            else:
                failed |= _run_in_parallel(wave, folder, resume, parallel, on_record)
        return failed
    except (KeyboardInterrupt, Stopped):
        if not has_runs(folder):
            raise Stopped("stopped before the first run began") from None
        raise Stopped(
            f"stopped; each run is kept up to its last checkpoint. Go on with: fedblend resume {folder}"
        ) from None


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
    """Raise :class:`FedblendError` if an experiment differs from the one that its run began with."""
    started = {slug: e for slug, e in study.experiments.items() if RunDirectory.is_run(folder / slug)}
    fields = {slug: first_difference(RunDirectory(folder / slug), experiment) for slug, experiment in started.items()}
    different = {slug: field for slug, field in fields.items() if field}
    if different:
        raise FedblendError(f"{join_failures(different, len(study.experiments))} in {folder}; {SAME_EXPERIMENT}")


def _default_jobs(study: Study) -> int:
    """Return the default number of parallel runs: processors divided by the largest number of ranks."""
    return max(1, processors() // max((e.ranks or 1 for e in study.experiments.values()), default=1))


def processors() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_sequentially(study: Study, folder: Path, resume: bool, on_record: OnRecord) -> dict[str, str]:
    failed: dict[str, str] = {}
    for slug, experiment in study.experiments.items():

        def listen(record: dict[str, Any], slug: str = slug) -> None:
            on_record(slug, record)

        message = _run_one(experiment, folder / slug, resume, listen, processors())
        if message:
            failed[slug] = message
    return failed


def _run_one(experiment: Experiment, path: Path, resume: bool, listener: Listener, processors: int) -> str:
    """Run one experiment; return its error message, or an empty text. Raises :class:`Stopped` on Ctrl-C."""
    try:
        execute(experiment, path, resume, listener, processors)
    except Stopped:
        raise
    except FedblendError as error:
        return str(error)
    except Exception as error:
        # An error in a user-defined part: its author needs the traceback, and the other runs continue.
        traceback.print_exc()
        return f"{type(error).__name__}: {error} (the traceback is above)"
    return ""


def _run_in_parallel(study: Study, folder: Path, resume: bool, jobs: int, on_record: OnRecord) -> dict[str, str]:
    # Spawned, not forked: a forked process would inherit PyTorch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    records, stop = context.Queue(), context.Event()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_init_worker, initargs=(records, stop)) as pool:
        try:
            share = max(1, processors() // jobs)
            with _interrupts_ignored():
                futures = {
                    slug: pool.submit(_run_in_worker, as_table(experiment), folder / slug, resume, slug, share)
                    for slug, experiment in study.experiments.items()
                }
            _forward_records(list(futures.values()), records, on_record)
        except KeyboardInterrupt:
            # A second Ctrl-C must not interrupt the shutdown.
            with _interrupts_ignored():
                stop.set()
                pool.shutdown(cancel_futures=True)
            raise
    return {slug: message for slug, future in futures.items() if (message := _failure_message(future, folder / slug))}


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C in this process and in those started inside, which are still importing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _failure_message(future: Future[str], path: Path) -> str:
    try:
        return future.result()
    except BrokenProcessPool:
        return f"its process was killed (out of memory?); go on with: fedblend resume {path.parent}"


def _forward_records(futures: list[Future[str]], records: Any, on_record: OnRecord) -> None:
    """Pass records to ``on_record`` until all runs have ended."""
    while True:
        ended = all(future.done() for future in futures)
        try:
            while True:
                on_record(*records.get(timeout=POLL_SECONDS))
        except queue.Empty:
            if ended:
                return


class _Worker:
    """State of a worker process: the queue of records, and whether the run was stopped."""

    records: Any = None
    stopped = False


def _init_worker(records: Any, stop: Any) -> None:
    """Start a thread that waits for the stop event and for the end of the parent process.

    Only this thread reads ``stop``: an interrupt inside its lock would leave the lock held for all processes.
    """
    _Worker.records, _Worker.stopped = records, False
    # After a stop the queue has no reader, and the process must not wait for one at exit.
    records.cancel_join_thread()
    parent = multiprocessing.parent_process()

    def watch() -> None:
        while not stop.wait(POLL_SECONDS):
            if parent is not None and not parent.is_alive():
                # The parent was killed: exit, which releases the runs' locks.
                os._exit(1)
        _Worker.stopped = True
        signal.raise_signal(signal.SIGINT)
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_in_worker(table: dict[str, Any], path: Path, resume: bool, slug: str, processors: int) -> str:
    """Run one experiment in a worker process; Ctrl-C stops it after its last checkpoint."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Only once: terminal and parent both send the signal, and the second would interrupt the shutdown.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        if _Worker.stopped:
            # The pool queues one run more than it has processes.
            return "stopped"
        return _run_one(resolve(table), path, resume, lambda record: _Worker.records.put((slug, record)), processors)
    except (Stopped, KeyboardInterrupt):
        return "stopped"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.flush()
