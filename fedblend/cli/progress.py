"""Progress of runs and other long work: live bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedblend.cli.console import Console, write_line
from fedblend.core.record import EngineChoice, RoundRecord
from fedblend.experiment.config import Experiment

TESTING_SHARE = 0.2  # Share of a run's time above which a line names the options that make testing cheaper
STEP_SECONDS = 2.0  # Seconds of a round after which its steps are shown
LINE_EVERY = 10.0  # Seconds between two plain lines of one run or task, where there is no terminal


class RemainingTime:
    """Estimates the remaining time of each of several tasks, from its pace since it began, or began again."""

    def __init__(self) -> None:
        self.first: dict[str, tuple[float, int]] = {}
        self.latest: dict[str, int] = {}

    def left(self, task: str, done: int, total: int) -> str:
        """Seconds left, as the end of a line; empty before the first progress, and at the end."""
        now = time.monotonic()
        if done < self.latest.get(task, done):  # another task of the same name, or the task was restarted
            del self.first[task]
        self.latest[task] = done
        start, first = self.first.setdefault(task, (now, done))
        return f"  {(now - start) / (done - first) * (total - done):.0f} s left" if first < done < total else ""


def _bars(console: Console, width: int, transient: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=width),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=transient,
    )


class RunProgress:
    """Shows the rounds of several runs; use as a context, and call with each record.

    ``rounds_before`` are the rounds of each resumed run at its start; of these only the last is shown.
    """

    def __init__(self, experiments: dict[str, Experiment], rounds_before: Mapping[str, int]) -> None:
        self.rounds_before = rounds_before
        self.totals = {slug: max(e.rounds, rounds_before.get(slug, 0)) for slug, e in experiments.items()}
        self.bytes: dict[str, int] = defaultdict(int)
        self.latest: dict[str, dict[str, Any]] = defaultdict(dict)
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal
        self.closed = False  # whether the reader of stderr has closed its pipe
        self.printed: dict[str, float] = {}
        self.stepped: dict[str, float] = {}  # when a step was printed, or the last round ended
        self.engines: set[str] = set()  # choices that were printed
        self.seconds: dict[str, Counter[str]] = defaultdict(Counter)  # of each run after round 0, by phase
        self.told = False  # whether testing was said to be slow
        self.remaining = RemainingTime()
        self.bars = _bars(self.console, 10)
        self.tasks = (
            {slug: self.bars.add_task(slug, total=n, start=False, note="") for slug, n in self.totals.items()}
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

    def __call__(self, slug: str, record: RoundRecord) -> None:
        """Show one round's record. If the output is closed, or its disk is full, the run continues without output."""
        self._unless_closed(self._show, slug, record)

    def step(self, slug: str, what: str, done: int, total: int) -> None:
        """Show a step of a run's round, or of its first choices, that takes a while."""
        left = self.remaining.left(f"{slug}: {what}", done, total)
        if time.monotonic() - self.stepped.setdefault(slug, time.monotonic()) >= STEP_SECONDS:
            self._unless_closed(self._show_step, slug, f"{what} {done / total:.0%}{left}" if total else what)

    def _unless_closed(self, show: Callable[..., None], *facts: Any) -> None:
        if not self.closed:
            try:
                show(*facts)
            except OSError:
                self.closed = True

    def _show_step(self, slug: str, text: str) -> None:
        if self.live:
            self.bars.update(self.tasks[slug], note=text)
        elif time.monotonic() - max(self.stepped[slug], self.printed.get(slug, 0.0)) >= LINE_EVERY:
            self.stepped[slug] = time.monotonic()
            write_line(f"{slug}: {text}")

    def _show(self, slug: str, record: RoundRecord) -> None:
        self._print_engine(slug, record.machine.get("engine"))
        latest = self.latest[slug]
        scores = {"accuracy": record.accuracy, "loss": record.loss}
        latest |= {name: value for name, value in scores.items() if value is not None}
        self.bytes[slug] += sum(record.bytes_up.values()) + sum(record.bytes_down.values())
        facts = [f"{name} {latest[name]:.3f}" for name in scores if name in latest]
        facts.append(f"{self.bytes[slug] / 1e6:.1f} MB sent")
        text, round = "  ".join(facts), record.round
        self.stepped[slug] = time.monotonic()
        if self.live:
            if round > self.rounds_before.get(slug, 0) and self.bars.tasks[self.tasks[slug]].start_time is None:
                self.bars.start_task(self.tasks[slug])
            self.bars.update(self.tasks[slug], completed=round, note=text)
        else:
            self._line(slug, round, text)
        if round:
            self._note_testing(slug, record)

    def _note_testing(self, slug: str, record: RoundRecord) -> None:
        """Name the options that make testing cheaper, once, where it takes much of a run of which much is left."""
        seconds = self.seconds[slug]
        seconds.update(record.machine.get("seconds", {}))
        testing, all_phases = seconds["evaluate"], seconds.total()
        left = (self.totals[slug] - record.round) / record.round * testing
        if not self.told and testing > TESTING_SHARE * all_phases and left > LINE_EVERY:
            self.told = True
            self.console.tell(
                f"{slug}: testing takes {testing / all_phases:.0%} of the time; cheaper: eval_every (rounds between "
                "tests) or eval_samples (a fixed part of the test samples)"
            )

    def _print_engine(self, slug: str, choice: EngineChoice | None) -> None:
        """Print the engine of a run where fedblend chose it, once for all runs with the same choice."""
        if choice is None or choice["why"] == "as asked for":
            return
        number = choice["stack"] or 1
        stack = f", {number} clients at once" if number > 1 else ""
        ranks = f", {choice['ranks']} ranks" if choice["ranks"] > 1 else ""
        chosen = f"engine {choice['engine']}{stack}{ranks}"
        if chosen not in self.engines:
            self.engines.add(chosen)
            self.console.print(f"{slug}: {chosen} ({choice['why']})")

    def _line(self, slug: str, round: int, facts: str) -> None:
        if round < self.rounds_before.get(slug, 0):
            return
        now, total = time.monotonic(), self.totals[slug]
        left = self.remaining.left(slug, round, total)
        if round < total and now - self.printed.get(slug, -LINE_EVERY) < LINE_EVERY:
            return
        self.printed[slug] = now
        write_line(f"{slug}: round {round}/{total}  {facts}{left}")


class Steps:
    """Shows the progress of several tasks: bars in a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.live = console.is_terminal
        self.bars = _bars(console, 20, transient=True)
        self.tasks: dict[str, TaskID] = {}
        self.printed = time.monotonic()
        self.remaining = RemainingTime()

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` steps of a task are done, with a note behind."""
        if self.live:
            if task not in self.tasks:
                self.tasks[task] = self.bars.add_task(task, total=total, note=note)
            elif done < self.bars.tasks[self.tasks[task]].completed:
                self.bars.reset(self.tasks[task], total=total)
            self.bars.update(self.tasks[task], completed=done, note=note)
            return
        left = self.remaining.left(task, done, total)
        if time.monotonic() - self.printed > LINE_EVERY:
            self.printed = time.monotonic()
            write_line(f"{task}: {done}/{total}  {note}".rstrip() + left)


@contextmanager
def steps_shown() -> Iterator[Steps]:
    """Inside, the yielded :class:`Steps` shows progress."""
    steps = Steps()
    with steps.bars if steps.live else nullcontext():
        yield steps
