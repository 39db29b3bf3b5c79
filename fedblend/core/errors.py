"""Errors that a user can cause, and helpers for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

EXIT_CODE = 2
"""Exit code of the command line after any :class:`FedblendError`."""

LISTED = 10
"""Names that a message lists before it says how many more there are."""


class FedblendError(Exception):
    """A mistake the user can mend: one message that names the field, the value and what would be valid."""


class Stopped(FedblendError):
    """The run was interrupted (Ctrl-C); everything up to its last checkpoint is kept."""


def did_you_mean(
    word: str, known: Iterable[str], alike: float = 0.5, others: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return `` (did you mean 'x'?)`` for the known word nearest to ``word``, or ``""`` if none is ``alike``.

    ``others`` are further words for known ones: further word -> known word.

    >>> did_you_mean("fedmixx", ["fedavg", "fedmix"])
    " (did you mean 'fedmix'?)"
    >>> did_you_mean("learnrate", ["lr", "epochs"], others={"learning_rate": "lr"})
    " (did you mean 'lr'?)"
    """
    words = {one: one for one in known}
    words |= {other: one for other, one in others.items() if one in words}
    near = difflib.get_close_matches(word, words, n=1, cutoff=alike)
    return f" (did you mean '{words[near[0]]}'?)" if near else ""


def listed(names: Sequence[object]) -> str:
    """Names with commas; of many, the first ten and how many more there are.

    >>> listed([3, 5, 9]), listed(range(12))
    ('3, 5, 9', '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more')
    """
    text = ", ".join(str(name) for name in names[:LISTED])
    return f"{text} and {len(names) - LISTED} more" if len(names) > LISTED else text


def legible(text: object, most: int = 300) -> str:
    """A foreign text as one short line: printable characters only, and at most ``most`` of them.

    >>> legible("two\\nlines, \\x1b[31mred"), legible("a" * 9, most=4)
    ('two lines,  [31mred', 'aaaa...')
    """
    line = "".join(sign if sign.isprintable() else " " for sign in str(text)[: most + 1])
    return f"{line[:most]}..." if len(line) > most else line


def by_reason(reasons: Iterable[tuple[object, str]]) -> dict[str, list[object]]:
    """Names by reason, in order of first appearance: a reason that several share is then stated once.

    >>> by_reason([(3, "lost"), (5, "late"), (9, "lost")])
    {'lost': [3, 9], 'late': [5]}
    """
    concerned: dict[str, list[object]] = {}
    for name, reason in reasons:
        concerned.setdefault(reason, []).append(name)
    return concerned
