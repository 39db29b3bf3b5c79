"""What every contestant takes from its command line and tells at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import CLASSES, Job

WARM_UP = 2
"""Rounds that are told apart from the others: caches fill, workers start, data are read."""


def options(contestant: str, ranks: Sequence[int] = (1,)) -> argparse.ArgumentParser:
    """The command line that all contestants share; ``ranks`` are the numbers of processes it can train with."""
    parser = argparse.ArgumentParser(description=f"Time rounds of a job in {contestant}.")
    parser.add_argument("job", type=Path, help="the file that jobs.py wrote")
    parser.add_argument("--rounds", type=int, default=12, help=f"all rounds; the first {WARM_UP} warm up")
    parser.add_argument("--out", type=Path, required=True, help="where the result goes (JSON)")
    parser.add_argument("--ranks", type=int, default=ranks[0], choices=ranks, help="processes that train")
    parser.add_argument("--weights", type=Path, help="where the last weights go (.npz), to compare contestants")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is trained")
    return parser


def wait_for(device: str) -> None:
    """Wait until a device has done all that it was given, before a clock is read."""
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def accuracy(job: Job, weights: Mapping[str, torch.Tensor]) -> float:
    """Share of the test half that the weights get right."""
    model = job.network()
    model.load_state_dict(weights)
    model.eval()
    pairs = zip(job.test_x.split(500), job.test_y.split(500), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(job.test_y)


def change(job: Job, weights: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Last less first weights in one row, float64."""
    moves = (weights[name].double() - start.double() for name, start in job.start.items())
    return np.concatenate([move.flatten().numpy() for move in moves])


def versions(packages: Sequence[str]) -> dict[str, str]:
    """What ran: Python, PyTorch, numpy and the contestant's own packages."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "numpy", *packages)}


def report(
    contestant: str,
    packages: Sequence[str],
    job: Job,
    given: argparse.Namespace,
    seconds: Sequence[float],
    weights: Mapping[str, torch.Tensor],
    **more: object,
) -> None:
    """Write a contestant's result and print its median.

    ``change_norm`` is the length of the weights' change, ``fingerprint`` its product with a fixed random row:
    both agree (to float tolerance) after one round between contestants that did the same work, if the job has no
    dropout. ``median_s`` is null if no round came after those that warm up.
    """
    weights = {name: weights[name].detach().cpu() for name in job.start}
    moved = change(job, weights)
    result = {
        "contestant": contestant,
        "job": job.settings.name,
        "settings": vars(job.settings),
        "ranks": given.ranks,
        "device": given.device,
        "threads_per_rank": torch.get_num_threads(),
        "warm_up_s": list(seconds[:WARM_UP]),
        "round_s": list(seconds[WARM_UP:]),
        "median_s": statistics.median(seconds[WARM_UP:]) if len(seconds) > WARM_UP else None,
        "accuracy": accuracy(job, weights),
        "chance": 1 / CLASSES,
        "change_norm": float(np.linalg.norm(moved)),
        "fingerprint": float(moved @ np.random.default_rng(0).normal(size=len(moved))),
        "versions": versions(packages),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        **more,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    if given.weights:
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in weights.items()}
        np.savez(given.weights, **arrays)
    told = ", ".join(f"{name} {result[name]}" for name in ("median_s", "accuracy", "change_norm", "fingerprint"))
    print(f"{contestant}, job {job.settings.name}, {given.ranks} rank(s): {told}")


def check_rounds(given: argparse.Namespace, job: Job) -> None:
    """End with a message if the rounds asked for cannot be run."""
    if not 1 <= given.rounds <= len(job.cohorts):
        raise SystemExit(f"--rounds must be from 1 to {len(job.cohorts)}, not {given.rounds}")
