"""Messages of JSON lines between this process and the one that started it, over pipes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
"""Fields that JSON can represent."""

THREAD = "fedblend"
"""The name of threads that wait for messages, and hold nothing that a copy of this process needs."""


class Parent:
    """The process that started this worker process, as the worker sees it.

    Messages have standard input and output for themselves: user code reads nothing, and prints to standard error.
    """

    def __init__(self) -> None:
        self._output, self._sending = os.dup(1), threading.Lock()
        self.messages: Iterator[Message] = map(json.loads, lines_of(os.dup(0)))
        """The parent's messages, until the parent has ended."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def send(self, message: Message) -> None:
        """Send a message; without effect if the parent has ended."""
        with self._sending:
            write(self._output, message)

    def listen(self, handle: Callable[[Message], None]) -> None:
        """Start a thread that calls ``handle`` with each message, and ends this process after its parent.

        A parent that was killed sends no last message. The process must end nevertheless: it holds locks and memory.
        """

        def work() -> None:
            for message in self.messages:
                handle(message)
            os._exit(1)

        threading.Thread(target=work, name=THREAD, daemon=True).start()


def write(file: int, message: Any) -> None:
    """Write a message to a pipe as one line; without effect if nobody reads it any more."""
    line = f"{json.dumps(message)}\n".encode()
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(file, line) :]


def message_of(line: bytes) -> Message | None:
    """A message from its line; ``None`` for any other text."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def lines_of(file: int) -> Iterator[bytes]:
    """Yield the complete lines of a pipe.

    Not read through a buffer: a thread that waits in a buffer's lock when Python ends makes Python abort.
    """
    rest = b""
    while chunk := os.read(file, 1 << 16):
        *complete, rest = (rest + chunk).split(b"\n")
        yield from complete
