"""The command line. Modules that need PyTorch are imported inside the commands that use them."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import NoReturn

import click

from fedblend.core.errors import EXIT_CODE, FedblendError, Stopped, printable
from fedblend.runs.faults import describe_fault, user_error

CLOSED = 141
"""Exit code after the reader of the output closed it, as in shells (128 + SIGPIPE)."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells (128 + SIGINT)."""

FAULT = 70
"""Exit code after an error that no user caused (EX_SOFTWARE of sysexits.h): a fault of fedblend or of a user's part."""


def main() -> None:
    """Run the command line. A user's mistake ends in one message and exit code 2, any other error in exit code 70.

    Messages have at most 900 characters and no control characters: names in them come from files of others.
    """
    from fedblend.cli.app import app

    _replace_unprintable()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            code = app(standalone_mode=False)
        except Stopped as stop:
            sys.stderr.write(f"\nfedblend: {printable(str(stop))}\n")
            raise SystemExit(INTERRUPTED) from None
        except FedblendError as error:
            _exit_with(str(error), EXIT_CODE)
        except click.ClickException as error:
            told = io.StringIO()
            error.show(file=told)
            if isinstance(error, click.NoSuchOption):
                told.write(_how_to_set(error))
            sys.stderr.write("".join(f"{printable(line)}\n" if line else "\n" for line in told.getvalue().splitlines()))
            raise SystemExit(error.exit_code) from None
        except BrokenPipeError:
            # The reader has closed the pipe (`fedblend compare RUN | head`). Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(CLOSED) from None
        except Exception as error:
            message = user_error(error)
            if message is not None:
                _exit_with(message, EXIT_CODE)
            _exit_with(describe_fault(error), FAULT)
    if isinstance(code, int) and code:
        raise SystemExit(code)


def _how_to_set(error: click.NoSuchOption) -> str:
    """How to set the field that was written as an option; empty if it is no field, or the command sets none."""
    from fedblend.experiment.index import index

    field = error.option_name.lstrip("-").replace("-", "_")
    options = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
    tables = [table for table in index().tables.values() if field in {option.name for option in table.options}]
    if "--set" not in options or not tables:
        return ""
    path = f"{tables[0].where}.{field}".lstrip(".")
    return f"To set the field {path} of the file: --set {path}=VALUE\n"


def _exit_with(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"fedblend: error: {printable(message)}\n")
    raise SystemExit(code) from None


def _replace_unprintable() -> None:
    """Have output escape what its encoding lacks, such as bytes of a path that are no text, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _show_warning(message: Warning | str, *place: object, **more: object) -> None:
    """Print a warning as one line without its place in the source, which is of no use to a user."""
    sys.stderr.write(f"fedblend: warning: {printable(str(message))}\n")
