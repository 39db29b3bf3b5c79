"""Ends the processes of a trial when the process that started them has ended, also by SIGKILL (Linux).

Run as a script: ``python process_guard.py VALUE``. Standard input is a pipe whose other end only the parent holds. It
closes when the parent ends. Then every process with ``FEDBLEND_TRIAL=VALUE`` in its environment is killed. Processes
inherit their parent's environment, so this covers the apps that Flower starts in sessions of their own. Process groups
and PR_SET_PDEATHSIG do not cover these apps.

Only the standard library is imported, so that a guard starts in milliseconds.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

VARIABLE = "FEDBLEND_TRIAL"
PROC = Path("/proc")


def marked_processes(value: str) -> list[int]:
    """Return the processes with ``FEDBLEND_TRIAL=value`` in their environment; zombies have none."""
    mark, found = f"{VARIABLE}={value}".encode(), []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def kill_marked(value: str) -> None:
    """Kill the marked processes until two looks in a row find none, since a process may start another meanwhile."""
    looks_without = 0
    while looks_without < 2:
        found = marked_processes(value)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        looks_without = 0 if found else looks_without + 1
        time.sleep(0.1)


if __name__ == "__main__":
    # A terminal that closes, or a service manager, may send these to all processes of the parent.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
