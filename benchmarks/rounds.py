"""A round of federated averaging in fedblend, in a bare PyTorch loop and in other frameworks, timed in turn.

    python benchmarks/rounds.py                       all jobs and contestants that are set up
    python benchmarks/rounds.py --jobs A --only bare auto stacked-5 pfl-2
    python benchmarks/rounds.py --same-work           do all of them do the same work?
    python benchmarks/rounds.py --isa avx2            limited to an instruction set (machine.py)
    chrt -r 5 python benchmarks/rounds.py             on a busy machine: others only get what is left
    python benchmarks/rounds.py --device cuda         jobs A and D on a GPU, beside pfl

The jobs are said in peers/jobs.py, the contestants in contestants.py. Every measurement is a process of its own; all
contestants have their turn before the next repeat. What others compute meanwhile is watched (quiet.py), and a
measurement that they disturbed is thrown away and made again. Whole jobs go to
benchmarks/results/rounds-PROCESSOR.json, and from there to docs/benchmarks.md (page.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
import page
import torch
from contestants import ENVIRONMENT, HERE, Contestant, contestants, fedblend, on_a_gpu
from quiet import QUIET, run_marked, wait_until_quiet
from rich.console import Console
from rich.table import Table

sys.path.append(str(HERE / "peers"))

from jobs import lenet5

from fedblend.core.files import write_json

JOBS = {"cpu": ("A", "B", "C"), "cuda": ("A", "D")}
"""The jobs that are timed, by device."""
WARM_UP = 2
"""Rounds that every contestant leaves out of its median (peers/outcome.py)."""

TIMEOUT = 600.0
"""Seconds after which a contestant is taken to hang."""

ABOVE_CHANCE = 1.5
"""Accuracy that a trained model must have at least, in multiples of chance."""

ALIKE = (0.5, 2.0)
"""How long a contestant's change of the weights may be, beside the bare loop's over the same rounds."""

PACE_SECONDS = 0.4
"""How long the machine's own pace is measured."""

SLOW = 1.3
"""How much slower than at its best a machine may be: the host of a virtual one may be busy unseen."""

SAME_WORK = 0.05
"""How far weights may be from the bare loop's after one round, as a share of what that round changed.

Job C's network, whose first steps are wild, blows a last bit up to a per cent."""

OTHER_ORDER = fedblend("other-order", "loop on shuffled batches", "check", "--engine loop")
"""Beside the others in that check, to see what other work looks like."""

KEPT = ("median_s", "round_s", "warm_up_s", "accuracy", "change_norm", "load")
KEPT_OF_FEDBLEND = ("choice", "start_s", "phases_s", "evaluated")
"""What is kept of a contestant's own result."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How often a job is measured, for how many rounds each time, and seconds for measurements made again.

    A repeat that would end after ``limit`` seconds is not begun, but for the first.
    """

    repeats: int
    rounds: int
    spare: float
    limit: float


PLANS = {name: Plan(2, 5, 100, 540) for name in "BCD"} | {"A": Plan(3, 6, 40, 420)}
"""So that job A takes seven minutes at most, and A, B and C together twenty-five."""

console = Console() if sys.stdout.isatty() else Console(width=120)


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    known = list(dict.fromkeys(one.id for device, jobs in JOBS.items() for job in jobs for one in all_of(job, device)))
    parser = argparse.ArgumentParser(description="Time rounds of federated averaging in fedblend and beside it.")
    parser.add_argument("--device", choices=sorted(JOBS), default="cpu")
    parser.add_argument("--jobs", nargs="+", choices=sorted(PLANS), help="A, B and C, or on a GPU A and D")
    parser.add_argument("--only", nargs="+", choices=known, metavar="CONTESTANT", help=f"of {', '.join(known)}")
    parser.add_argument("--repeats", type=int, help="measurements of each contestant")
    parser.add_argument("--rounds", type=int, help=f"rounds in each measurement; the first {WARM_UP} warm up")
    parser.add_argument("--spare", type=float, help="seconds for a job's disturbed measurements to be made again")
    parser.add_argument("--limit", type=float, help="seconds after which no further repeat of a job ends")
    parser.add_argument("--same-work", action="store_true", help="compare weights after one round instead of timing")
    machine.add_option(parser)
    told = "results; rounds-PROCESSOR.json or gpu.json in benchmarks/results unless --only is given"
    parser.add_argument("--out", type=Path, help=told)
    given = parser.parse_args()
    if given.rounds is not None and given.rounds <= WARM_UP:
        parser.error(f"--rounds must be more than {WARM_UP}")
    given.jobs = given.jobs or JOBS[given.device]
    if wrong := [job for job in given.jobs if job not in JOBS[given.device]]:
        parser.error(f"not timed on {given.device}: job {wrong[0]}; valid: {', '.join(JOBS[given.device])}")
    if given.device == "cuda" and given.same_work:
        parser.error("--same-work compares what processors compute")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    return given


