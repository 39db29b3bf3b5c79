"""The command line. Modules that need PyTorch are imported inside the commands that use them."""

from __future__ import annotations

import os
import sys
import warnings

from fedblend.core.errors import EXIT_CODE, FedblendError, Stopped

CLOSED = 141
"""Exit code after the reader of the output closed it, as in shells (128 + SIGPIPE)."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells (128 + SIGINT)."""


def main() -> None:
    """Run the command line; a user's mistake ends in one message and exit code 2."""
    from fedblend.cli.app import app

    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            app()
        except Stopped as stop:
            sys.stderr.write(f"\nfedblend: {stop}\n")
            raise SystemExit(INTERRUPTED) from None
        except FedblendError as error:
            sys.stderr.write(f"fedblend: error: {error}\n")
            raise SystemExit(EXIT_CODE) from None
        except BrokenPipeError:
            # The reader has closed the pipe (`fedblend compare RUN | head`). Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(CLOSED) from None


def _show_warning(message: Warning | str, *place: object, **more: object) -> None:
    """Print a warning as one line without its place in the source, which is of no use to a user."""
    sys.stderr.write(f"fedblend: warning: {' '.join(str(message).split())}\n")
