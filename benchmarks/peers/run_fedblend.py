"""A round in fedblend, in its loop or stacked engine, on one rank or several, or as it chooses by itself.

What is timed is `RoundLoop.round`: the whole round of a run but for evaluation and checkpoints. Only the cohorts and
the first weights are the job's; batches are fedblend's own, shuffled anew, unless --stored-order is given. Samples
are kept as uint8 and scaled in every step, where the peers are given scaled floats.
"""

from __future__ import annotations

from fedblend.experiment.make_setup import make_setup

import one_thread  # noqa: F401  # isort: skip

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fedblend_job import table_of
from jobs import ROUNDS, Job, load
from outcome import WARM_UP, check_rounds, options, report, wait_for

from fedblend import engines
from fedblend.core.engine import Engine
from fedblend.core.loop import RoundLoop
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.engines.autotune import EnginePlan
from fedblend.experiment.config import Experiment, resolve

NEVER = 10**9
"""Rounds from one evaluation to the next where none is wanted."""

PROCESSORS = 2
"""Processors that ``--engine auto`` may use."""


class JobFederation(RoundLoop):
    """fedblend's rounds with the job's cohorts."""

    def __init__(self, setup: Setup, engine: Engine, job: Job) -> None:
        super().__init__(setup, engine)
        self.job = job
        # Nobody has the round's model before.
        self.cohorts.choose = lambda state: (job.cohorts[state.round], np.empty(0, np.int64))  # type: ignore

    def begin(self) -> RunState:
        """The state before the first round, with the job's first weights: the same tensors in the same order."""
        pairs = zip(self.setup.weights().items(), self.job.start.values(), strict=True)
        weights = {name: first.view_as(tensor).clone() for (name, tensor), first in pairs}
        clients = len(self.setup.population)
        return RunState(0, weights, np.zeros(clients, bool), np.zeros(clients, np.int64))


def experiment_of(job: Job, given: argparse.Namespace, eval_every: int = NEVER) -> Experiment:
    """The job as an experiment."""
    asked = {"engine": given.engine, "stack": given.stack, "ranks": given.ranks, "memory_format": given.memory_format}
    asked |= {"device": given.device, "precision": given.precision, "cuda_graphs": not given.no_graphs}
    table = table_of(job.settings, str(given.job.resolve()), given.stored_order)
    asked = {field: value for field, value in asked.items() if value is not None}
    # All rounds of the job, more than are run: auto chooses as for a long run, and none of these is the last.
    method: Any = given.method
    if given.lam is not None:
        method = {"name": method, "objective": {"lam": given.lam, "loss_scaling": False}}
    return resolve(table | asked | {"method": method, "rounds": ROUNDS, "eval_every": eval_every})


def timed_rounds(
    federation: RoundLoop, state: RunState, rounds: int
) -> tuple[RunState, list[float], list[RoundRecord]]:
    """Make some rounds; returns the state after them, the seconds of each and their records."""
    seconds, records = [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        state, record = federation.round(state)
        wait_for(federation.setup.experiment.device)
        seconds.append(time.perf_counter() - begun)
        records.append(record)
    return state, seconds, records


def require_cohorts(job: Job, records: Iterable[RoundRecord]) -> None:
    """Stop unless each round trained the job's clients: other clients are another amount of work."""
    for record in records:
        if record.cohort != job.cohort(record.round - 1):
            raise SystemExit(
                f"round {record.round} trained {record.cohort}, not the job's {job.cohort(record.round - 1)}"
            )


def medians_of(records: Iterable[RoundRecord]) -> dict[str, float]:
    """Median seconds of each phase of a round. Waiting for other ranks counts as "aggregate"."""
    tables = [record.machine["seconds"] for record in records]
    return {phase: statistics.median(t[phase] for t in tables) for phase in tables[0]} if tables else {}


Found = tuple[RunState, list[float], dict[str, object]]
"""The last state of the timed rounds, the seconds of each, and what else was seen."""


def run(job: Job, setup: Setup, engine: Engine, given: argparse.Namespace) -> Found:
    """Time the rounds, and then some with evaluation."""
    federation = JobFederation(setup, engine, job)
    state, seconds, records = timed_rounds(federation, federation.begin(), given.rounds)
    require_cohorts(job, records)
    found: dict[str, object] = {"phases_s": medians_of(records[WARM_UP:])}
    if given.evaluations:
        every = replace(setup, experiment=experiment_of(job, given, eval_every=1))
        _, whole, evaluated = timed_rounds(JobFederation(every, engine, job), state, given.evaluations)
        evaluate = [record.machine["seconds"]["evaluate"] for record in evaluated]
        found["evaluated"] = {"round_s": whole, "evaluate_s": evaluate}
    return state, seconds, found


def clocked(name: str, clock: dict[str, float], begun: float) -> float:
    """Note the seconds since ``begun``; returns the time now."""
    now = time.perf_counter()
    clock[name] = now - begun
    return now


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = options("fedblend", ranks=(1, 2, 4))
    parser.set_defaults(ranks=None)
    parser.add_argument("--engine", choices=("auto", "loop", "stacked"), default="auto")
    parser.add_argument("--stack", type=int, help="clients in one stack")
    parser.add_argument("--memory-format", choices=("contiguous", "channels_last"))
    parser.add_argument(
        "--method", default="fedavg", help="fedavg, naivemix, ...; what it shares is shared while warming up"
    )
    parser.add_argument("--lam", type=float, help="Fed-AugMix's lambda, without loss scaling")
    parser.add_argument("--stored-order", action="store_true", help="batches in the stored order, as the peers'")
    parser.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    parser.add_argument("--no-graphs", action="store_true", help="on a GPU, launch every operation by itself")
    parser.add_argument("--evaluations", type=int, default=0, help="further rounds that end with an evaluation")
    return parser.parse_args()


def main() -> None:
    """Time all rounds."""
    given = arguments()
    job = load(given.job)
    check_rounds(given, job)
    torch.set_num_threads(1)
    clock: dict[str, float] = {}
    now = time.perf_counter()
    setup = make_setup(experiment_of(job, given))
    now = clocked("world", clock, now)
    choice: EnginePlan = engines.plan_engine(setup, PROCESSORS, ROUNDS)
    now = clocked("choose", clock, now)
    engine = engines.make(setup, choice)
    clocked("ranks", clock, now)
    try:
        state, seconds, found = run(job, setup, engine, given)
    finally:
        engine.close()
    given.ranks = choice.ranks
    weights = dict(zip(job.start, (state.weights[name] for name in setup.weights()), strict=True))
    found |= {"method": given.method, "choice": choice.table(), "start_s": clock}
    told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.items())
    print(f"start: {told}; rounds that warm up: {', '.join(f'{s:.2f} s' for s in seconds[:WARM_UP])}")
    how = ", ".join(f"{field} {value}" for field, value in choice.table().items() if field != "why")
    print(f"{how}; {choice.why}")
    report("fedblend", ["fedblend"], job, given, seconds, weights, **found)


if __name__ == "__main__":
    main()
