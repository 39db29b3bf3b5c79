"""What holds for all tests of federations."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server's clock jump over its pauses. The replies of nodes in one process are there, or never come."""
    skipped = [0.0]

    def skip(seconds: float) -> None:
        skipped[0] += seconds

    # Without Flower there is no server.
    if (sites := sys.modules.get("fedblend.flower.sites")) is not None:
        clock = SimpleNamespace(sleep=skip, monotonic=lambda: time.monotonic() + skipped[0])
        monkeypatch.setattr(sites, "time", clock)


@pytest.fixture
def site(tmp_path: Path) -> Any:
    """A site with a file and samples of its own (:class:`flower_sites.OwnSite`)."""
    from flower_sites import OwnSite

    return OwnSite(tmp_path)
