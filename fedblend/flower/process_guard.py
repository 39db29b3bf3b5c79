"""Ends the processes of a trial when the process that started them has ended, also by SIGKILL (Linux).

Run as a script: ``python process_guard.py VALUE``. Standard input is a pipe whose other end only the parent holds. It
closes when the parent ends. Then every process with ``FEDBLEND_TRIAL=VALUE`` in its environment is killed. Processes
inherit their parent's environment, so this covers the apps that Flower starts in sessions of their own. Process groups
and PR_SET_PDEATHSIG do not cover these apps.

Also ends a ServerApp whose SuperExec has ended. Only the standard library is imported, so that a guard starts in
milliseconds.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

VARIABLE = "FEDBLEND_TRIAL"
PROC = Path("/proc")

PARENT_POLL_S = 0.5  # Seconds between two looks whether the parent is there
EXIT_S = 10.0  # Seconds that a process has to end by itself after the interrupt


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


def end_with_parent() -> None:
    """End this process once its parent has ended, where ``--parent-pid`` on the command line asks for that.

    Flower's own look at the parent finds a process for as long as the dead parent is a zombie. In a container whose
    first process does not collect zombies that is for ever, and the app would hold its run's lock just as long.
    """
    parent = os.getppid()
    if ("--parent-pid", str(parent)) not in pairwise(sys.argv):
        return

    def watch() -> None:
        # The system gives an orphan another parent at once, also while the dead one is a zombie.
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        _thread.interrupt_main()
        time.sleep(EXIT_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    # A terminal that closes, or a service manager, may send these to all processes of the parent.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
