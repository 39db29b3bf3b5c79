"""The federation's demonstration: its hospitals, through Flower's messages in one process; and its drill."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedblend.experiment.make_setup import make_setup

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")

from flower_helpers import Nodes
from script_helpers import script

from fedblend.core.errors import FedblendError
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.server import run
from fedblend.flower.site import read_site
from fedblend.runs import api

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_hospitals_get_the_weights_of_the_loop_engine_on_all_patients(tmp_path: Path) -> None:
    made = script("examples/federation_demo.py")
    try:
        sizes = [len(read_site(EXAMPLES / "hospitals" / f"{name}.toml").data.load().train) for name in made.HOSPITALS]
    except FedblendError as error:
        pytest.skip(f"UCI Heart Disease is not here: {error}")
    changes = [("rounds", 2)]
    (asked,) = api.expand_file(EXAMPLES / "hospitals" / "federation.toml", changes, None).experiments.values()
    paths = []
    for name in made.HOSPITALS:
        paths.append(tmp_path / f"{name}.toml")
        shutil.copy(EXAMPLES / "hospitals" / f"{name}.toml", paths[-1])
    grid = Nodes({"partition-id": client, "site": str(path)} for client, path in enumerate(paths))

    finished = run(grid, asked, tmp_path / "run", FederationLimits(deadline=60))

    setup = made.together(make_setup(asked), paths)
    assert finished.setup.population.sizes.tolist() == setup.population.sizes.tolist() == sizes
    for name, tensor in made.by_loop(setup, 2).items():
        assert torch.equal(finished.state.weights[name], tensor), name
    logged = [line for name in made.HOSPITALS for line in (tmp_path / f"audit-{name}.jsonl").read_text().splitlines()]
    # The mean, and of each of two rounds its beginning and its model.
    assert len(logged) == 4 * 5


@pytest.mark.slow
def test_a_short_drill_ends_as_expected(tmp_path: Path) -> None:
    """Three provisioned sites as real processes: a wrong number, a late site, `flwr stop`, certificates."""
    drill = [sys.executable, EXAMPLES / "federation_drill.py", "--short", "--out", tmp_path / "drill"]
    done = subprocess.run(drill, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
