"""Ctrl-C in commands that still have results to write after it, or that stop some seconds after it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedblend.cli import INTERRUPTED
from fedblend.cli.console import write_line
from fedblend.engines.distributed.pipes import THREAD

STOPPING = (
    "fedblend: stopping after the step that is being computed; press Ctrl-C again to stop at once (runs are kept up to "
    "their last checkpoint either way)"
)

SHOW_CURSOR = b"\x1b[?25h"  # Undoes what a progress display does to a terminal


@contextmanager
def stop_announced() -> Iterator[None]:
    """Inside, the first Ctrl-C prints :data:`STOPPING` at once, and the second ends the process at once.

    Python handles a signal only after the main thread's current call, which may compute for many seconds. Another
    thread reads the signals, which Python writes to a socket as they come. A process that ends at once leaves runs as
    a kill does; they resume to the same bits.
    """
    if _ignored_here():
        yield
        return
    signals, written = socket.socketpair()
    written.setblocking(False)
    before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    # Named as a thread beside which the process can be copied.
    thread = threading.Thread(target=_announce, args=(signals,), name=THREAD, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        written.close()
        thread.join()
        signals.close()


def _announce(signals: socket.socket) -> None:
    """Print at the first Ctrl-C, and end the process at the second; return when the other end is closed."""
    pressed = False
    while received := signals.recv(1):
        if received[0] != signal.SIGINT:
            continue
        if pressed:
            # Without a lock, which the main thread may have.
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            os._exit(INTERRUPTED)
        pressed = True
        with contextlib.suppress(OSError):  # nobody reads
            write_line(STOPPING)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Inside, the first Ctrl-C raises ``KeyboardInterrupt``; later ones are ignored, so that results are written."""
    if _ignored_here():
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


def _ignored_here() -> bool:
    """Whether this thread handles no Ctrl-C: another one does, or the process ignores it, as a background job does."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return ignored or threading.current_thread() is not threading.main_thread()
