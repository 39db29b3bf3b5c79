"""Atomic writes (temporary name, fsync, rename), JSON-lines logs, and locks of files and folders."""

from __future__ import annotations

import contextlib
import csv
import errno
import glob
import importlib
import io
import json
import os
import re
import secrets
import time
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedblend.core.errors import FedblendError
from fedblend.core.paths import read_text

if TYPE_CHECKING:
    from pandas import DataFrame

BLOCK = 1 << 16
"""Bytes in one read, backwards, to find the end of a file's last complete line."""

NUMBER = re.compile(r"[-+]?([\d.,]+(e[-+]?\d+)?( ± [\d.,]+)?( ?%)?|inf|nan|∞)")
"""A text that is a number, or a mean and its spread."""

TEMPORARY = ".tmp"
"""End of the name of a file that is being written."""

LOCK_S = 120.0
"""Seconds for which a process waits for a lock that another holds: sites hold theirs for much less."""

REPEAT = "free disk space or repair the folder, then repeat the command; resume a run with: fedblend resume"
"""What to do about a file, or a line of a log, that cannot be written."""


def write_atomically(path: Path, content: bytes | str, remedy: str = REPEAT) -> None:
    """Replace ``path`` by ``content`` atomically. Raises :class:`FedblendError` that ends in ``remedy`` if that fails.

    Each writer has a temporary file of its own in the same folder: of several writers at once, one wins.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with open(temporary, "xb", buffering=0) as file:
            _write_all(file, data)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise FedblendError(
            f"{path}: could not be written: {error.strerror or error}; the previous file is unchanged; {remedy}"
        ) from error


def make_folder_of(path: Path) -> None:
    """Make the folder of a file that a user names, if there is none. Raises :class:`FedblendError` if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{path}: cannot be written ({error.strerror})") from None


