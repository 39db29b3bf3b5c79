"""What several tests of bad input take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli_helpers import Outcome, here, refused, write

RUN = "fedavg-seed0"


def run(changes: dict[str, Any], *words: object) -> Outcome:
    """Run the tiny experiment with changes."""
    return here("run", write(Path("bad.toml"), changes), *words)


def refused_at_once(outcome: Outcome, *words: str) -> None:
    """Assert that a command was refused before it made a run."""
    refused(outcome, *words)
    assert not Path("runs").exists(), "a mistake must not leave an empty run behind"


def fedmix(**options: Any) -> dict[str, Any]:
    """FedMix with options, as a table of an experiment."""
    return {"method": {"name": "fedmix", **options}}
