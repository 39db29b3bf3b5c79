"""LEAF's data sets (Caldas et al. 2018): FEMNIST by writer, and Shakespeare by speaking role."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.emnist import CHARACTERS as FEMNIST_CLASSES
from fedblend.data.loaders.files import DataFiles, check, fingerprints, made, regular_file
from fedblend.data.loaders.npz import Npz
from fedblend.data.loaders.shakespeare import CHARACTERS, codes_of

# LEAF's JSON ----------------------------------------------------------------------------------------------

UserSamples = tuple[np.ndarray, np.ndarray]
"""x and y of one user, each with one entry a sample."""

Parser = Callable[[list[Any], list[Any], str], UserSamples]
"""A function from a user's lists x and y to arrays; its third argument names file and user, for messages."""


def read_leaf(root: Path, parse: Parser) -> tuple[list[list[np.ndarray]], tuple[str, ...], dict[str, str]]:
    """Read ``train/*.json`` and ``test/*.json``: x, y and client of both halves, the users' names, and SHA-256.

    Users are numbered in alphabetical order.
    """
    files = [sorted((root / half).glob("*.json")) for half in ("train", "test")]
    hashes = fingerprints([path for half in files for path in half], root)
    halves = [_read_users(half, parse) for half in files]
    names = tuple(sorted({name for users in halves for name in users}))
    arrays = []
    for half, users in zip(files, halves, strict=True):
        parts = [(x, y, np.full(len(y), names.index(user))) for user, (x, y) in users.items() if len(y)]
        if not parts:
            raise FedblendError(f"{half[0].parent}: holds no samples; at least one is needed")
        arrays.append([np.concatenate(column) for column in zip(*parts, strict=True)])
    return arrays, names, hashes


def _read_users(files: list[Path], parse: Parser) -> dict[str, UserSamples]:
    """The samples of each user of one half. The files are large, so only one is in memory at a time."""
    samples: dict[str, UserSamples] = {}
    for path in files:
        for user, data in _read_json(path).items():
            if user in samples:
                raise FedblendError(
                    f"{path}: has the user '{user}', who is in another file too; valid: one file a user"
                )
            samples[user] = parse(data["x"], data["y"], f"{path}: user '{user}'")
    return samples


def _read_json(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Read the table ``user_data`` of one file, and check it against the lists ``users`` and ``num_samples``."""
    try:
        document = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error)[:100]
        raise FedblendError(f"{path}: is truncated or no JSON ({reason}); make or download it again") from None
    users, counts, table = map(
        document.get if isinstance(document, dict) else str, ("users", "num_samples", "user_data")
    )
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(table, dict)):
        raise FedblendError(f"{path}: is not in LEAF's form: lists users and num_samples, and a table user_data")
    if len(counts) != len(users) or sorted(map(str, users)) != sorted(table):
        found = f"{len(users)} users, {len(counts)} numbers of samples and the data of {len(table)} users"
        raise FedblendError(f"{path}: has {found}; they must be the same users")
    for user, count in zip(map(str, users), counts, strict=True):
        lists = [table[user].get(name) for name in ("x", "y")] if isinstance(table[user], dict) else [None]
        lengths = [len(values) if isinstance(values, list) else "none" for values in lists]
        if lengths != [count, count]:
            wanted = f"user '{user}' has {count} samples by num_samples"
            raise FedblendError(f"{path}: {wanted}, but lists x and y of {lengths}; download it again")
    return {str(user): table[str(user)] for user in users}


# FEMNIST --------------------------------------------------------------------------------------------------

SPLIT = "the folder's own split"
SIDE = 28
PIXELS = SIDE * SIDE

FEMNIST = DataFiles(
    name="femnist",
    files=("train/*.json", "test/*.json"),
    folders=("femnist", "leaf/femnist", "femnist/data"),
    address="https://github.com/TalwalkarLab/leaf (data/femnist/preprocess.sh -s niid -t sample)",
    option="path",
    archive="femnist.npz",
)
FEMNIST_SOURCE = "Caldas et al. 2018: LEAF, FEMNIST (NIST Special Database 19, public domain)"


@part("dataset", "femnist")
class Femnist:
    """FEMNIST: handwritten digits and letters, 28 x 28, 62 classes, each writer a client (LEAF, Caldas et al. 2018).

    ``path`` is LEAF's folder with ``train/*.json`` and ``test/*.json``, or an archive with the arrays x, y, client and
    split in the format of the data set ``npz``. The default is ``$FEDBLEND_DATA/femnist.npz``, then the folders
    ``femnist`` and ``leaf/femnist`` there. Paper is white: 255, or 1.0 in LEAF. LEAF's values are rounded to steps of
    1/255, the steps of the scans. The partition ``natural`` gives the writers; their names are ``client_names``.
    Raises :class:`FedblendError` with the file for damaged files and other data.
    """

    path: FilePath | None = None
    """LEAF's folder, or an .npz file; by default it is searched under $FEDBLEND_DATA."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 1, 28, 28], y int64 [n], and the writers as ``client``."""
        path = FEMNIST.find(self.path)
        if path.is_file():
            return _read_femnist_archive(path)
        halves, writers, hashes = read_leaf(path, _parse_femnist)
        return made("femnist", "image", halves, FEMNIST_CLASSES, (FEMNIST_SOURCE, hashes, SPLIT), writers)


def _read_femnist_archive(path: Path) -> Dataset:
    """Read the archive as the data set ``npz``, with the names of the 62 classes."""
    data, high = Npz(path=str(path)).load(), len(FEMNIST_CLASSES) - 1
    shape = list(data.train.x.shape[1:])
    labels = max(int(half.y.max()) for half in (data.train, data.test)) if data.classes else -1
    if shape != [1, SIDE, SIDE] or data.kind != "image" or not 0 <= labels <= high:
        found = f"samples of shape {shape} and {len(data.classes)} classes"
        raise FedblendError(f"{path}: is not FEMNIST: {found}; expected images [1, 28, 28] and labels 0 to {high}")
    if data.train.client is None:
        raise FedblendError(f"{path}: holds no array 'client'; FEMNIST needs the writer of each sample")
    facts = {**data.facts, "source": f"{FEMNIST_SOURCE}; {path.name}"}
    return check(replace(data, name="femnist", classes=FEMNIST_CLASSES, facts=facts))


def _parse_femnist(x: list[Any], y: list[Any], where: str) -> UserSamples:
    """A writer's images uint8 [n, 1, 28, 28] and labels int64 [n] from LEAF's lists."""
    try:
        values = np.array(x, np.float64).reshape(len(y), PIXELS)
        labels = np.array(y)
    except (ValueError, TypeError, OverflowError):
        raise FedblendError(f"{where}: x holds no lists of {PIXELS} numbers; is it another data set's file?") from None
    if not (np.all(values >= 0) and np.all(values <= 1)):
        found = f"x reaches from {values.min():g} to {values.max():g}"
        raise FedblendError(f"{where}: {found}; LEAF's pixels are from 0 to 1")
    if len(y) and (labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(FEMNIST_CLASSES)):
        raise FedblendError(f"{where}: y must hold labels from 0 to {len(FEMNIST_CLASSES) - 1} only")
    pixels = np.rint(values * 255).astype(np.uint8)
    return pixels.reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)


