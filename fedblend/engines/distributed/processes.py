"""Starting the processes of the other ranks on this machine, and seeing them off."""

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
from fedblend.engines.distributed.worker import serve_apart

LOOK_EVERY = 0.2
"""Seconds between two looks at whether all ranks still live while they meet."""

GOODBYE = 10.0
"""Seconds that ranks get to end after they were told to."""


class RankProcesses:
    """The processes of the other ranks, where this process started them; torchrun's are its own."""

    def __init__(self) -> None:
        self.processes: list[tuple[Any, Connection]] = []

    def start(self, size: int, where: str) -> None:
        """Start ranks 1 to ``size`` - 1 on this machine."""
        context = multiprocessing.get_context("spawn")
        # Ctrl-C goes to the whole group; only rank 0, which can say goodbye, is to take notice.
        before = _ignore_interrupts()
        try:
            for rank in range(1, size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, size, where, theirs, list(sys.path))
                process = context.Process(target=serve_apart, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.processes.append((process, ours))
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def meet(self, size: int, where: str) -> Ranks:
        """Wait until all have come. Raises :class:`FedblendError` if one ends before."""
        met: list[Ranks] = []
        faults: list[BaseException] = []

        def wait() -> None:
            try:
                met.append(Ranks(0, size, where))
            except BaseException as error:
                faults.append(error)

        # In a thread, since the meeting itself would wait for one that has died.
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_EVERY)
            if self.failed():
                raise FedblendError(self.message())
        if faults:
            raise faults[0]
        return met[0]

    def failed(self) -> bool:
        """Whether one of them has ended."""
        return any(not process.is_alive() for process, _ in self.processes)

    def message(self) -> str:
        """What the rank that failed says, or how it ended."""
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
        return "another rank ended (its own output says why); what was computed up to the last checkpoint is kept"

    def stop(self) -> None:
        """End them at once."""
        for process, _ in self.processes:
            process.kill()

    def wait(self) -> None:
        """Wait for them to end, and end those that do not."""
        for process, pipe in self.processes:
            process.join(GOODBYE if process.is_alive() else None)
            if process.is_alive():
                process.kill()
            pipe.close()


def _ignore_interrupts() -> Any:
    try:
        return signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        # Not the main thread: it may not say so, and then no interrupt reaches it either.
        return None


def free_address() -> str:
    """An address on this machine at which ranks can meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"
