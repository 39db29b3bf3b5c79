"""Flower's own simulation (Ray) runs the ClientApp too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")
pytest.importorskip("ray", reason="Ray (flwr[simulation]) is not installed")

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from test_flower import by_loop, experiment

from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.client import app as client_app
from fedblend.flower.server import run


def test_flowers_simulation_gives_the_loops_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    asked, made, server = experiment("fedmix"), [], ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        made.append(run(grid, asked, tmp_path, FederationLimits(deadline=300)))

    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client_app, num_supernodes=4, backend_config=resources)

    (finished,) = made
    for name, tensor in by_loop(asked)[0].weights.items():
        assert torch.equal(finished.state.weights[name], tensor), name
