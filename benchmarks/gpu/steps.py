"""What is measured on one GPU, in steps of eight minutes that go on where the last one stopped.

    make gpu STEP=1         or    python benchmarks/gpu/steps.py 1 [--kept FOLDER] [--data FOLDER] [--seconds 480]
    make gpu STEP=commit    copy the results to benchmarks/results and evidence/results, and rewrite docs/benchmarks.md
    python benchmarks/gpu/steps.py 3 --device cpu --tiny       the same in small

README.md beside this file has the order, and what to carry to a machine without a network. A step ends by itself within
its seconds. Its results are then in the folder of --kept: ``gpu.json``, the item's ``result.json``, and an archive of each
run (13.4 MiB until it has ended). With these files the same command goes on, on another machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import machine
import page
import torch
from contestants import ROOT

sys.path.extend(str(ROOT / folder) for folder in ("", "benchmarks/peers", "evidence"))

import run
from fedblend_job import table_of
from jobs import JOBS, write

from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.record import RoundRecord
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.trials import make_trial, train_trial
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.setup import make_setup
from fedblend.papers.paths import RUNS, OutputPaths
from fedblend.papers.plan import plan_item
from fedblend.papers.result import RESULT
from fedblend.papers.run_item import run_item
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import read

Result = dict[str, Any]

ITEM = "fedmix/choice-vgg-long"
PAPER_ROWS = ["fedavg", "naivemix", "fedmix", "fedmix-twice"]
TRAINING: dict[str, tuple[int, list[str]]] = {
    str(first + seed): (seed, only)
    for first, only in ((3, ["plain", *PAPER_ROWS]), (6, ["momentum", *PAPER_ROWS]), (9, ["fedmix-checked"]))
    for seed in range(3)
}
"""Steps that train: the seed, and rows and columns of the item. Four runs share the card, or two."""

TESTS = ("tests/kernels/test_gpu.py", "tests/engines/test_graphs.py", "tests/engines/test_devices.py")
AGREEMENT = ("tests/engines/second_device.py", "cuda")
"""Trains every method and part in the loop, in stacks and with CUDA graphs, beside the processor."""

SPARE = 30.0
"""Seconds before a step's end after which no new round, test or cohort is begun: results are written then."""

FIRST_REPEAT = 400.0
"""Seconds in which all contestants of job A or D have had their first turn, by estimate."""

COHORTS = (15, 30, 60, 120, 240, 480)
"""Clients in one stack."""


class Step:
    """One call: the device, where results are kept, and how much time is left."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device: str = given.device
        self.tiny: bool = given.tiny
        self.kept: Path = given.kept
        self.end = time.monotonic() + given.seconds
        self.kept.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds that are left for work."""
        return self.end - SPARE * (not self.tiny) - time.monotonic()

    @property
    def found(self) -> Result:
        """What earlier calls measured."""
        path = self.kept / "gpu.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def keep(self, kind: str, name: str, result: Result) -> None:
        """Add a result to ``gpu.json``, with the day, the card and the code."""
        card = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        found = self.found
        found.setdefault(kind, {})[name] = {**machine.when_and_where(), "gpu": card, **result}
        replacement = self.kept / "gpu.json.new"
        replacement.write_text(json.dumps(found, indent=1) + "\n")
        replacement.replace(self.kept / "gpu.json")

    @contextmanager
    def until_its_end(
        self, experiments: dict[str, Experiment], rounds: Mapping[str, int]
    ) -> Iterator[Callable[[str, RoundRecord], None]]:
        """Stop runs, as Ctrl-C does, after the first round that ends when no time is left."""

        def on_record(name: str, record: RoundRecord) -> None:
            if record.round % 10 == 0 or record.round == experiments[name].rounds:
                print(f"{name}: round {record.round} of {experiments[name].rounds}", flush=True)
            if self.left <= 0:
                raise KeyboardInterrupt

        yield on_record

    def command(self, words: list[str]) -> tuple[int | None, str, float]:
        """Run Python with these words while time is left: the exit status (``None``: no time), output and seconds."""
        begun = time.monotonic()
        with tempfile.TemporaryFile("w+") as out:
            one = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | None = one.wait(max(1.0, self.left))
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
            out.seek(0)
            text = out.read()
        print(text[-3000:], flush=True)
        return status, text, time.monotonic() - begun


def tests(step: Step) -> bool:
    """Step 1: the tests of the GPU's kernels, and that engines agree on the card."""
    pytest = ["-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider"]
    commands = {
        path: [*pytest, *(["-m", "not slow"] if step.tiny else []), path] for path in TESTS[: 1 if step.tiny else None]
    }
    if step.device == "cuda":
        commands[AGREEMENT[0]] = list(AGREEMENT)
    for name, words in commands.items():
        if name not in step.found.get("tests", {}) and step.left > 0:
            status, text, seconds = step.command(words)
            if status is not None:
                last = text.strip().splitlines()[-1:] or [""]
                step.keep("tests", name, {"status": status, "says": last[0], "seconds": round(seconds)})
    return commands.keys() <= step.found.get("tests", {}).keys()


