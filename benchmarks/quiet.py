"""How much of the machine others use while something is timed, from Linux's /proc."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PROC = Path("/proc")
TICK = os.sysconf("SC_CLK_TCK")

MARK = "FEDBLEND_BENCHMARK"
"""Environment variable by which a contestant's processes are known, also those that it has started and left."""

EVERY = 1.0
"""Seconds between two looks; each takes about a millisecond of one core."""

QUIET = 0.08
"""Share of one core that others may use; a machine's own housekeeping takes up to half of it."""

LOOKS = 2
"""Looks at an idle machine that must find it quiet before a measurement is made again."""

ASKED = 3
"""Looks after which a process without the mark is taken for someone else's.

Between fork and exec a process still shows the environment of the one that started it."""

Counts = dict[int, float]
"""Seconds of processor time that each of our processes has used so far, by its number."""


@dataclass(frozen=True)
class Look:
    """What was seen at one moment: seconds of work of all processors so far, stolen ones among them, and ours."""

    at: float
    busy: float
    ours: Counts


def busy_seconds() -> float:
    """Seconds that all processors have worked, or were taken from us by the machine's host, since it started."""
    user, nice, system, _, _, irq, softirq, steal = map(int, (PROC / "stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICK


def used(pid: int) -> float | None:
    """Seconds of processor time that a process has used; ``None`` once it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / TICK


def processes() -> list[int]:
    """The numbers of all processes."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def is_marked(pid: int, mark: str) -> bool:
    """Whether a process has a measurement's mark."""
    try:
        return f"{MARK}={mark}".encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def foreign_share(looks: Sequence[Look]) -> float:
    """Share of one core that others used between the looks.

    A span in which one of our processes ended is left out: nobody knows what it used in it.

    >>> foreign_share([Look(0, 10, {7: 5.0}), Look(2, 13, {7: 7.0}), Look(4, 19, {})])
    0.5
    """
    foreign = seconds = 0.0
    for before, after in pairwise(looks):
        if before.ours.keys() <= after.ours.keys():
            ours = sum(after.ours.values()) - sum(before.ours.values())
            foreign += after.busy - before.busy - ours
            seconds += after.at - before.at
    return max(0.0, foreign) / seconds if seconds else 0.0


class Watch:
    """Looks at the machine while the processes with a mark, and this one, work."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.looks: list[Look] = []
        self._ours = {os.getpid()}
        # Whoever is here before a contestant starts is someone else: to ask them all at each look would take time.
        self._asked = dict.fromkeys(processes(), ASKED)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        self.looks.append(self._look())
        while not self._end.wait(EVERY):
            self.looks.append(self._look())

    def _look(self) -> Look:
        for pid in processes():
            if pid not in self._ours and self._asked.get(pid, 0) < ASKED:
                self._asked[pid] = self._asked.get(pid, 0) + 1
                if is_marked(pid, self.mark):
                    self._ours.add(pid)
        ours = {pid: seconds for pid in self._ours if (seconds := used(pid)) is not None}
        self._ours = set(ours)
        return Look(time.perf_counter(), busy_seconds(), ours)

    @property
    def foreign(self) -> float:
        """Share of one core that others have used."""
        return foreign_share(self.looks)


def wait_until_quiet(patience: float) -> None:
    """Wait until nobody else works, at most about ``patience`` seconds."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        with Watch("nobody") as watch:
            time.sleep(EVERY * LOOKS)
        if watch.foreign <= QUIET:
            return


def run_marked(command: Sequence[str], mark: str, environment: Mapping[str, str], timeout: float) -> tuple[str, Watch]:
    """Run a command under a watch; returns all it says. Raises :class:`subprocess.SubprocessError` if it fails."""
    with Watch(mark) as watch:
        done = subprocess.run(
            command,
            env={**os.environ, **environment, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise subprocess.SubprocessError(f"exit status {done.returncode}: {last}")
    return done.stdout, watch
