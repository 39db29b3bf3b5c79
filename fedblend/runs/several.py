"""Running the experiments of a study: one after another, or several at once in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from fedblend.config import Experiment, as_table, resolve
from fedblend.errors import FedblendError, Stopped
from fedblend.federation import Record
from fedblend.runs.runner import execute
from fedblend.study import Study

OnRecord = Callable[[str, Record], None]


def run_all(study: Study, folder: Path, resume: bool, jobs: int | None, on_record: OnRecord) -> dict[str, str]:
    """Run every experiment of a study in ``folder``; returns the message of each that failed, by its name.

    ``jobs`` is how many run at once (default: as many as there are processors, at most one a run). A failed
    run stops no other. Ctrl-C raises :class:`Stopped`; all runs can then be resumed.
    """
    jobs = min(len(study.experiments), jobs or processors())
    if jobs <= 1:
        return _one_by_one(study, folder, resume, on_record)
    return _at_once(study, folder, resume, jobs, on_record)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_by_one(study: Study, folder: Path, resume: bool, on_record: OnRecord) -> dict[str, str]:
    failed: dict[str, str] = {}
    for slug, experiment in study.experiments.items():
        try:
            execute(experiment, folder / slug, resume, lambda record, slug=slug: on_record(slug, record))  # type: ignore[misc]
        except Stopped:
            raise Stopped(_go_on(folder)) from None
        except FedblendError as error:
            failed[slug] = str(error)
    return failed


def _at_once(study: Study, folder: Path, resume: bool, jobs: int, on_record: OnRecord) -> dict[str, str]:
    # Spawned, not forked: a forked process would inherit PyTorch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        records: Any = manager.Queue()
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            futures = {
                slug: pool.submit(_in_process, as_table(experiment), folder / slug, resume, slug, records)
                for slug, experiment in study.experiments.items()
            }
            try:
                _follow(list(futures.values()), records, on_record)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise Stopped(_go_on(folder)) from None
    return {slug: message for slug, future in futures.items() if (message := future.result())}


def _in_process(table: dict[str, Any], path: Path, resume: bool, slug: str, records: Any) -> str:
    """Run one experiment in a process of the pool; returns the message of its failure, or nothing."""
    experiment: Experiment = resolve(table)
    try:
        execute(experiment, path, resume, lambda record: records.put((slug, record)))
    except Stopped:
        return "stopped"
    except FedblendError as error:
        return str(error)
    return ""


def _follow(futures: list[Future[str]], records: Any, on_record: OnRecord) -> None:
    """Pass records on until all runs have ended."""
    while True:
        ended = all(future.done() for future in futures)
        try:
            while True:
                on_record(*records.get(timeout=0.2))
        except queue.Empty:
            if ended:
                return


def _go_on(folder: Path) -> str:
    return f"stopped; everything up to each run's last checkpoint is kept. Go on with: fedblend resume {folder}"