def rounds(step: Step) -> bool:
    """Step 2: jobs A and D beside pfl on the same card, and the largest cohort in one stack."""
    jobs = ["C"] if step.tiny else ["A", "D"]
    more = ["--only", "stacked-2", "--rounds", "3", "--repeats", "1"] if step.tiny else []
    for job in jobs:
        # A job is kept as a whole, so it needs the time of a call.
        if job not in step.found.get("jobs", {}) and step.left > (0 if step.tiny else FIRST_REPEAT):
            limit = ["--spare", "0", "--limit", str(round(step.left - 60)), "--out", str(step.kept / "gpu.json")]
            step.command(["benchmarks/rounds.py", "--device", step.device, "--jobs", job, *limit, *more])
    if "largest" not in step.found.get("memory", {}) and step.left > 0:
        largest(step)
    return step.found.get("jobs", {}).keys() >= set(jobs) and "largest" in step.found.get("memory", {})


def largest(step: Step) -> None:
    """Train larger and larger cohorts of job D's network in one stack, until the card's memory is full."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.npz"
        job = JOBS["C" if step.tiny else "D"]
        write(job, path)
        table = table_of(job, str(path), False) | {"rounds": 1, "device": step.device, "precision": "tf32"}
        setup = make_setup(resolve(table | {"method": "fedmix"}))
    for clients in (2,) if step.tiny else COHORTS:
        if str(clients) in step.found.get("memory", {}) or step.left <= 0:
            continue
        begun = time.monotonic()
        try:
            engine = StackedEngine(setup, step.device, clients)
            train_trial(engine, make_trial(engine, clients, 2))
        except torch.OutOfMemoryError:
            break
        peak = torch.cuda.max_memory_allocated() if step.device == "cuda" else 0
        step.keep("memory", str(clients), {"peak_bytes": peak, "seconds": round(time.monotonic() - begun, 1)})
    if step.left > 0:
        step.keep("memory", "largest", {"clients": max(map(int, step.found["memory"]))})


def train(step: Step, seed: int, only: list[str]) -> bool:
    """Train the runs of one seed together, from the archives of earlier calls, until they end or time is over."""
    plan = plan_item(ITEM, "smoke" if step.tiny else "paper", [seed], only)
    output = OutputPaths(step.kept / "work", plan)
    runs, result = output.folder / RUNS, output.folder / RESULT
    for archive in step.kept.glob("*.tar"):
        if not (runs / archive.stem).exists():
            with tarfile.open(archive) as packed:
                packed.extractall(runs, filter="data")
    if (step.kept / RESULT).exists():
        output.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(step.kept / RESULT, result)
    try:
        run_item(
            plan, output.out, step.until_its_end, jobs=1 if step.tiny else len(plan.cells_to_run), device=step.device
        )
        done = True
    except Stopped:
        done = False
    shutil.copyfile(result, step.kept / RESULT)
    made = [output.all_runs(cell).get(seed) for cell in plan.cells_to_run]
    return all([pack(RunDirectory(path), step.kept) for path in made if path]) and done


def pack(made: RunDirectory, kept: Path) -> bool:
    """Archive a run, without its checkpoint once it has ended; returns whether it has."""
    archive, outcome = kept / f"{made.path.name}.tar", read(made)
    ended = outcome.finished or outcome.state == "failed"
    with tarfile.open(archive.with_suffix(".new"), "w") as packed:
        packed.add(
            made.path, made.path.name, filter=lambda one: None if ended and one.name.endswith(checkpoint.NAME) else one
        )
    archive.with_suffix(".new").replace(archive)
    size = archive.stat().st_size / 2**20
    print(f"{made.path.name}: {outcome.state}, round {outcome.round}, {size:.2f} MiB", flush=True)
    return ended


def commit(kept: Path) -> None:
    """Copy what was measured to the committed results, and rewrite docs/benchmarks.md."""
    if (kept / "gpu.json").exists():
        path = ROOT / "benchmarks" / "results" / "gpu.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for kind, results in json.loads((kept / "gpu.json").read_text()).items():
            found[kind] = found.get(kind, {}) | results
        path.write_text(json.dumps(found, indent=1) + "\n")
        page.write()
    if (kept / RESULT).exists():
        run.commit_result(run.RESULTS / f"{ITEM}-paper.json", kept)


def main(words: Sequence[str] | None = None) -> None:
    """Make one step, or go on with it."""
    steps: dict[str, Callable[[Step], bool]] = {"1": tests, "2": rounds}
    steps |= {name: partial(train, seed=seed, only=only) for name, (seed, only) in TRAINING.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*steps, "commit"])
    parser.add_argument(
        "--kept", type=Path, default=ROOT / "runs" / "gpu", help="folder of what is carried from call to call"
    )
    parser.add_argument("--data", type=Path, help="folder with the data_batch files of CIFAR10, and MNIST's for job A")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which the step has ended")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same in small, with the package's own digits")
    given = parser.parse_args(words)
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
