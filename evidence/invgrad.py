"""What InvGrad rebuilds of real images from untrained models, without protection and with it; and how fast it is.

The update of one local step or of five, on one image or on four, is attacked as in Fed-AugMix's section V-A: labels
known, signed Adam at 0.1 with its three decays, cosine cost, total variation 1e-6, pixels boxed. LeNet-5 on MNIST,
Fashion-MNIST and CIFAR10, and Fed-AugMix's ConvNet of eight convolutions on CIFAR10, without norm layers (what batch
norm comes to with its first statistics, as Geiping et al. 2020 attack it), of width 8 in place of 64, for the sake of
time. Iterations are fewer than the paper's 2,500: ``ITERATIONS``. Two clients of an even split are attacked.

Protections: Fed-AugMix at severities 2 to 10 with loss scaling (the attacker takes the loss for cross-entropy alone);
Gaussian and Laplace noise on the update, as large as 0.01 on each gradient; and pruning to a tenth of the entries.

    FEDBLEND_DATA=... python evidence/invgrad.py

What is made already is kept (runs/evidence/invgrad); results are written to evidence/results/invgrad.json after each
attack, and some pictures to docs/figures/invgrad-single-images.png. Speeds are in seconds of the processor, so that
other work on the machine counts less.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from augmix_figures import single_images
from kept import attacked, is_kept, means, table_of, untrained, victims

from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.experiment.config import resolve

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "runs" / "evidence" / "invgrad"
RESULTS = HERE / "results" / "invgrad.json"

CLIENTS, TURNS = 2, 9
NETWORKS: dict[str, Any] = {"lenet5": "lenet5", "convnet": {"name": "convnet", "norm": "none", "width": 8}}
DATA: dict[str, dict[str, Any]] = {
    "mnist": {"name": "mnist", "folder": "$FEDBLEND_DATA/MNIST/raw"},
    "fashion-mnist": {"name": "fashion-mnist"},
    "cifar10": {"name": "cifar10", "folder": "$FEDBLEND_DATA/cifar-10-batches-bin"},
}
PAIRS = (("lenet5", "mnist"), ("lenet5", "cifar10"), ("lenet5", "fashion-mnist"), ("convnet", "cifar10"))
SIZES = ((1, 1), (4, 5), (4, 1), (1, 5))
"""Images and local steps."""
ITERATIONS = {("lenet5", 1): 1000, ("lenet5", 5): 300, ("convnet", 1): 1500, ("convnet", 5): 100}
"""Iterations by network and local steps."""
NOISE = {"name": "noise", "on": "gradients", "scale": 0.01}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    **{
        f"augmix {s}": {"method": {"name": "fed-augmix", "objective": {"severity": float(s)}}} for s in (2, 4, 6, 8, 10)
    },
    "gaussian noise": {"protection": {**NOISE, "distribution": "gaussian"}},
    "laplace noise": {"protection": {**NOISE, "distribution": "laplace"}},
    "pruned to 10 %": {"protection": {"name": "prune", "keep": 0.1}},
}
FEW = ("none", "augmix 2", "augmix 10", "gaussian noise", "pruned to 10 %")
"""Protections that are tried where an attack takes long."""


class Cell(NamedTuple):
    """What is attacked."""

    network: str
    data: str
    images: int
    steps: int
    protection: str


def cells() -> Iterator[Cell]:
    """All cells, the most telling first: everything unprotected, then protections by pair."""
    yield from (Cell(*pair, *size, "none") for pair in PAIRS[:3] for size in SIZES)
    for pair in PAIRS[:2]:
        yield from (Cell(*pair, *size, name) for size in SIZES[:2] for name in PROTECTIONS if name != "none")
    yield from (Cell(*PAIRS[3], *size, name) for size in (SIZES[0], SIZES[2], SIZES[3]) for name in ("none",))
    yield from (Cell(*PAIRS[3], *SIZES[0], name) for name in FEW[1:])
    yield Cell(*PAIRS[3], *SIZES[1], "none")
    yield from (Cell(*PAIRS[2], *size, name) for size in SIZES[:2] for name in FEW[1:])


@cache
def moment(network: str, data: str, protection: str) -> RoundSnapshot:
    """The first round of a federation of 100 clients with as many samples each, which is attacked."""
    place = {k: v.replace("$FEDBLEND_DATA", os.environ["FEDBLEND_DATA"]) for k, v in DATA[data].items()}
    table = {
        "name": "invgrad",
        "data": place,
        "partition": {"name": "iid", "clients": 100},
        "model": NETWORKS[network],
        "train": {"cohort": 1, "lr": 0.01},
        **PROTECTIONS[protection],
    }
    return untrained(resolve(table), FOLDER)


def folder_of(cell: Cell, place: int) -> Path:
    """Where an attack is kept."""
    words = (cell.network, cell.data, f"{cell.images}x{cell.steps}", cell.protection, f"client{place}")
    return FOLDER / "-".join(words).replace(" ", "")


def attack(cell: Cell, place: int) -> None:
    """Attack a client, unless that was done before."""
    there = folder_of(cell, place)
    if is_kept(there):
        return
    at = moment(cell.network, cell.data, cell.protection)
    settings: dict[str, Any] = {"images": cell.images, "steps": cell.steps, "attacker": "plain"}
    number = ITERATIONS[cell.network, cell.steps]
    table = attacked(there, at, victims(at, cell.images, CLIENTS)[place], iterations=number, **settings)
    sys.stderr.write(f"{there.name}: PSNR {table['psnr']:.2f}, cost {table['cost']:.4g}\n")
    write()


def speeds() -> list[dict[str, Any]]:
    """Iterations in a second of the processor, of the attack and of the bare double backward, taking turns."""
    kept = FOLDER / "speeds.json"
    if not kept.is_file():
        sys.path.append(str(HERE.parent / "benchmarks"))
        from attacks import ITERATIONS as number
        from attacks import attacked as attack_of
        from attacks import bare

        rows = []
        for images in (1, 4):
            runs = {"bare": bare(images), **{str(steps): attack_of(images, steps) for steps in (0, 1, 5)}}
            times: dict[str, list[float]] = defaultdict(list)
            for turn in range(TURNS + 1):
                for name, one in runs.items():
                    begun = time.process_time()
                    one()
                    if turn:  # the first warms up
                        times[name].append((time.process_time() - begun) / number)
            for name in ("0", "1", "5"):
                ratio = statistics.median(a / b for a, b in zip(times[name], times["bare"], strict=True))
                median = statistics.median(times[name])
                row = {"images": images, "steps": int(name), "a_second": round(1 / median, 1)}
                rows.append(
                    row | {"bare_a_second": round(1 / statistics.median(times["bare"]), 1), "ratio": round(ratio, 2)}
                )
        FOLDER.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def write() -> None:
    """Write the results: what is made so far."""
    rows: dict[Cell, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells():
        for place in range(CLIENTS):
            there = folder_of(cell, place)
            if is_kept(there):
                rows[cell].append(table_of(there))
    result = {
        "command": "python evidence/invgrad.py",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "protections": PROTECTIONS,
        "networks": NETWORKS,
        "rows": [
            {**cell._asdict(), "iterations": tables[0]["iterations"], **means(tables)} for cell, tables in rows.items()
        ],
        "speeds": speeds() if (FOLDER / "speeds.json").is_file() else [],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Attack one client everywhere, measure speeds, attack the others; write after each."""
    torch.set_num_threads(1)
    for place in range(CLIENTS):
        for cell in cells():
            attack(cell, place)
        speeds()
    write()
    single_images(PAIRS, FEW, lambda *cell: folder_of(Cell(*cell[:2], 1, 1, cell[2]), 1))


if __name__ == "__main__":
    main()