# Shakespeare ----------------------------------------------------------------------------------------------

CONTEXT = 80  # Characters of a sample

SHAKESPEARE = DataFiles(
    name="leaf-shakespeare",
    files=("train/*.json", "test/*.json"),
    folders=("leaf/shakespeare", "shakespeare", "shakespeare/data"),
    address="https://github.com/TalwalkarLab/leaf (data/shakespeare/preprocess.sh -s niid -t sample)",
)


@part("dataset", "leaf-shakespeare")
class LeafShakespeare:
    """Shakespeare as prepared by LEAF (Caldas et al. 2018; texts in the public domain): predict the next character.

    ``folder`` holds ``train/*.json`` and ``test/*.json``. The default is ``$FEDBLEND_DATA/leaf/shakespeare``, then
    ``$FEDBLEND_DATA/shakespeare``. A client is a speaking role of a play. A sample is 80 characters and the next one,
    in LEAF's vocabulary of 80 characters. FedMix (Table 2) uses this data set; the data set ``shakespeare`` makes a
    similar one from the plays. Raises :class:`FedblendError` with the file for damaged files and other data.
    """

    folder: FilePath | None = None
    """The folder with train/ and test/; by default it is searched under $FEDBLEND_DATA."""

    def load(self) -> Dataset:
        """Load x uint8 codes [n, 80], y int64 [n], and the roles as ``client``."""
        halves, roles, hashes = read_leaf(SHAKESPEARE.find(self.folder), _parse_lines)
        facts = "Caldas et al. 2018: LEAF, Shakespeare (public domain)", hashes, SPLIT
        return made("leaf-shakespeare", "text", halves, CHARACTERS, facts, roles, vocabulary=len(CHARACTERS))


def _parse_lines(x: list[Any], y: list[Any], where: str) -> UserSamples:
    """A role's samples as codes, uint8 [n, 80], and the next characters, int64 [n]."""
    for name, texts, length in (("x", x, CONTEXT), ("y", y, 1)):
        for bad in (text for text in texts if not isinstance(text, str) or len(text) != length):
            found = f"{bad[:20]!r}" if isinstance(bad, str) else type(bad).__name__
            valid = f"not a text of {length} characters; is it another data set's file?"
            raise FedblendError(f"{where}: {name} holds {found}, {valid}")
        for sign in sorted({*"".join(texts)} - {*CHARACTERS}):
            raise FedblendError(f"{where}: {name} holds {sign!r}, which is none of LEAF's 80 characters")
    codes, following = codes_of("".join(x)), codes_of("".join(y))
    return codes.reshape(len(x), CONTEXT), following.astype(np.int64)
