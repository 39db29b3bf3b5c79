"""What is measured on one GPU, in steps of eight minutes that go on where the last call stopped.

    make gpu STEP=1         or    python benchmarks/gpu/steps.py 1 [--kept FOLDER] [--data FOLDER] [--seconds 480]
    make gpu STEP=commit    copy the results to benchmarks/results and evidence/results, and rewrite docs/benchmarks.md
    python benchmarks/gpu/steps.py 3 --device cpu --tiny       the same in small

README.md beside this file has the order, and what to carry to a machine without a network. A step ends by itself within
its seconds. Its results are then in the folder of --kept: ``gpu.json``, the item's ``result.json``, and archives of the
runs that have not ended. With these files the same command goes on, on another machine too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "benchmarks", "benchmarks/peers", "evidence")
)

import machine
import page
import rounds
import run
import torch
from contestants import ROOT
from fedblend_job import table_of
from jobs import JOBS, write

from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.record import RoundRecord
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.trials import make_trial, train_trial
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.papers.plan import plan_item
from fedblend.papers.result import RESULT, RUNS, OutputPaths
from fedblend.papers.run_item import run_item
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import read

ITEM = "fedmix/choice-vgg-long"
PAPER_ROWS = ("fedavg", "naivemix", "fedmix", "fedmix-twice")
TRAINING = {"3": ["plain", *PAPER_ROWS], "4": ["momentum", *PAPER_ROWS], "5": ["fedmix-checked"]}
"""Steps that train: rows and columns of the item. The runs of a seed share the card: four, or two in step 5."""

TESTS = (
    "tests/kernels/test_gpu.py",
    "tests/engines/test_cuda_graphs.py",
    "tests/engines/test_devices.py::test_all_methods_train_on_a_gpu_as_on_the_cpu",
)

SPARE = 60.0
"""Seconds before a step's end in which nothing new is begun: what has begun ends, and results are written."""


class Step:
    """One call: the device, where results are kept, and how much time is left."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device: str = given.device
        self.tiny: bool = given.tiny
        self.kept: Path = given.kept.resolve()
        self.end = time.monotonic() + given.seconds
        self.kept.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds that are left for work."""
        return self.end - SPARE * (not self.tiny) - time.monotonic()

    def found(self, kind: str) -> dict[str, Any]:
        """What earlier calls measured."""
        path = self.kept / "gpu.json"
        return json.loads(path.read_text()).get(kind, {}) if path.exists() else {}

    def keep(self, kind: str, name: str, says: str) -> None:
        """Add a result to ``gpu.json``, with the day, the card and the code."""
        card = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        print(f"{name}: {says}", flush=True)
        rounds.keep(self.kept / "gpu.json", kind, name, {**machine.when_and_where(), "gpu": card, "says": says})

    def on_runs(
        self, experiments: dict[str, Experiment], rounds: Mapping[str, int]
    ) -> AbstractContextManager[Callable[[str, RoundRecord], None]]:
        """Print new rounds, and stop all runs, as Ctrl-C does, after the first round that ends when no time is left."""

        def on_record(name: str, record: RoundRecord) -> None:
            if record.round > rounds[name] and (self.tiny or record.round % 10 == 0):
                print(f"{name}: round {record.round} of {experiments[name].rounds}", flush=True)
            if self.left <= 0:
                raise KeyboardInterrupt

        return nullcontext(on_record)


def tests(step: Step) -> bool:
    """Step 1: the tests of the GPU's kernels, and that engines agree on the card."""
    names, more = (TESTS[:1], ["-m", "not slow"]) if step.tiny else (TESTS, [])
    for name in names:
        if name in step.found("tests") or step.left <= 0:
            continue
        with tempfile.TemporaryFile("w+") as out:
            command = [sys.executable, "-m", "pytest", name, *more]
            one = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                with suppress(subprocess.TimeoutExpired):
                    one.wait(step.left)
            finally:
                status = one.poll()
                with suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
            out.seek(0)
            text = out.read().strip()
        print(text[-3000:], flush=True)
        if status is not None:
            step.keep("tests", name, "failed: " * (status != 0) + text.rpartition("\n")[2])
    return set(names) <= step.found("tests").keys()


def timed_jobs(step: Step) -> bool:
    """Step 2: jobs A and D beside pfl on the same card, and the largest cohort in one stack."""
    for job in "A" if step.tiny else "AD":
        plan = replace(rounds.PLANS[job], repeats=1, spare=0, **({"rounds": 3} if step.tiny else {}))
        for one in rounds.all_of(job, step.device):
            before = step.found("jobs").get(job, {})
            known = before.get("contestants", {}).keys() | before.get("failed", {}).keys()
            if one.missing or one.id in known or (step.tiny and one.id != "stacked-2"):
                continue
            if step.left <= 0:
                return False
            found = rounds.timed(job, plan, argparse.Namespace(device=step.device, only=[one.id]))
            for field in ("contestants", "failed", "versions"):
                found[field] = before.get(field, {}) | found[field]
            found["faults"] = rounds.faults(found["contestants"])
            rounds.keep(step.kept / "gpu.json", "jobs", job, found)
    if "largest" not in step.found("memory"):
        largest(step)
    return "largest" in step.found("memory")