def remove_temporaries(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove the temporary files that killed writers of these files (default: of any) have left in a folder.

    Only for files of which no other process is a writer at the time.
    """
    for pattern in ["*"] if names is None else map(glob.escape, names):
        for left in folder.glob(f".{pattern}.*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                left.unlink()


@contextmanager
def waiting_lock(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Wait for the lock of a file or folder, which is the file ``PATH.lock`` beside it, and hold it.

    Only its owner can open the lock, so that no other user can hold it. Raises :class:`FedblendError` if it cannot be
    opened or locked, or if another process holds it for ``seconds`` (default: :data:`LOCK_S`).
    """
    seconds = LOCK_S if seconds is None else seconds
    beside = path.with_name(f"{path.name}.lock")
    with contextlib.suppress(OSError):
        beside.chmod(0o600)
    try:
        handle = open(beside, "ab", opener=lambda name, flags: without_waiting(name, flags, 0o600))  # noqa: SIM115
    except OSError as error:
        raise FedblendError(
            f"{beside}: cannot be written: {error.strerror}; keep the audit log where this site's user can write"
        ) from None
    with handle:
        end = time.monotonic() + seconds
        while True:
            try:
                lock(handle)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise FedblendError(
                        f"{beside}: {_holder(handle)} has held this lock for {seconds:g} seconds; end it if it "
                        "hangs, or is not this site's own"
                    ) from None
                time.sleep(0.01)
            except OSError as error:
                raise FedblendError(f"{beside}: cannot be locked: {error.strerror}; use a local disk") from None
        yield


def _holder(file: IO[Any]) -> str:
    with contextlib.suppress(OSError):
        inode = os.fstat(file.fileno()).st_ino
        for words in map(str.split, Path("/proc/locks").read_text().splitlines()):
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                return f"process {words[4]}"
    return "another process"


@contextmanager
def sole_writer(folder: Path, seconds: float | None = None) -> Iterator[None]:
    """Wait until no other process writes files of a folder, and remove what killed writers have left there."""
    with waiting_lock(folder, seconds):
        remove_temporaries(folder)
        yield


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV; NaN is an empty cell, and no text is a formula.

    A text that a spreadsheet would compute (it begins with ``=``, ``+``, ``-`` or ``@``, and is no number) gets an
    apostrophe before it.

    >>> csv_text([["=1+1", "-0.5 ± 0.1", float("nan"), 2.0]])
    "'=1+1,-0.5 ± 0.1,,2.0\\n"
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return buffer.getvalue()


def csv_frame(frame: DataFrame) -> str:
    """Return a table of pandas as :func:`csv_text`, with its heading."""
    return csv_text([frame.columns, *frame.itertuples(index=False)])


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{value}" if value[:1] in tuple("=+-@\t\r") and not NUMBER.fullmatch(value) else value
    return "" if value != value else value


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def without_waiting(path: str, flags: int, mode: int = 0o666) -> int:
    """An opener for :func:`open`: a named pipe in a file's place ends in an error; else one waits for its reader."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), mode)


def append_line(path: Path, value: Any, remedy: str = REPEAT) -> None:
    """Append one JSON line and sync it to the disk. A truncated last line is removed first.

    Raises :class:`FedblendError` that ends in ``remedy`` unless the whole line is on the disk; what was written of it
    is removed again.
    """
    try:
        with open(path, "ab", buffering=0, opener=without_waiting) as file:
            size = file.tell()
            end = _whole_lines(path, size)
            if end < size:
                file.truncate(end)
            try:
                _write_all(file, f"{json.dumps(value)}\n".encode())
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
        if not size:
            # The file may be new: its name must be on the disk, too.
            _sync_folder(path.parent)
    except OSError as error:
        raise FedblendError(f"{path}: could not be written: {error.strerror or error}; {remedy}") from error


def _write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of ``data``. One write may take less: before the disk is full, or at a limit of the file's size."""
    view = memoryview(data)
    while view:
        written = file.write(view)
        if not written:
            raise OSError(errno.EIO, "the system took no bytes")
        view = view[written:]


def _whole_lines(path: Path, size: int) -> int:
    """Return the bytes of a file of this size up to the end of its last complete line."""
    with open(path, "rb") as file:
        end = size
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def read_lines(path: Path, remedy: str = "restore it from a copy") -> list[dict[str, Any]]:
    """Return the JSON lines of a log without a truncated last line.

    Raises :class:`FedblendError` that ends in ``remedy`` for a damaged line before the last.
    """
    if not os.path.lexists(path):
        return []
    # Not splitlines: it also splits at characters that JSON allows inside a text.
    texts = read_text(path, remedy, errors="replace").rstrip("\n").split("\n")
    texts = [] if texts == [""] else texts
    lines = []
    for number, text in enumerate(texts, 1):
        line = _parse(text)
        if isinstance(line, dict):
            lines.append(line)
        elif line is not None or number < len(texts):
            raise FedblendError(f"{path}: line {number} of {len(texts)} is damaged; {remedy}")
    return lines


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sync_folder(folder: Path) -> None:
    """Sync a rename to the disk. Windows cannot open folders, so this is left to the system there."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _module(name: str) -> Any:
    """A module of Python's library, or ``None`` where this system has none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


FCNTL, MSVCRT = _module("fcntl"), _module("msvcrt")
"""The modules for locks: on Linux and macOS, and on Windows."""


_locked: weakref.WeakSet[IO[Any]] = weakref.WeakSet()
"""The files that this process has locked."""


def _leave_locks() -> None:
    """Close locked files in a copy of this process: a file stays locked until each process that has it open ends."""
    for file in _locked:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed
            os.close(file.fileno())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


def lock(file: IO[Any], shared: bool = False) -> None:
    """Lock a file for this process until it is closed, or until the process ends in any way.

    ``shared`` locks do not exclude each other, except on Windows. Raises :class:`BlockingIOError` if another process
    has the lock, and another :class:`OSError` where the system or the file system has no locks.
    """
    _locked.add(file)
    if FCNTL is not None:
        FCNTL.flock(file, (FCNTL.LOCK_SH if shared else FCNTL.LOCK_EX) | FCNTL.LOCK_NB)
    elif MSVCRT is not None:
        try:
            file.seek(0)
            MSVCRT.locking(file.fileno(), MSVCRT.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
    else:
        raise OSError(errno.ENOTSUP, "this system has no file locks")


@contextmanager
def locked_folder(folder: Path, name: str, what: str) -> Iterator[None]:
    """Lock a folder, created if needed, by its file ``name``; ``what`` is the folder's kind, for messages.

    Raises :class:`FedblendError` if another process has the lock. Warns where the system has no file locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Open for the whole run.
        handle = open(folder / name, "w", encoding="utf-8", opener=without_waiting)  # noqa: SIM115
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be used as a folder for runs: {error.strerror}; name another") from None
    with handle:
        try:
            _lock_file(handle)
        except BlockingIOError:
            raise FedblendError(
                f"{folder}: {what} is in use by another process; wait for it, stop it, or give another folder "
                "(--out, or --folder of federation app)"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{folder}: cannot be locked ({error.strerror}); do not start {what} a second time while it runs",
                stacklevel=2,
            )
        yield


def _lock_file(handle: IO[str]) -> None:
    """Lock a file for this process. Raises :class:`BlockingIOError` if another process has the lock."""
    try:
        lock(handle)
    except BlockingIOError:
        # is_locked in another process takes the lock briefly, too.
        time.sleep(0.1)
        lock(handle)
