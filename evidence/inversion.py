"""Attack studies: what InvGrad rebuilds of clients' images, without protection and with it (Fed-AugMix, section V-A).

All attack the model update of a few local steps on one batch: labels known, signed Adam at 0.1, cosine cost, total
variation 1e-6. Iterations are fewer than the paper's 2,500. :data:`AUGMIX` holds two studies of Fed-AugMix by severity,
:func:`run_single_updates` is a study by network, data and protection. The paper does not state what its attacker knows
of the augmentation, so that some updates are attacked three times:

    plain      the attacker minimises as if the loss were the cross-entropy part alone
    guesses    the attacker uses the true loss, and draws the augmentation's random numbers itself
    knows      the attacker uses the true loss and the client's own random numbers

At severity 0 (FedAvg) the three are the same.

    python evidence/run.py augmix-attack augmix-mnist invgrad

Finished attacks lie in runs/evidence/NAME/attacks and are not made again. Results are written after each attack.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tables.common import FIGURES

from fedblend.analysis.attacks.outcome import TABLE, attack_run
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.analysis.plotting import COLOURS, DASHES, INK, blank_figure, png_bytes, style_axes
from fedblend.core.engine import TrainTask
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "evidence"

IMAGES, COSTS = "images.npz", "curve.npy"
"""Files of an attack: original and rebuilt images; the cost of every iteration."""
CURVE_POINTS = 50
"""Points of an attack's costs in a result."""
MEASURES = ("mse", "psnr", "ssim", "cost")

Row = dict[str, Any]

# One attack ---------------------------------------------------------------------------------------------------


def untrained(experiment: Experiment, path: Path) -> RoundSnapshot:
    """The first round of an experiment, which needs no run; ``path`` stands for the run's folder."""
    setup = make_setup(experiment)
    return RoundSnapshot(RunDirectory(path), setup, 0, TrainTask(0, setup.weights(), None, setup.sizes(0)), ())


def attacked_clients(snapshot: RoundSnapshot, images: int, number: int) -> list[int]:
    """The first clients that hold a batch of ``images``. The split is the same for all methods, so they are too."""
    return np.flatnonzero(snapshot.task.sizes >= images)[:number].tolist()


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished attack."""
    return (folder / TABLE).is_file()


def run_attack(folder: Path, snapshot: RoundSnapshot, client: int, **settings: Any) -> None:
    """Attack a client's update and write images, costs and measures to a folder."""
    attack = attack_run(snapshot, snapshot.round, client, **settings)
    if attack.rebuilt.stopped:
        raise KeyboardInterrupt
    scale, order = snapshot.setup.scale, torch.from_numpy(attack.similarity.order)
    folder.mkdir(parents=True, exist_ok=True)
    images = {"original": scale.to_unit(attack.attack_setup.x), "rebuilt": scale.to_unit(attack.rebuilt.x[order])}
    np.savez(folder / IMAGES, **{name: x.detach().numpy() for name, x in images.items()})
    np.save(folder / COSTS, attack.rebuilt.curve)
    attack.write(folder)  # last: this file marks the attack as finished
    table = read_attack(folder)
    sys.stderr.write(f"{folder.name}: PSNR {table['psnr']:.2f}, cost {table['cost']:.4g}\n")


def read_attack(folder: Path) -> Row:
    """The measures of a finished attack, with some of its costs as (iteration, cost)."""
    table: Row = json.loads((folder / TABLE).read_text(encoding="utf-8"))
    curve = np.load(folder / COSTS)
    chosen = np.unique(np.linspace(0, len(curve) - 1, CURVE_POINTS).round().astype(int))
    return table | {"curve": [[int(k), round(float(curve[k]), 6)] for k in chosen]}


