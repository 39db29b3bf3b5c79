"""A site whose app does what a file tells it instead of its work, for faults between real processes.

SuperNodes of the tests have a ``sitecustomize`` on their path that imports this; it changes fedblend in the processes
that Flower starts for a site's messages, and in no others. The folder ``FEDBLEND_CUES`` holds

- ``plan.json``: by "client-round" (rounds from 0) ``wait``, ``nan`` or ``shape``;
- ``at-work-CLIENT-ROUND``, made when a site begins to train;
- ``go-CLIENT-ROUND``, which a site that waits is waiting for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CUES = "FEDBLEND_CUES"


def install() -> None:
    """Put the plan between Flower's message and fedblend's training."""
    from fedblend.engines.flower import work

    honest, folder = work.train, Path(os.environ[CUES])

    def train(here: Any, words: Any, tensors: Any) -> Any:
        name = f"{here.client}-{here.round}"
        told = json.loads((folder / "plan.json").read_text()).get(name)
        (folder / f"at-work-{name}").touch()
        while told == "wait" and not (folder / f"go-{name}").exists():
            time.sleep(0.05)
        said, leaving = honest(here, words, tensors)
        spoil = {"nan": lambda t: t * float("nan"), "shape": lambda t: t[..., :-1]}.get(told)
        return said, {n: spoil(t) for n, t in leaving.items()} if spoil else leaving

    work.train = train


if any(Path(word).name == "flwr-clientapp" for word in sys.orig_argv):
    install()
