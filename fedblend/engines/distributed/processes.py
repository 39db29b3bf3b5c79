"""Start and stop of the worker processes of other ranks on this machine."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from fedblend.core.errors import FedblendError
from fedblend.engines.distributed.ranks import Ranks
from fedblend.engines.distributed.worker import serve_process

POLL_SECONDS = 0.2
"""Seconds between two checks that all processes run, while they connect."""

EXIT_SECONDS = 10.0
"""Seconds until a process is killed that does not end by itself."""


class RankProcesses:
    """The worker processes that rank 0 started; empty with ``torchrun``, which manages its own processes."""

    def __init__(self) -> None:
        self.processes: list[tuple[Any, Connection]] = []
        """The process of each rank from 1 on, and the pipe on which it sends an error."""

    def start(self, size: int, address: str) -> None:
        """Start ranks 1 to ``size`` - 1 on this machine."""
        context = multiprocessing.get_context("spawn")
        # Ctrl-C interrupts the whole process group; only rank 0, which then stops the others, handles it.
        before = _ignore_interrupts()
        try:
            for rank in range(1, size):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (rank, size, address, sender, list(sys.path))
                process = context.Process(target=serve_process, args=arguments, daemon=True)
                process.start()
                sender.close()
                self.processes.append((process, receiver))
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

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
        return any(not process.is_alive() for process, _ in self.processes)

    def message(self) -> str:
        """Return the error of the failed rank, or how its process ended."""
        for rank, (process, pipe) in enumerate(self.processes, 1):
            process.join(1.0)
            if pipe.poll(1.0 if not process.is_alive() else 0):
                try:
                    return str(pipe.recv_bytes().decode())
                except EOFError:
                    pass
            if process.exitcode not in (None, 0):
                how = f"was killed by signal {-process.exitcode}" if process.exitcode < 0 else "ended"
                return f"rank {rank} {how} (out of memory?); what was computed up to the last checkpoint is kept"
        return "another rank ended (see its own output); what was computed up to the last checkpoint is kept"

    def stop(self) -> None:
        """Kill the processes."""
        for process, _ in self.processes:
            process.kill()

    def wait(self) -> None:
        """Wait for the processes to end; kill those that take longer than :data:`EXIT_SECONDS`."""
        for process, pipe in self.processes:
            process.join(EXIT_SECONDS if process.is_alive() else None)
            if process.is_alive():
                process.kill()
            pipe.close()


def _ignore_interrupts() -> Any:
    try:
        return signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        # Only the main thread may set signal handlers; it also receives all interrupts.
        return None


def free_address() -> str:
    """Return a free local TCP address for the ranks of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
