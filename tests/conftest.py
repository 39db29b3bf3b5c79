"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import stop_all
from hypothesis import HealthCheck, settings

# Before PyTorch is imported. Networks in tests are so small that threads only get into each other's way.
os.environ["OMP_NUM_THREADS"] = "1"

# Before Triton is imported: without a GPU, its interpreter runs the kernels for GPUs.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Files are synced for a crash of the machine, which no test makes.
os.fsync = lambda handle: None

# How long a machine takes, busy or not, says nothing of what is asserted.
settings.register_profile("fedblend", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedblend")


@pytest.fixture(autouse=True)
def end_processes() -> Iterator[None]:
    """End the processes that a test started, whatever its outcome."""
    yield
    stop_all()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write pages without drawing their charts, which takes longest, but for modules marked ``drawn``."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("drawn"):
            patch.setattr("fedblend.report.page.inline_svg", lambda *given: "<svg></svg>")
            patch.setattr("fedblend.report.page.draw_summary", lambda sections: b"")
        yield


@pytest.fixture
def all_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` time all candidates, of runs of any length, and remember nothing."""
    for name, value in {
        "MIN_SECONDS": 0.0,
        "TUNING_SHARE": 1e9,
        "_plan_file": lambda *_: Path(os.devnull, "none"),
    }.items():
        monkeypatch.setattr(f"fedblend.engines.autotune.{name}", value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each process of pytest-xdist begin with tests marked ``slow``: at the end the others would wait for them."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    made: list[pytest.Item] = []
    for i in range(processes):
        # The shares that `--dist worksteal` gives out: equal ones, in order.
        share = (len(items) - len(made)) // (processes - i)
        first = slow[i::processes]
        room = max(0, share - len(first))
        made += [*first, *others[:room]]
        del others[:room]
    items[:] = made
