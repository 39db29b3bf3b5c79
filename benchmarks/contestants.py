"""Who is timed by rounds.py, and how each is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ENVIRONMENT = dict.fromkeys(THREADS, "1")
"""One thread a process: small models are fastest so, and every contestant has at most one process a core."""

STACKS = {"A": (1, 2, 5), "B": (4, 8, 25), "C": (1, 2)}
"""Clients in a stack, by job; the last is a rank's whole share of the cohort."""

COHORTS = {"A": 10, "D": 15}
"""Clients of a round, of the jobs that are timed on a GPU."""

METHODS = {"naivemix": "naivemix", "fedmix": "fedmix", "fed-augmix": "fed-augmix --lam 1"}
"""Methods beside FedAvg, and how they are asked for: with the paper's lambda of 50, a few rounds learn nothing."""
EVALUATIONS = 4
"""Further rounds of ``auto`` that end with an evaluation, in job A."""


@dataclass(frozen=True)
class Contestant:
    """One way to compute a job's rounds.

    ``kind`` is base, peer, fedblend (a choice of the user's), auto, method (auto with another method) or rounded (in
    numbers of fewer bits); ``peer`` names the environment under .peers/, where it has one of its own.
    """

    id: str
    label: str
    kind: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: str = ""

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        return ROOT / ".peers" / self.peer / "bin" / "python" if self.peer else Path(sys.executable)

    @property
    def missing(self) -> str:
        """The command that sets it up, or nothing if it can run."""
        return "" if self.python.exists() else f"benchmarks/peers/setup.sh {self.peer}"

    def command(self, job: Path, rounds: int, out: Path, more: Sequence[str] = ()) -> list[str]:
        """Its command line."""
        script = HERE / "peers" / f"run_{self.script}.py"
        words = (self.python, script, job, "--rounds", rounds, "--out", out, *self.arguments, *more)
        return [str(word) for word in words]


def fedblend(id: str, label: str, kind: str, words: str) -> Contestant:
    """fedblend with some options."""
    return Contestant(id, f"fedblend: {label}", kind, "fedblend", tuple(words.split()))


def contestants(job: str) -> list[Contestant]:
    """All that are timed on a job, on processors."""
    stacked = [
        fedblend(f"stacked-{k}", f"stacks of {k}, 2 ranks", "fedblend", f"--engine stacked --stack {k} --ranks 2")
        for k in STACKS[job]
    ]
    methods = [fedblend(name, f"auto, {name}", "method", f"--method {words}") for name, words in METHODS.items()]
    return [
        Contestant("bare", "bare PyTorch loop", "base", "bare"),
        Contestant("pfl-1", "pfl, 1 rank", "peer", "pfl", peer="pfl"),
        Contestant("pfl-2", "pfl, 2 ranks", "peer", "pfl", ("--ranks", "2"), peer="pfl"),
        Contestant("fedlab", "FedLab", "peer", "fedlab", peer="fedlab"),
        Contestant("flower", "Flower, 2 actors", "peer", "flwr", ("--ranks", "2"), peer="flwr"),
        fedblend("loop", "loop, 1 rank", "fedblend", "--engine loop"),
        fedblend("loop-2", "loop, 2 ranks", "fedblend", "--engine loop --ranks 2"),
        fedblend(
            "channels-last-2",
            "loop, channels_last, 2 ranks",
            "fedblend",
            "--engine loop --ranks 2 --memory-format channels_last",
        ),
        *stacked,
        fedblend("auto", "auto", "auto", f"--evaluations {EVALUATIONS}" if job == "A" else ""),
        *(methods if job != "B" else []),
    ]


def on_a_gpu(job: str) -> list[Contestant]:
    """All that are timed on a job on one GPU: one process each, the whole cohort in one stack.

    pfl may be installed beside fedblend, where no environment of its own can be made.
    """
    there = "--device cuda"
    stacked = f"--engine stacked --stack {COHORTS[job]} --ranks 1 {there}"
    methods = [
        fedblend(name, f"auto, {name}", "method", f"--method {name}{more} {there}") for name, more in METHODS.items()
    ]
    return [
        Contestant("bare", "bare PyTorch loop", "base", "bare", ("--device", "cuda")),
        Contestant("pfl-1", "pfl, 1 rank", "peer", "pfl", ("--device", "cuda"), peer="" if find_spec("pfl") else "pfl"),
        fedblend("loop", "loop", "fedblend", f"--engine loop --ranks 1 {there}"),
        fedblend("launched", "one stack, without CUDA graphs", "fedblend", f"{stacked} --no-graphs"),
        fedblend("stacked", "one stack", "fedblend", stacked),
        # These round what they multiply, and so are no choice that auto has.
        fedblend("tf32", "one stack, tf32", "rounded", f"{stacked} --precision tf32"),
        fedblend("bfloat16", "one stack, bfloat16", "rounded", f"{stacked} --precision bfloat16"),
        fedblend("auto", "auto", "auto", f"{there} --evaluations {EVALUATIONS}" if job == "A" else there),
        *methods,
    ]