def read_images(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The original images of a finished attack and the rebuilt ones in the same order, both [B, C, H, W] in [0, 1]."""
    with np.load(folder / IMAGES) as arrays:
        return arrays["original"], arrays["rebuilt"]


def means(tables: Sequence[Mapping[str, Any]]) -> Row:
    """Means over clients, and with several clients the standard errors of the means. No PSNR here is infinite."""
    row: Row = {"clients": [table["client"] for table in tables]}
    for measure in MEASURES:
        values = np.array([table[measure] for table in tables], float)
        row[measure] = round(float(values.mean()), 5)
        if len(values) > 1:
            row[f"{measure}_error"] = round(float(values.std(ddof=1) / np.sqrt(len(values))), 5)
    return row


def versions() -> dict[str, str]:
    """Versions of Python and PyTorch."""
    return {"python": platform.python_version(), "torch": torch.__version__}


# Fed-AugMix by severity ---------------------------------------------------------------------------------------


class AugmixAttack(NamedTuple):
    """What is attacked, by whom."""

    stage: str
    """``untrained`` or ``trained``."""
    attacker: str
    severity: int
    loss_scaling: bool = True


@dataclass(frozen=True)
class AugmixStudy:
    """Runs of Fed-AugMix by severity, and attacks on untrained and trained models."""

    experiment: dict[str, Any]
    """The fields that all runs share."""
    methods: dict[str, dict[str, Any]]
    """Methods by the name of their run; attacks use the runs ``s0``, ``s2``, ..."""
    attacks: tuple[AugmixAttack, ...]
    clients: int
    """Clients that are attacked."""
    settings: dict[str, Any]
    """Images, local steps and iterations of each attack."""


def augmix(severity: int, name: str = "fed-augmix") -> dict[str, Any]:
    """Fed-AugMix as a method, with its severity in its label."""
    return {"name": name, "label": f"{name} {severity}", "objective": {"severity": float(severity)}}


STAGES = ("untrained", "trained")
SETTINGS: dict[str, Any] = {"images": 4, "steps": 5, "iterations": 300}
FEDERATION: dict[str, Any] = {
    "partition": {"name": "dirichlet", "form": "client", "clients": 100, "alpha": 0.1},
    "holdout": 0.25,
    "model": "lenet5",
    "engine": "loop",
}
"""As in the paper: LeNet-5, 100 clients, a quarter of each client's samples held out for its own test."""

AUGMIX = {
    # Table II in small: 5,000 digits of MNIST, local training as in the paper, 30 rounds, two clients of 100 attacked.
    # The paper states no learning rate.
    "augmix-attack": AugmixStudy(
        experiment={
            "data": "mnist5k",
            **FEDERATION,
            "train": {"cohort": 10, "epochs": 5, "batch_size": 4, "lr": 0.05},
            "rounds": 30,
        },
        methods={f"s{s}": {"name": "fed-augmix", "objective": {"severity": float(s)}} for s in (0, 2, 6, 10)},
        attacks=tuple(
            AugmixAttack(stage, attacker, severity)
            for attacker, severities in {"plain": (0, 2, 6, 10), "guesses": (6,), "knows": (6,)}.items()
            for severity in severities
            for stage in STAGES
        ),
        clients=2,
        settings=SETTINGS,
    ),
    # MNIST's blocks of Table III (accuracy) and Table II, and Figures 3 to 7: a fifth of the training images, one local
    # epoch in batches of ten, 100 rounds (the paper states only that its models converged), four clients attacked.
    "augmix-mnist": AugmixStudy(
        experiment={
            "data": {"name": "mnist", "folder": "$FEDBLEND_DATA/MNIST/raw"},
            **FEDERATION,
            "fraction": 0.2,
            "train": {"cohort": 10, "epochs": 1, "batch_size": 10, "lr": 0.05, "lr_decay": 1.0},
            "rounds": 100,
            "eval_every": 5,
        },
        methods={
            "s0": {"name": "fedavg"},
            "s2": augmix(2),
            "s10": augmix(10),
            "s6": augmix(6),
            "prox-s0": {"name": "fedprox"},
            "prox-s2": augmix(2, "fedprox+fed-augmix"),
        },
        attacks=(
            *(AugmixAttack(stage, "plain", severity) for stage in STAGES for severity in (0, 2, 6, 10)),
            *(AugmixAttack("untrained", attacker, 6) for attacker in ("guesses", "knows")),
            AugmixAttack("untrained", "plain", 6, loss_scaling=False),
            *(AugmixAttack("trained", attacker, 6) for attacker in ("guesses", "knows")),
            *(AugmixAttack("untrained", attacker, 2) for attacker in ("guesses", "knows")),
        ),
        clients=4,
        settings=SETTINGS,
    ),
}


def run_augmix(name: str, path: Path, run_row: Callable[[RunDirectory], Row]) -> None:
    """Train, attack one client after the other, write the result, and draw the figures that show images.

    ``run_row`` makes a run's row of the result. The attack without loss scaling is made on the first client alone.
    """
    torch.set_num_threads(1)
    study = AUGMIX[name]
    runs = {run: _trained(study, name, run) for run in study.methods}
    for client in range(study.clients):
        for one in study.attacks:
            folder = augmix_folder(name, one, client)
            if is_finished(folder) or (client and not one.loss_scaling):
                continue
            snapshot = _snapshot(name, one.stage, one.severity, one.loss_scaling)
            chosen = attacked_clients(snapshot, study.settings["images"], study.clients)[client]
            run_attack(folder, snapshot, chosen, attacker=one.attacker, **study.settings)
            _write_augmix(name, path, [run_row(run) for run in runs.values()])
    _write_augmix(name, path, [run_row(run) for run in runs.values()])
    if name == "augmix-mnist":
        draw_rebuilt()
        draw_loss_scaling(json.loads(path.read_text())["rows"])


def _experiment(study: AugmixStudy, name: str, run: str, loss_scaling: bool = True) -> Experiment:
    table = json.loads(json.dumps({**study.experiment, "name": f"{name}-{run}", "method": study.methods[run]}))
    if isinstance(table["data"], dict):
        table["data"]["folder"] = os.path.expandvars(table["data"]["folder"])
    if not loss_scaling:
        table["method"]["objective"]["loss_scaling"] = False
    return resolve(table)


def _trained(study: AugmixStudy, name: str, run: str) -> RunDirectory:
    """A finished run: trained or resumed now, unless it was finished before."""
    path = RUNS / name / run
    if not (RunDirectory.is_run(path) and RunDirectory(path).status()["state"] == "done"):
        api.run(_experiment(study, name, run), path, resume=True)
    return RunDirectory(path)


@cache
def _snapshot(name: str, stage: str, severity: int, loss_scaling: bool) -> RoundSnapshot:
    """The round that is attacked: the first, or the one after the last."""
    study, run = AUGMIX[name], f"s{severity}"
    if stage == "untrained":
        return untrained(_experiment(study, name, run, loss_scaling), RUNS / name / run)
    return RoundSnapshot.load(RUNS / name / run, study.experiment["rounds"])


def augmix_folder(name: str, one: AugmixAttack, client: int) -> Path:
    """The folder of an attack; ``client`` counts the attacked clients from 0."""
    scaling = [] if one.loss_scaling else ["unscaled"]
    words = [f"s{one.severity}", one.stage, one.attacker, *scaling, f"client{client}"]
    return RUNS / name / "attacks" / "-".join(words)


def _write_augmix(name: str, path: Path, runs: list[Row]) -> None:
    """Write the attacks that are finished."""
    study, rows = AUGMIX[name], []
    for one in study.attacks:
        folders = [augmix_folder(name, one, client) for client in range(study.clients)]
        tables = [read_attack(folder) for folder in folders if is_finished(folder)]
        if tables:
            rows.append({**one._asdict(), **means(tables), "curve": tables[0]["curve"]})
    result = {
        "command": f"python evidence/run.py {name}",
        "versions": versions(),
        "experiment": study.experiment,
        "attack": study.settings,
        "runs": runs,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


# InvGrad by network, data and protection ----------------------------------------------------------------------

NETWORKS: dict[str, Any] = {"lenet5": "lenet5", "convnet": {"name": "convnet", "norm": "none", "width": 8}}
"""LeNet-5, and Fed-AugMix's ConvNet of eight convolutions: of width 8, not 64, to save time, and without norm layers,
which is what batch norm amounts to with its first statistics (Geiping et al. 2020)."""
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
"""Fed-AugMix with loss scaling, noise as large as 0.01 on each gradient, and pruning to a tenth of the entries."""
FEW_PROTECTIONS = ("none", "augmix 2", "augmix 10", "gaussian noise", "pruned to 10 %")
"""The protections where an attack takes long."""
CLIENTS, REPEATS = 2, 9
"""Clients that are attacked, and how often each speed is timed."""


class Cell(NamedTuple):
    """What is attacked."""

    network: str
    data: str
    images: int
    steps: int
    protection: str


def cells() -> Iterator[Cell]:
    """All cells, in the order in which they are attacked: first without protection, then the protections by pair."""
    yield from (Cell(*pair, *size, "none") for pair in PAIRS[:3] for size in SIZES)
    for pair in PAIRS[:2]:
        yield from (Cell(*pair, *size, name) for size in SIZES[:2] for name in PROTECTIONS if name != "none")
    yield from (Cell(*PAIRS[3], *size, "none") for size in (SIZES[0], SIZES[2], SIZES[3]))
    yield from (Cell(*PAIRS[3], *SIZES[0], name) for name in FEW_PROTECTIONS[1:])
    yield Cell(*PAIRS[3], *SIZES[1], "none")
    yield from (Cell(*PAIRS[2], *size, name) for size in SIZES[:2] for name in FEW_PROTECTIONS[1:])


def run_single_updates(path: Path) -> None:
    """Attack updates of untrained models on real images, measure the attack's speed, and write the result.

    One local step or five, one image or four; two clients of an even split of 100.
    """
    torch.set_num_threads(1)
    for client in range(CLIENTS):
        for cell in cells():
            folder = cell_folder(cell, client)
            if is_finished(folder):
                continue
            snapshot = _first_round(cell.network, cell.data, cell.protection)
            chosen = attacked_clients(snapshot, cell.images, CLIENTS)[client]
            iterations = ITERATIONS[cell.network, cell.steps]
            settings: dict[str, Any] = {"images": cell.images, "steps": cell.steps, "attacker": "plain"}
            run_attack(folder, snapshot, chosen, iterations=iterations, **settings)
            _write_cells(path)
        _measured_speeds()
    _write_cells(path)
    draw_single_images()


@cache
def _first_round(network: str, data: str, protection: str) -> RoundSnapshot:
    table = {
        "name": "invgrad",
        "data": {key: os.path.expandvars(value) for key, value in DATA[data].items()},
        "partition": {"name": "iid", "clients": 100},
        "model": NETWORKS[network],
        "train": {"cohort": 1, "lr": 0.01},
        **PROTECTIONS[protection],
    }
    return untrained(resolve(table), RUNS / "invgrad")


def cell_folder(cell: Cell, client: int) -> Path:
    """The folder of a cell's attack; ``client`` counts the attacked clients from 0."""
    words = (cell.network, cell.data, f"{cell.images}x{cell.steps}", cell.protection, f"client{client}")
    return RUNS / "invgrad" / "attacks" / "-".join(words).replace(" ", "")


def _write_cells(path: Path) -> None:
    rows = []
    for cell in cells():
        folders = [cell_folder(cell, client) for client in range(CLIENTS)]
        tables = [read_attack(folder) for folder in folders if is_finished(folder)]
        if tables:
            rows.append({**cell._asdict(), "iterations": tables[0]["iterations"], **means(tables)})
    speeds = RUNS / "invgrad" / "speeds.json"
    result = {
        "command": "python evidence/run.py invgrad",
        "versions": versions(),
        "protections": PROTECTIONS,
        "networks": NETWORKS,
        "rows": rows,
        "speeds": json.loads(speeds.read_text(encoding="utf-8")) if speeds.is_file() else [],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _measured_speeds() -> None:
    """Write iterations a second of processor time, of the attack and of a bare double backward, timed in turn."""
    path = RUNS / "invgrad" / "speeds.json"
    if path.is_file():
        return
    sys.path.append(str(ROOT / "benchmarks"))
    from attacks import ITERATIONS as iterations  # type: ignore[import-not-found]
    from attacks import attacked, bare

    rows = []
    for images in (1, 4):
        work = {"bare": bare(images), **{str(steps): attacked(images, steps) for steps in (0, 1, 5)}}
        times: dict[str, list[float]] = defaultdict(list)
        for repeat in range(REPEATS + 1):
            for name, one in work.items():
                start = time.process_time()
                one()
                if repeat:  # the first warms up
                    times[name].append((time.process_time() - start) / iterations)
        bare_median = statistics.median(times["bare"])
        for name in ("0", "1", "5"):
            ratio = statistics.median(a / b for a, b in zip(times[name], times["bare"], strict=True))
            speed = {
                "a_second": round(1 / statistics.median(times[name]), 1),
                "bare_a_second": round(1 / bare_median, 1),
            }
            rows.append({"images": images, "steps": int(name), **speed, "ratio": round(ratio, 2)})
    path.write_text(json.dumps(rows) + "\n", encoding="utf-8")


# Figures that show images -------------------------------------------------------------------------------------

SIDE = 0.9
"""Inches of an image's side."""


def draw_rebuilt() -> None:
    """Figure 3: the first client's images, and below them the rebuilt ones at each severity; untrained, trained."""
    severities = (0, 2, 6, 10)
    figure = blank_figure(SIDE * len(STAGES) * 4 + 1.0, SIDE * (len(severities) + 1) + 0.8)
    for half, stage in zip(figure.subfigures(1, len(STAGES)), STAGES, strict=True):
        half.suptitle(f"{stage} model", fontsize=9.5, color=INK)
        axes = half.subplots(len(severities) + 1, 4, squeeze=False)
        for line, severity in enumerate([None, *severities]):
            attack = AugmixAttack(stage, "plain", severity or 0)
            original, rebuilt = read_images(augmix_folder("augmix-mnist", attack, 0))
            for k in range(4):
                _show(axes[line, k], original[k] if severity is None else rebuilt[k])
            word = "original" if severity is None else "none" if severity == 0 else f"s = {severity}"
            axes[line, 0].set_ylabel(word, fontsize=8.5, color=INK)
    (FIGURES / "augmix-rebuilt.png").write_bytes(png_bytes(figure))


def draw_loss_scaling(rows: Sequence[Row]) -> None:
    """Figure 6: cost by iteration on an untrained model, and the rebuilt images, with loss scaling and without."""
    shown = [AugmixAttack("untrained", "plain", 0), AugmixAttack("untrained", "plain", 6)]
    shown.append(AugmixAttack("untrained", "plain", 6, loss_scaling=False))
    figure = blank_figure(9.6, 4.2)
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1))
    axes = left.subplots()
    grid = right.subplots(len(shown) + 1, 4)
    for number, attack in enumerate(shown):
        row = next(row for row in rows if all(row[key] == value for key, value in attack._asdict().items()))
        scaling = "on" if attack.loss_scaling else "off"
        word = f"s = {attack.severity}, loss scaling {scaling}" if attack.severity else "no Fed-AugMix"
        x, y = zip(*row["curve"], strict=True)
        axes.plot(x, y, color=COLOURS[number], linestyle=DASHES[number], linewidth=1.8, label=word)
        original, rebuilt = read_images(augmix_folder("augmix-mnist", attack, 0))
        for k in range(4):
            _show(grid[0, k], original[k])
            _show(grid[number + 1, k], rebuilt[k])
        grid[number + 1, 0].set_ylabel(word.replace(", ", "\n"), fontsize=8, color=COLOURS[number])
    grid[0, 0].set_ylabel("original", fontsize=8, color=INK)
    style_axes(axes, "iteration", "cost: 1 - cosine, and total variation")
    axes.set_yscale("log")
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)
    (FIGURES / "augmix-loss-scaling.png").write_bytes(png_bytes(figure))


