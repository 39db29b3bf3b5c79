"""The command line. Modules that need PyTorch are imported inside the commands that use them."""

from __future__ import annotations

import sys

from fedblend.errors import EXIT_CODE, FedblendError, Stopped

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
