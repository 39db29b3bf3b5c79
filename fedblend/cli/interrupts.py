"""Ctrl-C in commands that still have results to write after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Inside, the first Ctrl-C raises ``KeyboardInterrupt``; later ones are ignored, so that results are written."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in a shell's background job
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
