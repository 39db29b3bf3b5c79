"""Worker processes: their start, their end, and the messages of JSON lines that they exchange with this process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fedblend.core.errors import FedblendError, printable
from fedblend.engines.distributed.ranks import Ranks

POLL_SECONDS = 0.2
"""Seconds between two checks that all processes run, while they connect."""

EXIT_SECONDS = 10.0
"""Seconds until a process is killed that does not end by itself."""

Message = dict[str, Any]
"""Fields that JSON can represent."""

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


class WorkerProcess:
    """A new Python process that calls one function of fedblend.

    ``function`` is written ``module:name``. It is called with the :class:`Parent` and ``arguments``. The process has
    this process's import path and arguments, ignores Ctrl-C, and ends when this process has ended. Start it inside
    :func:`interrupts_deferred`, so that Ctrl-C does not reach it earlier.

    ``multiprocessing`` is not used: its processes import the user's main script again. That script may have no
    ``if __name__ == "__main__"``, or be no file at all (standard input, a notebook).
    """

    def __init__(self, function: str, inbox: queue.SimpleQueue[Any] | None = None, **arguments: Any) -> None:
        """``inbox`` gets a pair for each message: this object and the message, or ``None`` after the last one."""
        if not sys.executable:
            raise FedblendError(
                "Python does not know its own program (sys.executable is empty), so no further process can be "
                "started; valid: ranks = 1 and jobs = 1"
            )
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue() if inbox is None else inbox
        # With -P, a file such as json.py in the current folder does not replace Python's.
        command = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions), "-c", START]
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.send([[str(folder) for folder in sys.path], sys.argv])
        self.send({"function": function, "arguments": arguments})
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message; without effect if the process has ended."""
        assert self._process.stdin is not None
        _write(self._process.stdin.fileno(), message)

    def _receive(self) -> None:
        assert self._process.stdout is not None
        for line in _lines(self._process.stdout.fileno()):
            if (message := _message(line)) is not None:
                self.inbox.put((self, message))
            else:
                # Printed while Python starts, by a sitecustomize.
                sys.stderr.write(f"{printable(line.decode(errors='replace'))}\n")
        self.inbox.put((self, None))

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, negative for a signal; ``None`` if the process still runs after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def how_it_ended(self) -> str:
        """``was killed by signal 9 (out of memory?)``, or ``ended with exit code 1``."""
        code = self.wait() or 0
        return f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"


class Parent:
    """The process that started this worker process, as the worker sees it.

    Messages have standard input and output for themselves: user code reads nothing, and prints to standard error.
    """

    def __init__(self) -> None:
        self._output, self._sending = os.dup(1), threading.Lock()
        self.messages: Iterator[Message] = map(json.loads, _lines(os.dup(0)))
        """The parent's messages, until the parent has ended."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def send(self, message: Message) -> None:
        """Send a message; without effect if the parent has ended."""
        with self._sending:
            _write(self._output, message)

    def listen(self, handle: Callable[[Message], None]) -> None:
        """Start a thread that calls ``handle`` with each message, and ends this process after its parent.

        A parent that was killed sends no last message. The process must end nevertheless: it holds locks and memory.
        """

        def work() -> None:
            for message in self.messages:
                handle(message)
            os._exit(1)

        threading.Thread(target=work, daemon=True).start()


def run_worker() -> None:
    """Call the function that the parent names in its first message."""
    parent = Parent()
    for first in parent.messages:
        module, _, name = first["function"].partition(":")
        getattr(importlib.import_module(module), name)(parent, **first["arguments"])
        return


def _write(file: int, message: Any) -> None:
    """Write a message to a pipe as one line; without effect if nobody reads it any more."""
    line = f"{json.dumps(message)}\n".encode()
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(file, line) :]


def _message(line: bytes) -> Message | None:
    """A message from its line; ``None`` for any other text."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _lines(file: int) -> Iterator[bytes]:
    """Yield the complete lines of a pipe.

    Not read through a buffer: a thread that waits in a buffer's lock when Python ends makes Python abort.
    """
    rest = b""
    while chunk := os.read(file, 1 << 16):
        *complete, rest = (rest + chunk).split(b"\n")
        yield from complete


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C inside, in this process and in those that it starts."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set signal handlers; it also receives all interrupts.
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        if noted:
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

    def start(self, size: int, address: str) -> None:
        """Start ranks 1 to ``size`` - 1 on this machine."""
        function = "fedblend.engines.distributed.worker:serve_process"
        # Ctrl-C interrupts the whole process group; only rank 0, which then stops the others, handles it.
        with interrupts_deferred():
            for rank in range(1, size):
                self.processes.append(WorkerProcess(function, rank=rank, size=size, address=address))

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
        thread = threading.Thread(target=wait, daemon=True)
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