def largest(step: Step) -> None:
    """Train larger and larger cohorts of job D's network in one stack, until the card's memory is full."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.npz"
        job = JOBS["A" if step.tiny else "D"]
        write(job, path)
        table = table_of(job, str(path), False) | {"rounds": 1, "device": step.device, "precision": "tf32"}
        setup = make_setup(resolve(table | {"method": "fedmix"}))
    fits = 0
    for clients in (2,) if step.tiny else (15, 30, 60, 120, 240, 480):
        if step.left <= 0:
            return
        try:
            engine = StackedEngine(setup, step.device, clients)
            train_trial(engine, make_trial(engine, clients, 2))
        except torch.OutOfMemoryError:
            break
        peak = torch.cuda.max_memory_allocated() if step.device == "cuda" else 0
        step.keep("memory", f"{clients:3} clients in one stack", f"{peak / 2**30:.1f} GiB at most")
        fits = clients
        del engine
        gc.collect()
    step.keep("memory", "largest", f"{fits} clients fit into one stack")


def train(step: Step, only: list[str]) -> bool:
    """Train the runs of a seed together, then those of the next, from the archives of earlier calls."""
    plans = [plan_item(ITEM, "smoke" if step.tiny else "paper", [seed], only) for seed in range(3)]
    output = OutputPaths(step.kept / "work", plans[0])
    runs, result = output.folder / RUNS, output.folder / RESULT
    runs.mkdir(parents=True, exist_ok=True)
    for archive in step.kept.glob("*.tar"):
        if not (runs / archive.stem).exists():
            with tarfile.open(archive) as packed:
                packed.extractall(runs, filter="data")
    if (step.kept / RESULT).exists():
        shutil.copyfile(step.kept / RESULT, result)
    done = False
    with suppress(Stopped):
        for plan in plans:
            jobs = 1 if step.tiny else len(plan.cells_to_run)
            run_item(plan, output.out, step.on_runs, jobs=jobs, device=step.device)
        done = True
    shutil.copyfile(result, step.kept / RESULT)
    left = filter(None, [pack(RunDirectory(path), step.kept) for path in sorted(runs.glob("*-seed*"))])
    step.keep("training", f"{ITEM} {only[0]}", "; ".join(left) or f"seeds 0 to 2 {'ended' if done else 'did not end'}")
    return done


def pack(made: RunDirectory, kept: Path) -> str:
    """Archive a run that has not ended, and say how far it is; a run that has ended is in the result."""
    archive, outcome = kept / f"{made.path.name}.tar", read(made)
    if outcome.finished:
        archive.unlink(missing_ok=True)
        return ""
    with tarfile.open(archive.with_suffix(".new"), "w") as packed:
        packed.add(made.path, made.path.name)
    archive.with_suffix(".new").replace(archive)
    return f"{made.path.name} {outcome.progress_text}"


def commit(kept: Path) -> None:
    """Copy what was measured to the committed results, and rewrite docs/benchmarks.md."""
    if (kept / "gpu.json").exists():
        for kind, results in json.loads((kept / "gpu.json").read_text()).items():
            for name, one in results.items():
                rounds.keep(rounds.results("cuda"), kind, name, one)
        page.write()
    if (kept / RESULT).exists():
        scale = json.loads((kept / RESULT).read_text())["scale"]
        run.commit_result(run.RESULTS / f"{ITEM}-{scale}.json", kept)


def main() -> None:
    """Make one step, or go on with it."""
    steps: dict[str, Callable[[Step], bool]] = {"1": tests, "2": timed_jobs}
    steps |= {name: partial(train, only=only) for name, only in TRAINING.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*steps, "commit"])
    told = "folder of what is carried from call to call"
    parser.add_argument("--kept", type=Path, default=ROOT / "runs" / "gpu", help=told)
    parser.add_argument("--data", type=Path, help="folder with the data_batch files of CIFAR10, and MNIST's for job A")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which the step has ended")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same in small, with the package's own digits")
    given = parser.parse_args()
    if given.step == "commit":
        return commit(given.kept)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    if given.data:
        os.environ["FEDBLEND_DATA"] = str(given.data.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        done = steps[given.step](Step(given))
    except FedblendError as error:
        raise SystemExit(f"step {given.step}: {error}") from None
    print(f"step {given.step}: {'done' if done else 'not done; the same command goes on'}", flush=True)


if __name__ == "__main__":
    main()
