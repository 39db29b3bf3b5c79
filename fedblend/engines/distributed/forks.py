"""Copies of this process, which have imported and read what it has, where that is safe."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import IO, NoReturn

import torch

from fedblend.engines.distributed.pipes import THREAD, Parent

WAIT_SECONDS = 0.01
"""Seconds between two checks that a copy of this process runs, while its end is waited for."""


class ForkedProcess:
    """A copy of this process that calls a function with its :class:`Parent`, with the interface of a ``Popen``.

    The copy has what this process has imported and read, and shares this memory until one of both writes to it. Make
    one only where :func:`can_fork` holds, and inside :func:`interrupts_deferred`. ``others`` are earlier copies, whose
    pipes the new one closes: each copy ends when this process has ended, which it sees by the end of its own pipe.
    """

    def __init__(self, work: Callable[[Parent], None], others: Sequence[ForkedProcess] = ()) -> None:
        received, sent = os.pipe()
        answers, answered = os.pipe()
        # Otherwise both processes would print what has not been printed yet.
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of forks beside other threads; :func:`can_fork` has looked at them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            for other in others:
                other.stdin.close()
                other.stdout.close()
            os.close(sent)
            os.close(answers)
            _run_copy(work, received, answered)
        os.close(received)
        os.close(answered)
        self.stdin: IO[bytes] = os.fdopen(sent, "wb", 0)
        self.stdout: IO[bytes] = os.fdopen(answers, "rb", 0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises :class:`subprocess.TimeoutExpired`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(WAIT_SECONDS)
        return code

    def kill(self) -> None:
        """Kill the process; without effect if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def can_fork() -> bool:
    """Whether a copy of this process can compute as a process of its own.

    Only on Linux, and without a GPU. A copy has no threads but the one that made it, so another one must not hold a
    lock or compute meanwhile: none may run but those of fedblend and of its progress display, which do neither.
    Notebooks have others.
    """
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return (
        sys.platform == "linux"
        and threading.current_thread() is threading.main_thread()
        and not torch.cuda.is_initialized()
        and all(thread.name == THREAD or type(thread).__module__.startswith("rich.") for thread in others)
    )


def _run_copy(work: Callable[[Parent], None], received: int, answered: int) -> NoReturn:
    """Call ``work`` in a copy of the parent's process, and end it without what the parent does at its end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in ("SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.dup2(received, 0)
        os.dup2(answered, 1)
        os.close(received)
        os.close(answered)
        # The parent's may be a progress display's, or hold lines that are not printed yet.
        sys.stdin = os.fdopen(0, closefd=False)
        for file, name in ((1, "stdout"), (2, "stderr")):
            setattr(sys, name, os.fdopen(file, "w", 1, errors="backslashreplace", closefd=False))
        work(Parent())
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