def all_of(job: str, device: str) -> list[Contestant]:
    """All contestants of a job."""
    return on_a_gpu(job) if device == "cuda" else contestants(job)


def ready(job: str, given: argparse.Namespace) -> list[Contestant]:
    """The contestants that are wanted and set up; says how to set up the others."""
    wanted = [one for one in all_of(job, given.device) if not given.only or one.id in given.only]
    for setup in dict.fromkeys(one.missing for one in wanted if one.missing):
        console.print(f"left out, since not set up; to set up: {setup}")
    return [one for one in wanted if not one.missing]


def write_job(job: str, path: Path, *more: str) -> Path:
    """Write a job's file. Ends the program with jobs.py's own words if that fails (without the data, for one)."""
    command = [sys.executable, str(HERE / "peers" / "jobs.py"), job, str(path), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"job {job} could not be written: {done.stderr.strip().splitlines()[-1]}")
    return path


def once(one: Contestant, job: Path, rounds: int, more: Sequence[str] = ()) -> Result:
    """Start a contestant; returns its result, with the machine's pace before and what others used meanwhile."""
    out = job.with_name("result.json")
    out.unlink(missing_ok=True)
    now = pace()
    begun = time.perf_counter()
    _, watch = run_marked(one.command(job, rounds, out, more), f"{os.getpid()}-{begun}", ENVIRONMENT, TIMEOUT)
    wall = time.perf_counter() - begun
    return json.loads(out.read_text()) | {"wall_s": wall, "pace_ms": now, "foreign": round(watch.foreign, 3)}


class Conditions:
    """Under what conditions a job is measured: how fast the machine is at its best, and seconds to measure again."""

    def __init__(self, spare: float) -> None:
        self.spare = spare
        self.best = math.inf

    def fault(self, result: Result) -> str:
        """Why a measurement says little, or nothing if it is sound."""
        self.best = min(self.best, result["pace_ms"])
        slower = result["pace_ms"] / self.best
        if result["foreign"] > QUIET and not machine.is_real_time():
            return f"others used {result['foreign']:.0%} of a core"
        return f"the machine is {slower:.1f} times as slow as it was" if slower > SLOW else ""


def measured(one: Contestant, job: Path, rounds: int, conditions: Conditions) -> Result:
    """One measurement, made again while it is disturbed and there is time; the best of them is kept."""
    tries: list[Result] = []
    while not tries or (conditions.fault(tries[-1]) and conditions.spare > 0):
        begun = time.perf_counter()
        if tries:
            wait_until_quiet(conditions.spare / 2)
        tries.append(once(one, job, rounds))
        conditions.spare -= (time.perf_counter() - begun) if len(tries) > 1 else 0
        fault = conditions.fault(tries[-1])
        console.print(
            f"  {one.label}: {tries[-1]['median_s']:.3f} s a round" + (f"; disturbed: {fault}" if fault else "")
        )
    kept = min(tries, key=lambda result: (bool(conditions.fault(result)), result["foreign"]))
    return kept | {"discarded": len(tries) - 1}


