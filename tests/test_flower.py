"""A federation over Flower gives the loop engine's weights, and refuses what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")

from flower_helpers import Nodes

from fedblend import methods
from fedblend.config import Experiment, resolve
from fedblend.engines import LoopEngine
from fedblend.engines.flower.server import Terms, run
from fedblend.federation import Federation, State
from fedblend.runs.directory import RunDirectory
from fedblend.world import World


def experiment(method: Any = "fedavg", **changes: Any) -> Experiment:
    """Four clients of digits, three of them a round."""
    table = {
        "data": "digits",
        "partition": {"name": "classes", "clients": 4, "classes_per_client": 3},
        "model": {"name": "mlp", "hidden": [8, 7]},
        "train": {"cohort": 3, "epochs": 1, "batch_size": 50, "lr": 0.1},
        "rounds": 2,
        "method": method,
        "unsafe": True,
        "fraction": 0.3,
    }
    return resolve({**table, **changes})


def by_loop(asked: Experiment) -> tuple[State, list[dict[str, Any]]]:
    world = World.of(asked)
    federation = Federation(world, LoopEngine(world))
    state, record = federation.start()
    records = [record]
    while state.round < asked.rounds:
        state, record = federation.round(state)
        records.append(record)
    return state, records


def nodes(number: int = 4, **config: Any) -> Nodes:
    return Nodes({"partition-id": client, **config} for client in range(number))


@pytest.mark.parametrize("method", methods.SINGLE)
def test_every_method_gives_the_loops_weights_and_counts_the_bytes_in_the_messages(method: str, tmp_path: Path) -> None:
    asked = experiment(method)
    state, records = by_loop(asked)
    grid = nodes()

    finished = run(grid, asked, tmp_path, Terms(deadline=30))

    for name, tensor in state.weights.items():
        assert torch.equal(finished.state.weights[name], tensor), name
    ours = finished.directory.metrics()
    for a, b in zip(ours, records, strict=True):
        same = ("loss", "accuracy", "per_class", "train_loss", "cohort", "bytes_up", "bytes_down", "shared")
        assert {k: a.get(k) for k in same} == {k: b.get(k) for k in same}
    counted = [sum(sum(one[way].values()) for one in ours) for way in ("bytes_down", "bytes_up")]
    exchanged = [one for one in grid.sent if one[1] != "evaluate"]
    assert counted == [sum(one[2] for one in exchanged), sum(one[3] for one in exchanged)]


def test_what_does_not_travel_stays_and_a_clients_own_weights_never_leave(tmp_path: Path) -> None:
    for i, method in enumerate(["fd", {"name": "fedmix", "sharing": "local-means"}]):
        asked, grid = experiment(method), nodes()

        finished = run(grid, asked, tmp_path / str(i), Terms(deadline=30))

        for name, tensor in by_loop(asked)[0].weights.items():
            assert torch.equal(finished.state.weights[name], tensor), name
        shared = [up for _, kind, _, up in grid.sent if kind == "query.share"]
        assert sum(shared) == 0
    model = sum(t.numel() * 4 for t in finished.state.weights.values())
    assert {up for _, kind, _, up in grid.sent if kind == "train"} == {model}
