"""A site whose app does what a file tells it instead of its work, for faults between real processes.

SuperNodes of the tests have a ``sitecustomize`` on their path that imports this; it changes fedblend in the processes
that Flower starts for a site's messages, and in no others. The folder ``FEDBLEND_CUES`` holds

- ``plan.json``: by "client-round" (rounds from 0) ``nan``, ``shape``, or ``wait`` as long as the file says so;
- ``at-work-CLIENT-ROUND``, made when a site begins to train.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CUES = "FEDBLEND_CUES"


class WhenImported(MetaPathFinder):
    """Changes a module as soon as it is imported, and not before: an app must be up before Flower's patience ends."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def follow_plan(work: Any) -> None:
    """Put the plan between Flower's message and fedblend's training."""
    honest, folder = work.train, Path(os.environ[CUES])

    def told_to(name: str) -> Any:
        return json.loads((folder / "plan.json").read_text()).get(name)

    def train(here: Any, words: Any, tensors: Any) -> Any:
        name = f"{here.client}-{here.round}"
        told = told_to(name)
        (folder / f"at-work-{name}").touch()
        while told_to(name) == "wait":
            time.sleep(0.05)
        said, leaving = honest(here, words, tensors)
        spoil = {"nan": lambda t: t * float("nan"), "shape": lambda t: t[..., :-1]}.get(told)
        return said, {n: spoil(t) for n, t in leaving.items()} if spoil else leaving

    work.train = train


if CUES in os.environ and any(Path(word).name == "flwr-clientapp" for word in sys.orig_argv):
    WhenImported("fedblend.flower.work", follow_plan)
