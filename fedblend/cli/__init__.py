"""The command line. Modules that need PyTorch are imported inside the commands that use them."""

from __future__ import annotations

import os
import sys

from fedblend.core.errors import EXIT_CODE, FedblendError, Stopped

CLOSED = 141
"""Exit code where the output was closed, as shells have it."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main() -> None:
    """Run the command line; every mistake a user can make ends in one message and exit code 2."""
    from fedblend.cli.app import app

    try:
        app()
    except Stopped as stop:
        sys.stderr.write(f"\nfedblend: {stop}\n")
        raise SystemExit(INTERRUPTED) from None
    except FedblendError as error:
        sys.stderr.write(f"fedblend: error: {error}\n")
        raise SystemExit(EXIT_CODE) from None
    except BrokenPipeError:
        # Whoever read the output is gone (`fedblend compare RUN | head`); Python would complain on leaving.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED) from None