def pace() -> float:
    """Milliseconds of a step of LeNet-5 in this process, now: how fast the machine is by itself."""
    torch.set_num_threads(1)
    model, x, y = lenet5(dropout=False), torch.randn(10, 1, 28, 28), torch.zeros(10, dtype=torch.int64)
    seconds, end = [], time.perf_counter() + PACE_SECONDS
    while time.perf_counter() < end:
        begun = time.perf_counter()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        seconds.append(time.perf_counter() - begun)
    return 1000 * statistics.median(seconds)


def timed(job: str, plan: Plan, given: argparse.Namespace) -> Result:
    """All contestants on a job, in turn, repeat by repeat."""
    conditions = Conditions(plan.spare)
    took_part = ready(job, given)
    repeats: dict[str, list[Result]] = {one.id: [] for one in took_part}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_job(job, Path(folder) / f"{job}.npz")
        begun = time.perf_counter()
        for repeat in range(plan.repeats):
            # As long as those before took, on average.
            if repeat and (time.perf_counter() - begun) * (repeat + 1) / repeat > plan.limit:
                console.print(f"no time for another repeat in {plan.limit / 60:.0f} minutes (--limit)")
                break
            console.print(f"job {job}, repeat {repeat + 1} of {plan.repeats}")
            # Forwards and backwards, so that a machine that grows slower is nobody's disadvantage.
            for one in took_part[:: -1 if repeat % 2 else 1]:
                if one.id not in failed:
                    try:
                        repeats[one.id].append(measured(one, path, plan.rounds, conditions))
                    except subprocess.SubprocessError as error:
                        failed[one.id] = str(error)
                        console.print(f"{one.label} failed: {error}", style="red", markup=False)
    done = {one.id: told_of(one, repeats[one.id], conditions) for one in took_part if one.id not in failed}
    where = {"device": given.device}
    if given.device == "cuda":
        where["gpu"] = torch.cuda.get_device_name()
    return {**facts(job, plan, repeats), **where, "contestants": done, "failed": failed, "faults": faults(done)}


def told_of(one: Contestant, repeats: Sequence[Result], conditions: Conditions) -> Result:
    """A contestant's repeats as one."""
    keys = (*KEPT, *KEPT_OF_FEDBLEND, "wall_s", "pace_ms", "foreign")
    return {
        "label": one.label,
        "kind": one.kind,
        "median_s": statistics.median(result["median_s"] for result in repeats),
        "accuracy": repeats[-1]["accuracy"],
        "change_norm": repeats[-1]["change_norm"],
        "chance": repeats[-1]["chance"],
        "discarded": sum(result["discarded"] for result in repeats),
        "disturbed": any(conditions.fault(result) for result in repeats),
        "repeats": [{key: result[key] for key in keys if key in result} for result in repeats],
    }


def faults(done: dict[str, Result]) -> dict[str, str]:
    """Why a contestant's weights cannot be right, of those where one sees it."""
    base = done.get("bare", {}).get("change_norm")
    found = {}
    for name, one in done.items():
        moved = one["change_norm"]
        if not math.isfinite(moved) or moved <= 0:
            found[name] = "its weights did not change, or not to numbers"
        elif one["accuracy"] < ABOVE_CHANCE * one["chance"]:
            found[name] = f"its accuracy, {one['accuracy']:.3f}, is near chance"
        elif base and one["kind"] != "method" and not ALIKE[0] <= moved / base <= ALIKE[1]:
            found[name] = f"its weights moved by {moved:.2f}, the bare loop's by {base:.2f}"
    for name, fault in found.items():
        console.print(f"[red]{done[name]['label']}: {fault}")
    return found


def facts(job: str, plan: Plan, repeats: dict[str, list[Result]]) -> Result:
    """Where, when and with what a job was timed."""
    versions: dict[str, str] = {}
    for results in repeats.values():
        versions |= results[0]["versions"] if results else {}
    settings: Result = next((results[0]["settings"] for results in repeats.values() if results), {})
    tested = {"A": 10_000, "B": 10_000, "C": 2_000, "D": 2_000}[job]
    return {
        **machine.when_and_where(),
        "settings": settings | {"test_samples": tested},
        "versions": versions,
        "repeats": max(map(len, repeats.values()), default=0),
        "rounds": plan.rounds,
        "warm_up": WARM_UP,
    }


