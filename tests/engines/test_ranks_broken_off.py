"""An exchange between ranks that is broken off in the middle ends: the others wait to be heard, not to listen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from fedblend import engines
from fedblend.experiment.config import resolve
from fedblend.engines import Choice, TrainTask
from fedblend.core.setup import World

if __name__ == "__main__":
    world = make_setup(resolve({
        "data": "digits",
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [4096, 256]},  # uploads that no socket takes in one go
        "method": {"name": "fedavg", "aggregator": "median"},
        "train": {"cohort": 4, "epochs": 1, "batch_size": 500},
    }))
    engine = engines.make(world, Choice("loop", None, 2, "contiguous", "asked for"))

    def interrupted(*_):
        raise KeyboardInterrupt

    engine.inner.collect = interrupted
    try:
        engine.collect(TrainTask(0, world.weights(), None, world.sizes(0)), [0, 1, 2, 3], set())
    except KeyboardInterrupt:
        engine.close()
        print("closed")
"""


@pytest.mark.slow
def test_ctrl_c_that_one_rank_alone_hears_of_in_a_round_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
