"""Shakespeare in LEAF's JSON: lines of a role, and the character that follows each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import data_folder, existing
from fedblend.data.loaders.leaf import is_leaf, read_halves
from fedblend.data.loaders.places import Home
from fedblend.data.loaders.shakespeare import CHARACTERS

CONTEXT = 80
"""Characters in a sample."""

HOME = Home(
    name="leaf-shakespeare",
    files=("train/*.json", "test/*.json"),
    folders=("leaf/shakespeare", "shakespeare", "shakespeare/data"),
    address="https://github.com/TalwalkarLab/leaf (data/shakespeare/preprocess.sh -s niid -t sample)",
)

UNKNOWN = len(CHARACTERS)
"""What a character that LEAF does not have is marked with."""

CODES = np.full(256, UNKNOWN, np.uint8)
CODES[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))


@part("dataset", "leaf-shakespeare")
class LeafShakespeare:
    """Shakespeare as LEAF prepares it (Caldas et al. 2018; texts in the public domain): predict the next character.

    ``folder`` holds ``train/*.json`` and ``test/*.json``; without it it is looked for in ``$FEDBLEND_DATA`` as
    ``leaf/shakespeare`` or ``shakespeare``. A client is a speaking role of a play, a sample 80 characters and the one
    that follows, in LEAF's 80 characters. FedMix (Table 2) uses this set; the data set ``shakespeare`` makes a like one
    from the plays. Raises :class:`FedblendError` that names the file for what is damaged or no such data.
    """

    folder: FilePath | None = None
    """The folder with train/ and test/; without it it is looked for under $FEDBLEND_DATA."""

    def load(self) -> Dataset:
        """The data set: x uint8 codes [n, 80], y int64 [n], ``client`` the role."""
        place = existing(self.folder, "data.folder") if self.folder is not None else _usual()
        halves, numbers, prints = read_halves(place, _lines)
        made = []
        for half in halves:
            x, y, client = half.joined(numbers)
            made.append(Samples(torch.from_numpy(x), torch.from_numpy(y), client))
        facts: dict[str, Any] = {
            "source": "Caldas et al. 2018: LEAF, Shakespeare (public domain)",
            "files": prints,
            "notes": "the folder's own split",
        }
        roles, kinds = tuple(numbers), tuple(CHARACTERS)
        return check(Dataset("leaf-shakespeare", "text", made[0], made[1], kinds, roles, len(kinds), facts))


def _usual() -> Path:
    """Where the data lie under $FEDBLEND_DATA. Raises, with their address, if they do not."""
    base = data_folder()
    for place in [base / sub for sub in HOME.folders] if base else []:
        if is_leaf(place):
            return place
    raise HOME.absent()


def _lines(x: list[Any], y: list[Any], whose: str) -> tuple[np.ndarray, np.ndarray]:
    """A role's samples as codes, uint8 [n, 80], and what follows, int64 [n]."""
    for name, texts, length in (("x", x, CONTEXT), ("y", y, 1)):
        bad = next((text for text in texts if not isinstance(text, str) or len(text) != length), None)
        if bad is not None:
            told = f"{bad[:20]!r}" if isinstance(bad, str) else type(bad).__name__
            raise FedblendError(
                f"{whose}: {name} holds {told}, not a text of {length} characters; is it another data set's file?"
            )
    return _codes("".join(x), f"{whose}: x").reshape(len(x), CONTEXT), _codes("".join(y), f"{whose}: y").astype(int)


def _codes(text: str, where: str) -> np.ndarray:
    """Text as codes uint8 [length]. Raises for a character that LEAF does not have."""
    codes = CODES[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]
    bad = np.flatnonzero(codes == UNKNOWN)
    if len(bad):
        raise FedblendError(f"{where} holds {text[bad[0]]!r}, which is none of LEAF's 80 characters")
    return codes
