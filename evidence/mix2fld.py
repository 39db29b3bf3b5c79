"""What is added to the results of Mix2FLD's Figures 2 and 3 after their runs (evidence/run.py calls it)."""

from __future__ import annotations

import math
import statistics
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.core.channel import Channel
from fedblend.core.random import stream
from fedblend.core.state import RunState
from fedblend.core.trees import strip_prefix
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import Outcome, read
from fedblend.runs.summary import costs

ASYMMETRIC, SYMMETRIC = "power_up=23.0", "power_up=40.0"
"""How the two channels are told in a run's label."""

Row = dict[str, Any]


def air_of(records: list[Row]) -> list[float]:
    """Seconds on the air from the beginning to each evaluated round."""
    totals = accumulate(sum(record.get("channel", {}).values()) for record in records)
    return [round(total, 4) for total, record in zip(totals, records, strict=True) if "loss" in record]


def symmetric_rows(folder: Path, rows: list[Row]) -> list[Row]:
    """The runs of the asymmetric channel whose uploads always arrive, as they are over the symmetric one.

    What a channel does follows from keyed draws that training has no part in, so that a run of which nothing is lost
    in either trains alike in both, to the last bit; only its time on the air is another. It is drawn again here, for
    both. Runs that send models, which get lost, are left out, and those made in the symmetric channel too. Raises
    :class:`RuntimeError` where the draw of the run's own channel is not what the run noted, or where anything is lost.
    """
    known = {(row["method"], row["seed"]) for row in rows}
    made = []
    for run in find_runs([folder]):
        outcome = read(run)
        label = outcome.label.replace(ASYMMETRIC, SYMMETRIC)
        sends_models = outcome.config["method"]["upload"]["name"] == "model"
        if sends_models or not outcome.finished or label == outcome.label or (label, outcome.seed) in known:
            continue
        own = run.experiment().channel
        other = type(own)(**{**vars(own), "power_up": own.power_down})
        for record in outcome.records:
            noted = sum(record.get("channel", {}).values())
            if not math.isclose(_air(own, record, outcome.seed), noted, abs_tol=1e-9):
                raise RuntimeError(
                    f"{outcome.label}, round {record['round']}: {noted} s on the air are not drawn again"
                )
        row = next(r for r in rows if (r["method"], r["seed"]) == (outcome.label, outcome.seed))
        made.append({**row, "method": label, "trained_as": outcome.label, **_times(outcome, other)})
    return made


def _times(outcome: Outcome, channel: Channel) -> Row:
    """Seconds on the air and in all, from the beginning to each evaluated round, over a channel."""
    air, clock, told = 0.0, 0.0, []
    for record in outcome.records:
        seconds = _air(channel, record, outcome.seed)
        air += seconds
        clock += costs(record)["clock"] - sum(record.get("channel", {}).values()) + seconds
        if "loss" in record:
            told.append((round(air, 4), round(clock, 4)))
    return {"air": [one for one, _ in told], "clock": [one for _, one in told]}


def _air(channel: Channel, record: Row, seed: int) -> float:
    """Seconds that a round's transmissions take, of payloads that are equally large for all. The first: none."""
    clients, number = np.array(record.get("cohort", []), np.int64), record["round"] - 1
    seeds = record["bytes_up"].get("seeds", 0)
    total = 0.0
    for direction, purpose, size in (
        ("up", "share-uplink", seeds),
        ("down", "downlink", sum(record["bytes_down"].values())),
        ("up", "uplink", sum(record["bytes_up"].values()) - seeds),
    ):
        if size and len(clients):
            sizes = np.full(len(clients), size // len(clients))
            sent = channel.transmit(direction, sizes, stream(seed, purpose, number), clients)
            if not sent.arrives.all():
                raise RuntimeError(f"round {number + 1}: not all arrives {direction}, so that training would differ")
            total += float(sent.seconds.max())
    return total


def device_rows(folder: Path, rows: list[Row]) -> list[Row]:
    """Rows with the test accuracy of each device after its last training, and of the server's model."""
    by_run = {(row["method"], row["seed"]): row for row in rows}
    for run in find_runs([folder]):
        outcome = read(run)
        if outcome.finished:
            by_run[outcome.label, outcome.seed] |= _of_devices(run)
    return rows


def _of_devices(run: RunDirectory) -> Row:
    setup = make_setup(run.experiment())
    state = checkpoint.read(run.path)
    assert isinstance(state, RunState)
    engine = StackedEngine(setup)

    def accuracy(weights: Any) -> float:
        right = engine.score(weights).right
        assert right is not None
        return round(float(right.mean()), 5)

    each = [accuracy(strip_prefix("weights/", state.client_states[client])) for client in sorted(state.client_states)]
    spread = {"mean": statistics.mean(each), "variance": statistics.variance(each)}
    return {"devices": each, **{k: round(v, 8) for k, v in spread.items()}, "server": accuracy(state.weights)}