def draw_single_images() -> None:
    """One image for each network and data set, and below it the rebuilt one under each protection."""
    figure = blank_figure(SIDE * 1.35 * len(PAIRS), SIDE * 1.12 * (len(FEW_PROTECTIONS) + 1))
    grid = figure.subplots(len(FEW_PROTECTIONS) + 1, len(PAIRS), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for column, (network, data) in enumerate(PAIRS):
        for row, protection in enumerate(FEW_PROTECTIONS):
            original, rebuilt = read_images(cell_folder(Cell(network, data, 1, 1, protection), 1))
            _show(grid[0, column], original[0])
            _show(grid[row + 1, column], rebuilt[0])
        grid[0, column].set_title(f"{network}\n{data}", fontsize=8, color=INK)
    for row, word in enumerate(("original", *FEW_PROTECTIONS)):
        grid[row, 0].set_axis_on()
        grid[row, 0].set_ylabel(word, fontsize=8, color=INK)
    (FIGURES / "invgrad-single-images.png").write_bytes(png_bytes(figure))


def _show(axes: Any, image: np.ndarray) -> None:
    axes.imshow(
        image[0] if len(image) == 1 else np.moveaxis(image, 0, -1).clip(0, 1),
        cmap="gray", vmin=0, vmax=1, interpolation="nearest",
    )  # fmt: skip
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
