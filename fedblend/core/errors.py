"""Errors that a user can cause, and helpers for their messages."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

EXIT_CODE = 2
"""Exit code of the command line after any :class:`FedblendError`."""

MESSAGE_LENGTH = 900
"""Most characters of a message that the command line prints."""

LISTED = 10
"""Names that a message lists before it says how many more there are."""

VALID_LENGTH = 300
"""Most characters of the valid names that a message lists after an unknown one."""


class FedblendError(Exception):
    """A mistake the user can mend: one message that names the field, the value and what would be valid."""


class Stopped(FedblendError):
    """The run was interrupted (Ctrl-C); everything up to its last checkpoint is kept."""


def missing_package(needed_by: str, package: str, extra: str) -> FedblendError:
    """The error of something that needs a package of an extra, which is missing or cannot be imported.

    fedblend is on no package index, so the commands name the checkout or the wheel, not "fedblend".

    >>> print(missing_package("epsilon", "dp-accounting", "dp"))
    epsilon needs the package dp-accounting, which is not installed; install it with fedblend's extra "dp": \
pip install ".[dp]" in the checkout, or pip install "PATH/TO/fedblend-VERSION-py3-none-any.whl[dp]"
    """
    cause, why = sys.exception(), "is not installed"
    if isinstance(cause, ImportError) and importlib.util.find_spec(package.replace("-", "_")):
        why = f"cannot be imported ({cause})"
    return FedblendError(
        f"{needed_by} needs the package {package}, which {why}; install it with fedblend's extra "
        f'"{extra}": pip install ".[{extra}]" in the checkout, or pip install '
        f'"PATH/TO/fedblend-VERSION-py3-none-any.whl[{extra}]"'
    )


def did_you_mean(
    word: str, known: Iterable[str], alike: float = 0.65, others: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return `` (did you mean 'x'?)`` for the known word nearest to ``word``, or ``""`` if none is ``alike``.

    ``others`` are further words for known ones: further word -> known word. Neither case nor separators count, nor the
    order of words that are joined by ``+``, because papers and other libraries write names in several ways.

    >>> did_you_mean("fedmixx", ["fedavg", "fedmix"])
    " (did you mean 'fedmix'?)"
    >>> did_you_mean("learnrate", ["lr", "epochs"], others={"learning_rate": "lr"})
    " (did you mean 'lr'?)"
    >>> did_you_mean("FashionMNIST", ["mnist", "fashion-mnist"]), did_you_mean("FedMix+FedProx", ["fedprox+fedmix"])
    (" (did you mean 'fashion-mnist'?)", " (did you mean 'fedprox+fedmix'?)")
    """

    def plain(name: str) -> str:
        return "+".join(sorted(re.sub(r"[-_\s]", "", name).casefold().split("+")))

    words = {plain(one): one for one in known}
    words |= {plain(other): one for other, one in others.items() if one in words.values()}
    near = difflib.get_close_matches(plain(word), words, n=1, cutoff=alike)
    return f" (did you mean '{words[near[0]]}'?)" if near else ""


def or_valid(
    word: str,
    known: Iterable[object],
    alike: float = 0.65,
    others: Mapping[str, str] = MappingProxyType({}),
    everything: str = "",
) -> str:
    """Return what a message on an unknown ``word`` goes on with: the known word that is meant, or the valid ones.

    Of many valid words, those that fit into :data:`VALID_LENGTH` characters, how many more there are, and the command
    that prints ``everything``. ``alike`` and ``others`` are as in :func:`did_you_mean`.

    >>> print("unknown" + or_valid("x", ["lr", "epochs"]), "unknown" + or_valid("epoch", ["lr", "epochs"]), sep="\\n")
    unknown; valid: lr, epochs
    unknown (did you mean 'epochs'?)
    >>> print(or_valid("x", range(100), everything="fedblend list train")[-55:])
    71, 72, 73, 74, 75, 76 and 23 more: fedblend list train
    """
    names = [str(name) for name in known]
    if meant := did_you_mean(word, names, alike, others):
        return meant
    ends = list(itertools.accumulate(len(name) + len(", ") for name in names))
    fit = max(1, sum(end <= VALID_LENGTH for end in ends))
    more = f" and {len(names) - fit} more" + (f": {everything}" if everything else "") if fit < len(names) else ""
    return f"; valid: {', '.join(names[:fit]) or 'none'}{more}"


def counted(number: int, what: str) -> str:
    """A number of things in words.

    >>> counted(1, "seed"), counted(2, "seed")
    ('1 seed', '2 seeds')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[object]) -> str:
    """Names with commas; of many, the first ten and how many more there are.

    >>> listed([3, 5, 9]), listed(range(12))
    ('3, 5, 9', '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more')
    """
    text = ", ".join(str(name) for name in names[:LISTED])
    return f"{text} and {len(names) - LISTED} more" if len(names) > LISTED else text


SPELLED = str.maketrans({"±": "+-", "—": "-", "∞": "inf", "←": "<-"})
"""Signs of tables where an encoding lacks them."""


def encodable(text: str, encoding: str) -> str:
    """Return a text in signs that an encoding has: "33.8 +- 1.0" for ASCII.

    >>> encodable("33.8 ± 1.0, é", "ascii"), encodable("33.8 ± 1.0, é", "latin-1")
    ('33.8 +- 1.0, \\\\xe9', '33.8 ± 1.0, é')
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(SPELLED).encode(encoding, "backslashreplace").decode(encoding)
    return text


def printable(text: str, most: int = MESSAGE_LENGTH) -> str:
    """A message as one line of at most ``most`` characters: line breaks as blanks, other control characters escaped.

    A longer message loses its middle: its beginning names the field, and its end the remedy.

    >>> printable("no\\x1b[31m\\nfile"), printable("a" * 600 + "b" * 600, most=20)
    ('no\\\\x1b[31m file', 'aaaaaaaaaa ... bbbbb')
    """
    text = text if len(text) <= 4 * most else f"{text[: 2 * most]}{text[-2 * most :]}"
    signs = (sign if sign.isprintable() else " " if sign.isspace() else repr(sign)[1:-1] for sign in text.strip())
    line = "".join(signs)
    if len(line) <= most:
        return line
    kept = most - len(" ... ")
    return f"{line[: kept - kept // 3]} ... {line[len(line) - kept // 3 :]}"


def brief(value: object, most: int = 120) -> str:
    """A value of a user in a message: its ``repr`` without the middle of a long one.

    >>> brief("fedmix"), brief(list(range(100)), most=20)
    ("'fedmix'", '[0, 1, 2,  ... , 99]')
    """
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        # Too many levels; a whole number with more digits than Python converts.
        text = f"a {type(value).__name__}"
    return printable(text, most)


def tokens_refused(part: str) -> FedblendError:
    """Return the error of a ``part`` that computes with samples as numbers, where the model takes them as ids."""
    return FedblendError(
        f"{part} mixes, averages or makes samples as numbers, but the model takes these data as ids of tokens; valid: "
        "methods that leave samples as they are, such as fedavg, or use features or hidden states"
    )


def require_memory(needed: int, what: str, remedy: str) -> None:
    """Raise :class:`FedblendError` if ``what`` needs more bytes than the machine has memory, before it is allocated.

    Nothing is checked where the system does not say how much memory there is.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    if needed > memory:
        raise FedblendError(
            f"{what} needs {needed / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB of memory; {remedy}"
        )


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
