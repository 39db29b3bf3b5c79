"""Worker processes: their start, their end, and the messages of JSON lines that they exchange with this process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fedblend.core.errors import FedblendError, printable
from fedblend.core.setup import Setup
from fedblend.engines.distributed.forks import ForkedProcess, can_fork
from fedblend.engines.distributed.pipes import THREAD, Parent, lines_of, message_of, write
from fedblend.engines.distributed.ranks import Ranks

POLL_SECONDS = 0.2
"""Seconds between two checks that all processes run, while they connect."""

EXIT_SECONDS = 10.0
"""Seconds until a process is killed that does not end by itself."""

START = """\
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
sys.path[:], sys.argv[:] = json.loads(sys.stdin.buffer.raw.readline() or sys.exit())
from fedblend.engines.distributed.processes import run_worker
run_worker()
"""
"""The program of a worker process."""


def start_python(function: str, **arguments: Any) -> subprocess.Popen[bytes]:
    """Start a new Python process that calls one function of fedblend, with its :class:`Parent` and ``arguments``.

    ``function`` is written ``module:name``. The process has this process's import path and arguments, ignores Ctrl-C,
    and ends when this process has ended. Start it inside :func:`interrupts_deferred`, so that Ctrl-C does not reach it
    earlier.

    ``multiprocessing`` is not used: its processes import the user's main script again. That script may have no
    ``if __name__ == "__main__"``, or be no file at all (standard input, a notebook).
    """
    if not sys.executable:
        raise FedblendError(
            "Python does not know its own program (sys.executable is empty), so no further process can be "
            "started; valid: ranks = 1 and jobs = 1"
        )
    # With -P, a file such as json.py in the current folder does not replace Python's.
    command = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions), "-c", START]
    process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    write(process.stdin.fileno(), [[str(folder) for folder in sys.path], sys.argv])
    write(process.stdin.fileno(), {"function": function, "arguments": arguments})
    return process


class WorkerProcess:
    """Another process of fedblend, a new Python process or a copy of this one, and the messages that it sends."""

    def __init__(
        self, process: subprocess.Popen[bytes] | ForkedProcess, inbox: queue.SimpleQueue[Any] | None = None
    ) -> None:
        """``inbox`` gets a pair for each message: this object and the message, or ``None`` after the last one."""
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue() if inbox is None else inbox
        self.process = process
        threading.Thread(target=self._receive, name=THREAD, daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message; without effect if the process has ended."""
        assert self.process.stdin is not None
        write(self.process.stdin.fileno(), message)

    def _receive(self) -> None:
        assert self.process.stdout is not None
        for line in lines_of(self.process.stdout.fileno()):
            if (message := message_of(line)) is not None:
                self.inbox.put((self, message))
            else:
                # Printed while Python starts, by a sitecustomize.
                sys.stderr.write(f"{printable(line.decode(errors='replace'))}\n")
        self.inbox.put((self, None))

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, negative for a signal; ``None`` if the process still runs after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    def how_it_ended(self) -> str:
        """``was killed by signal 9 (out of memory?)``, or ``ended with exit code 1``."""
        code = self.wait() or 0
        return f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"


def run_worker() -> None:
    """Call the function that the parent names in its first message."""
    parent = Parent()
    for first in parent.messages:
        module, _, name = first["function"].partition(":")
        getattr(importlib.import_module(module), name)(parent, **first["arguments"])
        return


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C inside, by a handler that does nothing: the command line still sees a second one, and ends."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set signal handlers; it also receives all interrupts.
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the context. Processes that start inside never receive it.

    The signal is blocked, which these processes inherit. Where it reaches another thread, or on a system that cannot
    block it, the handler notes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    can_block = hasattr(signal, "pthread_sigmask")
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if can_block else set()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if can_block:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if noted and callable(before):
            # Not raised again, since it would count as a second Ctrl-C.
            before(signal.SIGINT, None)
        elif noted:
            signal.raise_signal(signal.SIGINT)


def defined_in_main(value: Any) -> str:
    """The first ``__main__:Name`` in an experiment's plain data, a part that no other process can import; or empty.

    >>> defined_in_main({"method": {"terms": [{"name": "__main__:Mine"}]}}), defined_in_main({"data": "digits"})
    ('__main__:Mine', '')
    """
    if isinstance(value, str):
        return value if value.startswith("__main__:") else ""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(defined_in_main, inner)), "")


class RankProcesses:
    """The worker processes that rank 0 started; empty with ``torchrun``, which manages its own processes."""

    def __init__(self) -> None:
        self.processes: list[WorkerProcess] = []
        """The process of each rank from 1 on. It sends at most one message: its error."""

    def start(self, size: int, address: str, setup: Setup) -> None:
        """Start ranks 1 to ``size`` - 1 on this machine: copies of this process, or new ones that import and read."""
        from fedblend.engines.distributed.worker import serve_process

        copies, forked = can_fork(), list[ForkedProcess]()
        # Ctrl-C interrupts the whole process group; only rank 0, which then stops the others, handles it.
        with interrupts_deferred():
            for rank in range(1, size):
                if copies:
                    work = functools.partial(serve_process, rank=rank, size=size, address=address, setup=setup)
                    forked.append(ForkedProcess(work, forked))
                    self.processes.append(WorkerProcess(forked[-1]))
                else:
                    function = f"{serve_process.__module__}:{serve_process.__name__}"
                    process = start_python(function, rank=rank, size=size, address=address)
                    self.processes.append(WorkerProcess(process))

    def connect(self, size: int, address: str) -> Ranks:
        """Wait until all ranks are connected. Raises :class:`FedblendError` if a process ends before."""
        connected: list[Ranks] = []
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                connected.append(Ranks(0, size, address))
            except BaseException as error:
                errors.append(error)

        # In a thread, since connecting would wait for a process that has died.
        thread = threading.Thread(target=wait, name=THREAD, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if self.failed():
                raise FedblendError(self.message())
        if errors:
            raise errors[0]
        return connected[0]

    def failed(self) -> bool:
        """Whether a process has ended."""
        return any(process.has_ended() for process in self.processes)

    def message(self) -> str:
        """Return the error of the failed rank, or how its process ended."""
        for rank, process in enumerate(self.processes, 1):
            code = process.wait(1.0)
            with contextlib.suppress(queue.Empty):
                if error := process.inbox.get(timeout=0.0 if code is None else 1.0)[1]:
                    return str(error["error"])
            if code:
                how = process.how_it_ended()
                return f"rank {rank} {how}; what was computed up to the last checkpoint is kept"
        return "another rank ended (see its own output); what was computed up to the last checkpoint is kept"

    def stop(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()

    def wait(self) -> None:
        """Wait for the processes to end; kill those that take longer than :data:`EXIT_SECONDS`."""
        for process in self.processes:
            if process.wait(EXIT_SECONDS) is None:
                process.kill()
                process.wait()


def free_address() -> str:
    """Return a free local TCP address for the ranks of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
