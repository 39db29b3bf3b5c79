"""Fed-AugMix on MNIST: the MNIST blocks of Table III (accuracy) and Table II (what InvGrad rebuilds), figures 3 to 7.

As in the paper: LeNet-5, 100 clients by Dirichlet(0.1), ten a round, a quarter of each client's samples held out for
its own test; attacks on the update of five local steps on one batch of four, labels known, signed Adam at 0.1, total
variation 1e-6, at the untrained model and the trained one. Smaller than there: a fifth of MNIST's training images, one
local epoch in batches of ten, 100 rounds (the paper says of its models only that they converged), one seed; four
clients are attacked in place of 100, 300 iterations in place of 2,500. The learning rate (0.05) is ours, and so is what
the attacker knows, which the paper does not say:

    plain      the attacker minimises as if the loss were the cross-entropy part alone
    guesses    it knows the loss, and draws the augmentation's numbers itself
    knows      it knows the loss and the client's own numbers: what the randomness protects, is seen beside this

Severity 0 is plain FedAvg, for which the three are one.

    FEDBLEND_DATA=... python evidence/augmix-mnist.py

What is made already is kept (runs/evidence/augmix-mnist), so that it can be stopped and gone on with. Results are
written to evidence/results/augmix-mnist.json after each run and attack, figures to docs/figures/augmix-*.png.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from augmix_figures import draw_all
from kept import attacked, is_kept, means, table_of, untrained, victims
from run import row_of

from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.experiment.config import Experiment, resolve
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "runs" / "evidence" / "augmix-mnist"
RESULTS = HERE / "results" / "augmix-mnist.json"

ROUNDS, CLIENTS = 100, 4
SEVERITIES = (0, 2, 6, 10)
CONTROLLED = (2, 6)
ATTACK: dict[str, Any] = {"images": 4, "steps": 5, "iterations": 300}
EXPERIMENT: dict[str, Any] = {
    "partition": {"name": "dirichlet", "clients": 100, "alpha": 0.1},
    "fraction": 0.2,
    "holdout": 0.25,
    "model": "lenet5",
    "train": {"cohort": 10, "epochs": 1, "batch_size": 10, "lr": 0.05, "lr_decay": 1.0},
    "rounds": ROUNDS,
    "eval_every": 5,
    "engine": "loop",
}
PAPER = {"fedavg": 95.63, "fed-augmix 2": 96.60, "fedprox": 95.88, "fedprox+fed-augmix 2": 97.34}
"""Table III's accuracies; the paper does not say at which severity."""


def augmix(severity: int, name: str = "fed-augmix", **options: Any) -> dict[str, Any]:
    """Fed-AugMix as a method, named by its severity."""
    return {"name": name, "label": f"{name} {severity}", "objective": {"severity": float(severity), **options}}


METHODS: dict[str, dict[str, Any]] = {
    "s0": {"name": "fedavg"},
    "s2": augmix(2),
    "s10": augmix(10),
    "s6": augmix(6),
    "prox-s0": {"name": "fedprox"},
    "prox-s2": augmix(2, "fedprox+fed-augmix"),
}
"""The runs, in the order in which they are made."""


@cache
def experiment(name: str, scaling: bool = True) -> Experiment:
    """A run's experiment, with or without loss scaling."""
    method = METHODS[name]
    if not scaling:
        method = {**method, "objective": {**method["objective"], "loss_scaling": False}}
    data = {"name": "mnist", "folder": str(Path(os.environ["FEDBLEND_DATA"]) / "MNIST" / "raw")}
    return resolve({**EXPERIMENT, "data": data, "name": f"augmix-mnist-{name}", "method": method})


def is_done(name: str) -> bool:
    """Whether a run is finished."""
    path = FOLDER / name
    return RunDirectory.is_run(path) and RunDirectory(path).status()["state"] == "done"


def train(name: str) -> None:
    """Make a run, or go on with it."""
    if not is_done(name):
        api.run(experiment(name), FOLDER / name, resume=True)


def attacks() -> Iterator[tuple[str, str, int, bool, int]]:
    """(stage, attacker, severity, loss scaling, place of the client) of each attack, the most telling first."""
    for place in range(CLIENTS):
        for stage in ("untrained", "trained"):
            yield from ((stage, "plain", severity, True, place) for severity in SEVERITIES)
        yield from (("untrained", attacker, 6, True, place) for attacker in ("guesses", "knows"))
        if place == 0:
            yield "untrained", "plain", 6, False, place
        yield from (("trained", attacker, 6, True, place) for attacker in ("guesses", "knows"))
        yield from (("untrained", attacker, 2, True, place) for attacker in ("guesses", "knows"))


@cache
def moment(stage: str, severity: int, scaling: bool) -> RoundSnapshot:
    """The round that is attacked."""
    name = f"s{severity}"
    if stage == "untrained":
        return untrained(experiment(name, scaling), FOLDER / name)
    return RoundSnapshot.of(FOLDER / name, ROUNDS)


def folder_of(stage: str, attacker: str, severity: int, scaling: bool, place: int) -> Path:
    """Where an attack is kept."""
    words = [f"s{severity}", stage, attacker, *([] if scaling else ["unscaled"]), f"client{place}"]
    return FOLDER / "attacks" / "-".join(words)


def attack_all(trained: bool, most: int) -> None:
    """Make the attacks, of the trained models or of the untrained, on so many clients, and write after each."""
    for stage, attacker, severity, scaling, place in attacks():
        if (stage == "trained") != trained or place >= most:
            continue
        there = folder_of(stage, attacker, severity, scaling, place)
        if not is_kept(there):
            at = moment(stage, severity, scaling)
            client = victims(at, ATTACK["images"], CLIENTS)[place]
            table = attacked(there, at, client, attacker=attacker, **ATTACK)
            sys.stderr.write(f"{there.name}: PSNR {table['psnr']:.2f}, cost {table['cost']:.4g}\n")
            write()


def write() -> None:
    """Write the results: what is made so far."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for one in attacks():
        there = folder_of(*one)
        if is_kept(there):
            rows[one[:4]].append(table_of(there))
    done = [RunDirectory(FOLDER / name) for name in METHODS if is_done(name)]
    result: dict[str, Any] = {
        "command": "python evidence/augmix-mnist.py",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "experiment": EXPERIMENT,
        "attack": ATTACK,
        "paper": PAPER,
        "runs": [row_of(run) for run in done],
        "rows": [_row(key, tables) for key, tables in rows.items()],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _row(key: tuple[Any, ...], tables: list[dict[str, Any]]) -> dict[str, Any]:
    stage, attacker, severity, scaling = key
    return {
        "stage": stage,
        "severity": severity,
        "attacker": attacker,
        "loss_scaling": scaling,
        **means(tables),
        "curve": tables[0]["curve"],
    }


def main() -> None:
    """Attack untrained models, train, attack what was trained, and draw; one client everywhere before the others."""
    torch.set_num_threads(1)
    attack_all(False, 1)
    for name in METHODS:
        train(name)
        write()
        if name == "s6":
            attack_all(True, 1)
    for most in range(2, CLIENTS + 1):
        attack_all(False, most)
        attack_all(True, most)
    write()
    draw_all(json.loads(RESULTS.read_text(encoding="utf-8")), folder_of)


if __name__ == "__main__":
    main()
