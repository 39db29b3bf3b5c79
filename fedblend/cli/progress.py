"""Live progress of runs: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedblend.config import Experiment

LINE_EVERY = 10.0
"""Seconds between two plain lines of one run, where there is no terminal."""


class _Facts(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["facts"], no_wrap=True)


class RunProgress:
    """Shows the rounds of several runs; use as a context, and call with each record."""

    def __init__(self, experiments: dict[str, Experiment]) -> None:
        self.experiments = experiments
        self.bytes: dict[str, int] = defaultdict(int)
        self.latest: dict[str, dict[str, Any]] = defaultdict(dict)
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal
        self.printed: dict[str, float] = {}
        self.first: dict[str, tuple[float, int]] = {}
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.completed}/{task.total}"),
            _Facts(),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self.tasks = (
            {slug: self.bars.add_task(slug, total=e.rounds, start=False, facts="") for slug, e in experiments.items()}
            if self.live
            else {}
        )

    def __enter__(self) -> RunProgress:
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.bars.stop()

    def __call__(self, slug: str, record: dict[str, Any]) -> None:
        """Show one round's record."""
        latest = self.latest[slug]
        latest |= {k: record[k] for k in ("accuracy", "loss", "train_loss") if k in record}
        self.bytes[slug] += sum(record["bytes_up"].values()) + sum(record["bytes_down"].values())
        facts = [f"accuracy {latest['accuracy']:.3f}"] if "accuracy" in latest else []
        facts += [f"loss {latest['loss']:.3f}"] if "loss" in latest else []
        facts.append(f"{self.bytes[slug] / 1e6:.1f} MB")
        text, round = "  ".join(facts), record["round"]
        if self.live:
            if round and self.bars.tasks[self.tasks[slug]].start_time is None:
                self.bars.start_task(self.tasks[slug])
            self.bars.update(self.tasks[slug], completed=round, facts=text)
        else:
            self._line(slug, round, text)

    def _line(self, slug: str, round: int, facts: str) -> None:
        now, total = time.monotonic(), self.experiments[slug].rounds
        start, at = self.first.setdefault(slug, (now, round))
        if round < total and now - self.printed.get(slug, -LINE_EVERY) < LINE_EVERY:
            return
        self.printed[slug] = now
        left = f"  {(now - start) / (round - at) * (total - round):.0f} s left" if at < round < total else ""
        sys.stderr.write(f"{slug}: round {round}/{total}  {facts}{left}\n")
        sys.stderr.flush()