def results(device: str) -> Path:
    """Where the results of whole jobs go."""
    return HERE / "results" / ("gpu.json" if device == "cuda" else f"rounds-{machine.kind()}.json")


def same_work(job: str, given: argparse.Namespace) -> Result:
    """How far each contestant's weights are from the bare loop's after one round without dropout."""
    took_part = [one for one in ready(job, given) if one.kind != "method"]
    base = next(one for one in contestants(job) if one.kind == "base")
    apart: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_job(job, Path(folder) / f"{job}.npz", "--no-dropout")
        with np.load(path) as file:
            start = {name.removeprefix("start/"): file[name] for name in file.files if name.startswith("start/")}
        right = weights_of(base, path)
        for one in [*took_part, OTHER_ORDER]:
            if one.kind != "base":
                made = weights_of(one, path)
                apart[one.id] = distance(made, right) / distance(start, right)
                console.print(f"  {one.label}: {apart[one.id]:.0e} of the change away from the bare loop")
                if (apart[one.id] <= SAME_WORK) == (one == OTHER_ORDER):
                    console.print("[red]  which is not the same work" if one != OTHER_ORDER else "[red]  too near")
    labels = {one.id: one.label for one in [*took_part, OTHER_ORDER]}
    return {**machine.when_and_where(), "apart": apart, "labels": labels}


def weights_of(one: Contestant, job: Path) -> dict[str, np.ndarray]:
    """A contestant's weights after one round, on batches in the stored order."""
    weights = job.with_name("weights.npz")
    stored = one.script == "fedblend" and one != OTHER_ORDER
    more = ["--weights", str(weights), *(["--stored-order"] if stored else [])]
    once(one, job, 1, more)
    with np.load(weights) as file:
        return {name: file[name] for name in file.files}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The length of the difference of two sets of weights."""
    return math.sqrt(sum(float(np.square(a[name].astype(np.float64) - b[name]).sum()) for name in b))


def show(name: str, job: Result) -> None:
    """Print a job's table."""
    timed = job["contestants"]
    peer = page.fastest(timed, "peer")
    table = Table("contestant", "s a round", "repeats", "x the fastest peer", "accuracy", title=f"job {name}")
    for one in timed.values():
        medians = [repeat["median_s"] for repeat in one["repeats"]]
        times = f"{page.quotient(peer, one):.2f}" if peer else ""
        seconds = f"{page.seconds_of(one):.3f}" + page.mark(one)
        table.add_row(one["label"], seconds, f"{min(medians):.3f}-{max(medians):.3f}", times, f"{one['accuracy']:.3f}")
    console.print(table)


def keep(out: Path, kind: str, name: str, found: Result) -> None:
    """Put a job's results in the place of its earlier ones."""
    results = json.loads(out.read_text()) if out.exists() else {}
    results.setdefault(kind, {})[name] = found
    results[kind] = dict(sorted(results[kind].items()))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, results)


def plan_of(job: str, given: argparse.Namespace) -> Plan:
    """A job's plan, but for what is given."""
    asked = {field: getattr(given, field) for field in ("repeats", "rounds", "spare", "limit")}
    return replace(PLANS[job], **{field: value for field, value in asked.items() if value is not None})


def main() -> None:
    """Time or check the jobs that are asked for."""
    given = arguments()
    machine.limit(given.isa)
    # Some contestants alone are no whole job: they do not take the place of one.
    out = given.out or (None if given.only else results(given.device))
    begun = time.perf_counter()
    for job in given.jobs:
        if given.same_work:
            console.print(f"job {job}: one round without dropout")
            kind, found = "same_work", same_work(job, given)
        else:
            kind, found = "jobs", timed(job, plan_of(job, given), given)
            show(job, found)
        if out:
            keep(out, kind, job, found)
    if out == results(given.device):
        page.write()
    console.print(f"{(time.perf_counter() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
