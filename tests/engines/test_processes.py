"""An interrupted exchange between ranks ends all processes, although the others wait to send and do not receive."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import PATIENCE_S

from fedblend.engines.distributed.processes import interrupts_deferred

SCRIPT = """
from fedblend import engines
from fedblend.experiment.config import resolve
from fedblend.engines import EnginePlan, TrainTask
from fedblend.experiment.make_setup import make_setup

setup = make_setup(resolve({
    "data": "digits",
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [4096, 256]},  # uploads larger than a socket buffer
    "method": {"name": "fedavg", "aggregator": "median"},
    "train": {"cohort": 4, "epochs": 1, "batch_size": 500},
}))
engine = engines.make(setup, EnginePlan("loop", None, 2, "contiguous", "asked for"))

def interrupted(*_):
    raise KeyboardInterrupt

engine.inner.collect = interrupted
try:
    engine.collect(TrainTask(0, setup.weights(), None, setup.sizes(0)), [0, 1, 2, 3], set())
except KeyboardInterrupt:
    engine.close()
    print("closed")
"""


@pytest.mark.slow
def test_ctrl_c_at_rank_0_within_a_round_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.fixture
def default_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests are a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupts")
def test_an_interrupt_while_processes_start_is_deferred_and_not_lost() -> None:
    printed: list[str] = []

    def start() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            child = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
            printed.append(child.stdout.strip())

    with pytest.raises(KeyboardInterrupt):
        start()
    assert printed == ["True"]
    with interrupts_deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
"""Whether Ctrl-C cannot reach a new process."""
