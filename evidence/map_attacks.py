"""What a server rebuilds of clients' images under each method of the map: gradient inversion of the first update.

An untrained model is the easiest case for an attacker in many papers. Each method makes one round of the map's
experiment (evidence/studies/map.toml) with two classes a client; the server knows the method and the labels, and draws
the method's random numbers itself. Methods whose clients train as FedAvg's do and differ at the server alone
(``server-means``, ``aggenhance``) send the same first update as FedAvg.

    python evidence/run.py map-attacks

Finished attacks lie in runs/evidence/map-attacks and are not made again. The result is written after each attack.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from inversion import (
    ROOT,
    RUNS,
    Row,
    attacked_clients,
    is_finished,
    means,
    read_attack,
    read_images,
    run_attack,
    versions,
)

from fedblend.analysis.attacks.image_similarity import psnr, ssim
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.experiment.config import Experiment, resolve
from fedblend.runs import api

DATA: dict[str, Any] = {
    "fashion-mnist": {"name": "fashion-mnist"},
    "cifar10": {"name": "cifar10", "folder": "$FEDBLEND_DATA/cifar-10-batches-bin"},
}
METHODS = ("fedavg", "localmix", "naivemix", "fedmix-checked", "virtual-means", "vhl", "feddyn", "fed-augmix")
SETTINGS: dict[str, Any] = {"images": 4, "steps": 5, "iterations": 300, "attacker": "guesses"}
"""Images and local steps are those of Fed-AugMix's attack; its iterations are 2,500."""
CLIENTS = 3
"""Clients that are attacked."""


class MapAttack(NamedTuple):
    """What is attacked."""

    data: str
    method: str


def attacks() -> Iterator[MapAttack]:
    """All attacks of one client."""
    yield from (MapAttack(data, method) for data in DATA for method in METHODS)


def run_map_attacks(path: Path) -> None:
    """Make one round of each method, attack one client after the other, and write the result."""
    torch.set_num_threads(1)
    for client in range(CLIENTS):
        for one in attacks():
            folder = _folder(one, client)
            if not is_finished(folder):
                snapshot = _first_round(one.data, one.method)
                chosen = attacked_clients(snapshot, SETTINGS["images"], CLIENTS)[client]
                run_attack(folder, snapshot, chosen, **SETTINGS)
                _write(path)
    _write(path)


def _folder(one: MapAttack, client: int) -> Path:
    return RUNS / "map-attacks" / "attacks" / f"{one.data}-{one.method}-client{client}"


def _experiment(data: str, method: str) -> Experiment:
    table = tomllib.loads((ROOT / "evidence" / "studies" / "map.toml").read_text(encoding="utf-8"))
    del table["tune"], table["seeds"]
    table |= {"name": f"map-attacks-{data}-{method}", "method": method, "rounds": 1, "engine": "loop", "seed": 0}
    table["data"] = {key: os.path.expandvars(value) for key, value in DATA[data].items()}
    table["partition"] = {"name": "classes", "clients": 100, "classes_per_client": 2, "samples": 500}
    return resolve(table)


@cache
def _first_round(data: str, method: str) -> RoundSnapshot:
    path = RUNS / "map-attacks" / f"{data}-{method}"
    api.run(_experiment(data, method), path, resume=True)
    return RoundSnapshot.load(path, 0)


def _guesses(one: MapAttack, folders: Sequence[Path]) -> list[Row]:
    """How near the mean picture of its class is to each client's images: an attacker has it who attacks nothing."""
    setup = _first_round(one.data, one.method).setup
    x, y = setup.data.train.x, setup.data.train.y
    tables = []
    for folder in folders:
        labels = [image["label"] for image in read_attack(folder)["each"]]
        guess = torch.stack([setup.scale.to_unit(setup.scale(x[y == label])).double().mean(0) for label in labels])
        original = torch.from_numpy(read_images(folder)[0])
        tables.append({"psnr": psnr(original, guess).mean(), "ssim": ssim(original, guess).mean()})
    return tables


def _write(path: Path) -> None:
    rows = []
    for one in attacks():
        folders = [folder for client in range(CLIENTS) if is_finished(folder := _folder(one, client))]
        if folders:
            tables = [read_attack(folder) for folder in folders]
            row = {**one._asdict(), **means(tables)}
            if one.method == METHODS[0]:
                guesses = _guesses(one, folders)
                row["class_mean"] = {key: round(fmean(float(g[key]) for g in guesses), 5) for key in ("psnr", "ssim")}
            rows.append(row)
    result = {"command": "python evidence/run.py map-attacks", "versions": versions(), "attack": SETTINGS, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
