"""The errors that a user can cause, and the one way they are told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_CODE = 2
"""Exit code of the command line after any :class:`FedblendError`."""


class FedblendError(Exception):
    """A mistake the user can mend: one message that names the field, the value and what would be valid."""


class Stopped(FedblendError):
    """The run was interrupted (Ctrl-C); everything up to its last checkpoint is kept."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word nearest to ``word``, or ``""``.

    >>> did_you_mean("fedmixx", ["fedavg", "fedmix"])
    " (did you mean 'fedmix'?)"
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""
