"""Faulty apps of sites and of the server that follow a plan, for tests between real processes.

The processes of such a test have a ``sitecustomize`` on their path that imports this module. It changes fedblend in
Flower's app processes only. The folder ``FEDBLEND_CUES`` holds

- ``plan.json``: by "client-round" (rounds from 0) ``nan``, ``shape``, or ``wait`` as long as the file has this entry;
  by "server-round" the number of uploads after which the server's clock reaches the deadline of that round;
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
    """Changes a module as soon as it is imported, and not before: Flower gives an app limited time to start."""

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


def planned(name: str) -> Any:
    """The plan's entry of this name, if any."""
    return json.loads((Path(os.environ[CUES]) / "plan.json").read_text()).get(name)


def follow_plan_at_site(work: Any) -> None:
    """Let a site train as planned."""
    train = work.train

    def planned_train(task: Any, fields: Any, tensors: Any) -> Any:
        name = f"{task.client}-{task.round}"
        fault = planned(name)
        (Path(os.environ[CUES]) / f"at-work-{name}").touch()
        while planned(name) == "wait":
            time.sleep(0.05)
        reply, upload = train(task, fields, tensors)
        spoil = {"nan": lambda t: t * float("nan"), "shape": lambda t: t[..., :-1]}.get(fault)
        return reply, {n: spoil(t) for n, t in upload.items()} if spoil else upload

    work.train = planned_train


def follow_plan_at_server(sites: Any) -> None:
    """Let the server's clock reach a round's deadline after the planned number of uploads."""
    pull_replies, clock = sites.pull_replies, Clock()
    sites.time = clock

    def planned_replies(pull: Any, waiting: Any, seconds: float) -> Any:
        uploads = 0
        for id, message in pull_replies(pull, waiting, seconds):
            yield id, message
            uploads += message.metadata.message_type == "train"
            if str(uploads) == planned(f"server-{message.metadata.group_id}"):
                clock.ahead += seconds

    sites.pull_replies = planned_replies


class Clock:
    """The time module, with a monotonic clock that can be set ahead."""

    def __init__(self) -> None:
        self.ahead, self.sleep = 0.0, time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


PLANS = {
    "flwr-clientapp": ("fedblend.flower.work", follow_plan_at_site),
    "flwr-serverapp": ("fedblend.flower.sites", follow_plan_at_server),
}

if CUES in os.environ:
    for app, (module, follow_plan) in PLANS.items():
        if any(Path(word).name == app for word in sys.orig_argv):
            WhenImported(module, follow_plan)
