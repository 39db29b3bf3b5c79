"""Mix2FLD's studies beyond their runs: the symmetric channel, devices of their own, sample privacy."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.analysis.privacy.mixup_privacy import LAMBDAS, SAMPLES, make_mixtures, measure_mixtures
from fedblend.core.channel import Channel
from fedblend.core.dataset import Dataset
from fedblend.core.random import stream
from fedblend.core.record import RoundRecord
from fedblend.core.registry import build
from fedblend.core.state import RunState
from fedblend.data.partitions.prepare import prepare
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.make_setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import Outcome, read
from fedblend.runs.summary import costs

Table = dict[str, Any]

ASYMMETRIC, SYMMETRIC = "power_up=23.0", "power_up=40.0"
"""The two channels in a run's label."""


def with_symmetric_rows(folder: Path, rows: list[Table]) -> list[Table]:
    """Append the rows of runs in the asymmetric channel that lose no upload, as they are over the symmetric channel.

    The channel draws from random streams of its own. A run that loses nothing in either channel therefore trains
    identically in both; only its seconds on the air differ. They are drawn again for both channels. Runs that send
    models, whose uploads get lost, are left out, and so are runs that were made in the symmetric channel.

    Raises :class:`RuntimeError` where the draw of the run's own channel differs from the recorded seconds, or where an
    upload is lost.
    """
    known = {(row["method"], row["seed"]) for row in rows}
    added = []
    for run in find_runs([folder]):
        outcome = read(run)
        label = outcome.label.replace(ASYMMETRIC, SYMMETRIC)
        sends_models = outcome.config["method"]["upload"]["name"] == "model"
        if sends_models or not outcome.finished or label == outcome.label or (label, outcome.seed) in known:
            continue
        own = run.experiment().channel
        symmetric = type(own)(**{**vars(own), "power_up": own.power_down})
        for record in outcome.records:
            recorded = sum((record.channel or {}).values())
            if not math.isclose(_redrawn_seconds(own, record, outcome.seed), recorded, abs_tol=1e-9):
                raise RuntimeError(
                    f"{outcome.label}, round {record.round}: the channel's draw does not give the recorded "
                    f"{recorded} s on the air"
                )
        row = next(r for r in rows if (r["method"], r["seed"]) == (outcome.label, outcome.seed))
        times = _times_over(symmetric, outcome)
        added.append({**row, "method": label, "trained_as": outcome.label, **times})
    return rows + added


def _times_over(channel: Channel, outcome: Outcome) -> Table:
    """Seconds on the air and in total, from the start to each evaluated round, over a channel."""
    air, clock, times = 0.0, 0.0, []
    for record in outcome.records:
        seconds = _redrawn_seconds(channel, record, outcome.seed)
        air += seconds
        clock += costs(record)["clock"] - sum((record.channel or {}).values()) + seconds
        if record.loss is not None:
            times.append((round(air, 4), round(clock, 4)))
    return {"air": [one for one, _ in times], "clock": [one for _, one in times]}


def _redrawn_seconds(channel: Channel, record: RoundRecord, seed: int) -> float:
    """Seconds of a round's transmissions, whose payloads have one size for all clients; 0 for a round without any."""
    clients, number = np.array(record.cohort or [], np.int64), record.round - 1
    seeds = record.bytes_up.get("seeds", 0)
    total = 0.0
    for direction, purpose, size in (
        ("up", "share-uplink", seeds),
        ("down", "downlink", sum(record.bytes_down.values())),
        ("up", "uplink", sum(record.bytes_up.values()) - seeds),
    ):
        if size and len(clients):
            sizes = np.full(len(clients), size // len(clients))
            sent = channel.transmit(direction, sizes, stream(seed, purpose, number), clients)
            if not sent.arrives.all():
                raise RuntimeError(f"round {number + 1}: an upload or downlink is lost, so that training would differ")
            total += float(sent.seconds.max())
    return total


def with_device_accuracies(folder: Path, rows: list[Table]) -> list[Table]:
    """Add to each row the test accuracy of every device after its last training, and of the server's model."""
    by_run = {(row["method"], row["seed"]): row for row in rows}
    for run in find_runs([folder]):
        outcome = read(run)
        if outcome.finished:
            by_run[outcome.label, outcome.seed] |= _device_accuracies(run)
    return rows


def _device_accuracies(run: RunDirectory) -> Table:
    state = checkpoint.read(run.path)
    assert isinstance(state, RunState)
    engine = StackedEngine(make_setup(run.experiment()))

    def accuracy(weights: Any) -> float:
        right = engine.score(weights).right
        assert right is not None
        return round(float(right.mean()), 5)

    each = [accuracy(state.client_states[client].model) for client in sorted(state.client_states)]
    spread = {"mean": round(statistics.mean(each), 8), "variance": round(statistics.variance(each), 8)}
    return {"devices": each, **spread, "server": accuracy(state.weights)}


CLOSEST_OF, CLOSEST_DRAWS = (100, 500, 1000, 2000), 20
"""Numbers of raw samples among which the closest pair of two labels is looked for, and draws of each."""

PRIVACY_DATA = ("mnist", "fashion-mnist", "cifar10", "cifar100")
PRIVACY_DRAWS, PRIVACY_DEVICES, PRIVACY_HELD = 10, 2, 500
"""Draws, devices, and samples that each device holds, equally many of every label."""


def write_sample_privacy(path: Path) -> None:
    """Write sample privacy of Mixup and Mix2up on four data sets (Mix2FLD, Tables II and III).

    CIFAR-100's devices coordinate their labels: with labels drawn at random hardly any two match.
    """
    sets = []
    for name in PRIVACY_DATA:
        data, coordinated = build("dataset", name).load(), name == "cifar100"
        options = {"name": "mix2fld", "form": "iid", "clients": PRIVACY_DEVICES, "samples": PRIVACY_HELD}
        population = prepare(build("partition", options), data, 0)
        drawn = [
            make_mixtures(data, population, 0, k, PRIVACY_DEVICES, SAMPLES, coordinated) for k in range(PRIVACY_DRAWS)
        ]
        repeated = sum(one.pairs.repeated for one in drawn)
        rows = [asdict(row) for row in measure_mixtures(drawn, LAMBDAS)]
        closest = {number: _closest_pairs(data, number) for number in CLOSEST_OF}
        sets.append({"data": name, "coordinated": coordinated, "repeated": repeated, "rows": rows, "closest": closest})
    result = {
        "command": "python evidence/run.py mix2fld-privacy",
        "lambdas": LAMBDAS,
        "samples": SAMPLES,
        "devices": PRIVACY_DEVICES,
        "held": PRIVACY_HELD,
        "draws": PRIVACY_DRAWS,
        "closest_draws": CLOSEST_DRAWS,
        "sets": sets,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def _closest_pairs(data: Dataset, number: int) -> list[float]:
    """Logarithms of the distance of the closest pair of two labels among random samples, one a draw; finite ones."""
    found = []
    for draw in range(CLOSEST_DRAWS):
        rows = torch.from_numpy(stream(0, "closest pair", number, draw).permutation(len(data.train.y))[:number])
        found.append(closest_of_two_labels(data.train.x[rows], data.train.y[rows]))
    # CIFAR-100 has the same picture under two labels, a pair that nothing hides.
    return [round(math.log(one), 5) for one in found if one > 0]


def closest_of_two_labels(x: torch.Tensor, y: torch.Tensor) -> float:
    """The smallest Euclidean distance between two samples of different labels; infinite where all have one label."""
    flat = x.double().flatten(1)
    return float(torch.cdist(flat, flat).masked_fill(y[:, None] == y[None], math.inf).min())
