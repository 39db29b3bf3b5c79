"""Running the experiments of a study: one after another, or several at once in processes of their own."""

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
"""Seconds between two looks at what the processes have sent, and at whether they should end."""


def run_all(study: Study, folder: Path, resume: bool, jobs: int | None, on_record: OnRecord) -> dict[str, str]:
    """Run every experiment of a study in ``folder``; returns the message of each that failed, by its name.

    ``jobs`` is how many run at once (default: as many as there are processors, at most one a run). A failed
    run stops no other. Ctrl-C raises :class:`Stopped`; all runs can then be resumed. Raises
    :class:`FedblendError` before any of them if one cannot go on, as it began with another experiment.
    """
    jobs = 1 if started_by_torchrun() else min(len(study.experiments), jobs or _default_jobs(study))
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with locked_study(folder):
            return _run_locked(study, folder, resume, jobs, on_record)
    finally:
        if made and not has_runs(folder):
            # A mistake in the experiment was found first: no empty study stays behind.
            remove_study(folder, made)


def _run_locked(study: Study, folder: Path, resume: bool, jobs: int, on_record: OnRecord) -> dict[str, str]:
    if resume:
        _require_same_experiments(study, folder)
    # Written before the first run, so that a resume knows also the runs that had not begun.
    write_study(folder, study.name, {slug: as_table(e) for slug, e in study.experiments.items()})
    try:
        failed: dict[str, str] = {}
        for wave in waves(study):
            several = min(jobs, len(wave.experiments))
            if several <= 1:
                failed |= _run_sequentially(wave, folder, resume, on_record)
            else:
                failed |= _run_in_parallel(wave, folder, resume, several, on_record)
        return failed
    except (KeyboardInterrupt, Stopped):
        if not has_runs(folder):
            raise Stopped("stopped before any run had begun") from None
        raise Stopped(
            f"stopped; everything up to each run's last checkpoint is kept. Go on with: fedblend resume {folder}"
        ) from None


def waves(study: Study) -> list[Study]:
    """The study's runs in parts, those that others begin with (``start``) before them.

    Raises :class:`FedblendError` for a run that would have to be there before itself.
    """
    depth: dict[str, int] = {}
    for slug in study.experiments:
        chain = [slug]
        while (source := source_run(study.experiments[chain[-1]])) in study.experiments:
            if source in chain:
                raise FedblendError(f"start: '{source}' begins with itself in the end; valid: a run that does not")
            chain.append(source)
        depth[slug] = len(chain) - 1
    return [
        Study(study.name, {slug: e for slug, e in study.experiments.items() if depth[slug] == level})
        for level in range(max(depth.values(), default=0) + 1)
    ]


def join_failures(faults: Mapping[str, str], runs: int) -> str:
    """What went wrong, by the names of the ``runs`` runs; what several have in common is told once.

    >>> in_one_message({"a-seed0": "no such file", "a-seed1": "no such file"}, 2)
    'all 2 runs: no such file'
    """
    told = []
    for fault, names in by_reason(faults.items()).items():
        told.append(f"all {runs} runs: {fault}" if len(names) == runs > 1 else f"{listed(names)}: {fault}")
    return "; ".join(told)


def _require_same_experiments(study: Study, folder: Path) -> None:
    """Raise an error that names the fields in which experiments differ from those their runs began with."""
    begun = {slug: e for slug, e in study.experiments.items() if RunDirectory.is_run(folder / slug)}
    fields = {slug: first_difference(RunDirectory(folder / slug), experiment) for slug, experiment in begun.items()}
    different = {slug: field for slug, field in fields.items() if field}
    if different:
        raise FedblendError(f"{join_failures(different, len(study.experiments))} in {folder}; {SAME_EXPERIMENT}")


def _default_jobs(study: Study) -> int:
    """Runs at once: one a processor, of which a run of several ranks takes as many."""
    return max(1, processors() // max((e.ranks or 1 for e in study.experiments.values()), default=1))


def processors() -> int:
    """Processors that this process may use."""
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
    """Run one experiment; returns the message of its failure, or nothing. :class:`Stopped` passes through."""
    try:
        execute(experiment, path, resume, listener, processors)
    except Stopped:
        raise
    except FedblendError as error:
        return str(error)
    except Exception as error:
        # A fault in someone's part: its author needs the traceback, the other runs need to go on.
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
            # A second Ctrl-C must not break the goodbye of the first.
            with _interrupts_ignored():
                stop.set()
                pool.shutdown(cancel_futures=True)
            raise
    return {slug: message for slug, future in futures.items() if (message := _failure_message(future, folder / slug))}


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Start processes that take no notice of Ctrl-C while they are still importing what they need."""
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
    """Pass records on until all runs have ended."""
    while True:
        ended = all(future.done() for future in futures)
        try:
            while True:
                on_record(*records.get(timeout=POLL_SECONDS))
        except queue.Empty:
            if ended:
                return


class _Worker:
    """What a process of the pool was given when it began, and whether it was told to stop."""

    records: Any = None
    stopped = False


def _init_worker(records: Any, stop: Any) -> None:
    """Watch, in a thread, for the order to stop and for the death of the command that began this process.

    Only that thread asks ``stop``: an interrupt in the midst of its lock would leave it locked for all processes.
    """
    _Worker.records, _Worker.stopped = records, False
    # Nobody reads records any more once the command stops; a process must not wait for that to end.
    records.cancel_join_thread()
    parent = multiprocessing.parent_process()

    def watch() -> None:
        while not stop.wait(POLL_SECONDS):
            if parent is not None and not parent.is_alive():
                # Killed, so nobody is left to train for, and the runs' locks must be freed.
                os._exit(1)
        _Worker.stopped = True
        signal.raise_signal(signal.SIGINT)
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_in_worker(table: dict[str, Any], path: Path, resume: bool, slug: str, processors: int) -> str:
    """Run one experiment in a process of the pool, which Ctrl-C stops in good order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Only once: the terminal and the command both send it, and the second would break the goodbye.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        if _Worker.stopped:
            # The pool hands out one run more than it has processes, before the command was stopped.
            return "stopped"
        return _run_one(resolve(table), path, resume, lambda record: _Worker.records.put((slug, record)), processors)
    except (Stopped, KeyboardInterrupt):
        return "stopped"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.flush()
