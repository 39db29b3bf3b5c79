"""The command line. Modules that need PyTorch are imported inside the commands that use them."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import warnings
from typing import Any, NoReturn

import typer

from fedblend.core.errors import EXIT_CODE, FedblendError, Stopped, printable
from fedblend.runs.faults import describe_fault, user_error

CLOSED = 141  # Exit code after the reader of the output closed it, as in shells (128 + SIGPIPE)
INTERRUPTED = 130  # Exit code after Ctrl-C, as in shells (128 + SIGINT)

FAULT = 70
"""Exit code after an error that no user caused (EX_SOFTWARE of sysexits.h): a fault of fedblend or of a user's part."""

UsageError: Any = typer.BadParameter.__base__
"""A mistake on the command line: a class of Click, or of the copy of Click that newer versions of Typer contain."""


def main() -> None:
    """Run the command line. A user's mistake ends in one message and exit code 2, any other error in exit code 70.

    Messages have at most 900 characters and no control characters: names in them come from files of others.
    """
    from fedblend.cli.app import app

    _open_closed()
    _replace_unprintable()
    with warnings.catch_warnings():
        warnings.showwarning = functools.partial(_show_warning, set())
        try:
            code = app(standalone_mode=False)
            sys.stdout.flush()
        except Stopped as stop:
            _tell(f"\nfedblend: {printable(str(stop))}\n")
            raise SystemExit(INTERRUPTED) from None
        except FedblendError as error:
            _exit_with(str(error), EXIT_CODE)
        except UsageError as error:
            told = io.StringIO()
            error.show(file=told)
            told.write(_how_to_set(error))
            _tell("".join(f"{printable(line)}\n" if line else "\n" for line in told.getvalue().splitlines()))
            raise SystemExit(error.exit_code) from None
        except BrokenPipeError:
            # The reader has closed the pipe (`fedblend compare RUN | head`).
            raise SystemExit(CLOSED) from None
        except Exception as error:
            message = user_error(error)
            if message is not None:
                _exit_with(message, EXIT_CODE)
            _exit_with(describe_fault(error), FAULT)
        finally:
            _discard_unwritten()
    if isinstance(code, int) and code:
        raise SystemExit(code)


def _how_to_set(error: Any) -> str:
    """How to set the field that was written as an option; empty if it is no field, or the command sets none."""
    from fedblend.experiment.index import index

    written = getattr(error, "option_name", "")
    options = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
    if "--set" not in options or written in ["", *options]:
        return ""
    field = written.lstrip("-").replace("-", "_")
    tables = [table for table in index().tables.values() if field in {option.name for option in table.options}]
    if not tables:
        return ""
    path = f"{tables[0].where}.{field}".lstrip(".")
    return f"To set the field {path} of the file: --set {path}=VALUE\n"


def _exit_with(message: str, code: int) -> NoReturn:
    _tell(f"fedblend: error: {printable(message)}\n")
    raise SystemExit(code) from None


def _tell(text: str) -> None:
    """Write to standard error. Where it cannot be written to (a log on a full disk), the exit code still holds."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _open_closed() -> None:
    """Open streams that the caller closed (``>&-``): else the next file has their number, and gets what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open to the end)


def _discard_unwritten() -> None:
    """Discard output that cannot be written: Python would try again at exit, complain, and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_unprintable() -> None:
    """Have output escape what its encoding lacks, such as bytes of a path that are no text, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _show_warning(shown: set[str], message: Warning | str, *place: object, **more: object) -> None:
    """Print a warning once in a command, as one line without its place in the source, which is of no use to a user."""
    if (text := printable(str(message))) not in shown:
        shown.add(text)
        _tell(f"fedblend: warning: {text}\n")
