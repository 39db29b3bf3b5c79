"""Messages for errors that are no :class:`FedblendError`: what a user can mend, and faults of fedblend."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import tempfile
import traceback
from pathlib import Path

from fedblend.core.errors import printable

MEMORY_WORDS = ("can't allocate memory", "out of memory", "array is too big", "Maximum allowed dimension exceeded")
"""What PyTorch and NumPy say, in other errors than ``MemoryError``, of more memory than there is."""


def user_error(error: Exception) -> str | None:
    """The message for an error of Python, PyTorch or NumPy that a user can mend; ``None`` for any other error."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror or error}; check the path and its permissions"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error.strerror}: output or a file could not be written; free disk space and repeat the command"
    text = str(error)
    if isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, ValueError)) and any(words in text for words in MEMORY_WORDS)
    ):
        reason = f" ({printable(text, 200)})" if text else ""
        return f"this needs more memory than there is{reason}; valid: fewer clients, smaller batches, a smaller model"
    return None


def describe_fault(error: Exception, folder: Path | None = None) -> str:
    """The message for an unexpected error. Its traceback is kept in ``folder``, or in a temporary file."""
    text = f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
    kept = "its traceback could not be kept in a file"
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="fedblend-fault-", suffix=".txt", dir=folder)
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        kept = f"its traceback is in {path}"
    reason = f" ({printable(str(error), 300)})" if str(error) else ""
    return (
        f"unexpected {type(error).__name__}{reason}; {kept}. This is a fault of fedblend, unless a part of your own "
        "raised it: please report it with this file to the maintainers"
    )
