"""LEAF's data sets (Caldas et al. 2018): FEMNIST by writer, and Shakespeare by speaking role."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.emnist import CHARACTERS as FEMNIST_CLASSES
from fedblend.data.loaders.files import DataFiles, check, data_folder, existing_path, fingerprints, regular_file
from fedblend.data.loaders.npz import Npz
from fedblend.data.loaders.shakespeare import CHARACTERS

# LEAF's JSON ----------------------------------------------------------------------------------------------

UserSamples = tuple[np.ndarray, np.ndarray]
"""x and y of one user, each with one entry a sample."""

Parser = Callable[[list[Any], list[Any], str], UserSamples]
"""A function from a user's lists x and y to arrays; its third argument names file and user, for messages."""


def read_leaf(root: Path, parse: Parser) -> tuple[list[Samples], tuple[str, ...], dict[str, str]]:
    """Read ``train/*.json`` and ``test/*.json``: both halves, the users' names, and the files' SHA-256.

    Users are numbered in alphabetical order. Raises :class:`FedblendError` with the file for damaged files and for
    other formats.
    """
    files = [_json_files(root / half) for half in ("train", "test")]
    hashes = fingerprints([path for half in files for path in half], root)
    halves = [_read_users(half, parse) for half in files]
    for half, users in zip(files, halves, strict=True):
        if not any(len(y) for _, y in users.values()):
            raise FedblendError(f"{half[0].parent}: holds no samples; at least one is needed")
    names = tuple(sorted({name for users in halves for name in users}))
    numbers = {name: i for i, name in enumerate(names)}
    return [_join_users(users, numbers) for users in halves], names, hashes


def _json_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise FedblendError(
            f"{folder}: holds no .json file; LEAF's preprocess.sh with '-t sample' writes train/*.json and test/*.json"
        )
    return files


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


def _join_users(users: dict[str, UserSamples], numbers: dict[str, int]) -> Samples:
    """The samples of all users of one half, user by user."""
    parts = [(numbers[user], x, y) for user, (x, y) in users.items() if len(y)]
    client = np.repeat([number for number, _, _ in parts], [len(y) for _, _, y in parts]).astype(np.int64)
    x, y = np.concatenate([x for _, x, _ in parts]), np.concatenate([y for _, _, y in parts])
    return Samples(torch.from_numpy(x), torch.from_numpy(y), client)


def _read_json(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Read the table ``user_data`` of one file, and check it against the lists ``users`` and ``num_samples``."""
    try:
        document = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FedblendError(
            f"{path}: is truncated or no JSON ({str(error)[:100]}); make or download it again"
        ) from None
    keys = ("users", "num_samples", "user_data")
    if not isinstance(document, dict) or any(key not in document for key in keys):
        raise FedblendError(f"{path}: is not in LEAF's form, an object with {', '.join(keys)}")
    users, counts, table = (document[key] for key in keys)
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(table, dict)):
        raise FedblendError(f"{path}: is not in LEAF's form: lists users and num_samples, and a table user_data")
    if len(counts) != len(users) or set(map(str, users)) != set(table) or len(set(map(str, users))) != len(users):
        raise FedblendError(
            f"{path}: has {len(users)} users, {len(counts)} numbers of samples and the data of {len(table)} users; "
            "they must be the same users"
        )
    for user, count in zip(map(str, users), counts, strict=True):
        data = table[user]
        lists = [data.get(name) for name in ("x", "y")] if isinstance(data, dict) else [None]
        if not all(isinstance(values, list) and len(values) == count for values in lists):
            found = [len(values) if isinstance(values, list) else "none" for values in lists]
            raise FedblendError(
                f"{path}: user '{user}' has {count} samples by num_samples, but lists x and y of {found}; download it "
                "again"
            )
    return {str(user): table[str(user)] for user in users}


# FEMNIST --------------------------------------------------------------------------------------------------

SIDE = 28
PIXELS = SIDE * SIDE

FEMNIST = DataFiles(
    name="femnist",
    files=("train/*.json", "test/*.json"),
    folders=("femnist", "leaf/femnist", "femnist/data"),
    address="https://github.com/TalwalkarLab/leaf (data/femnist/preprocess.sh -s niid -t sample)",
    option="path",
)
FEMNIST_ARCHIVE = "femnist.npz"
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
        base = data_folder()
        if self.path is not None:
            path = existing_path(self.path, "data.path")
        elif base and (base / FEMNIST_ARCHIVE).is_file():
            path = base / FEMNIST_ARCHIVE
        else:
            path = FEMNIST.find(None)
        if path.is_file():
            return _read_femnist_archive(path)
        (train, test), writers, hashes = read_leaf(path, _parse_femnist)
        facts: dict[str, Any] = {"source": FEMNIST_SOURCE, "files": hashes, "notes": "the folder's own split"}
        return check(Dataset("femnist", "image", train, test, FEMNIST_CLASSES, writers, facts=facts))


def _read_femnist_archive(path: Path) -> Dataset:
    """Read the archive as the data set ``npz``, with the names of the 62 classes."""
    classes = len(FEMNIST_CLASSES)
    data = Npz(path=str(path)).load()
    high = max(int(half.y.max()) for half in (data.train, data.test)) if data.classes else classes
    if tuple(data.train.x.shape[1:]) != (1, SIDE, SIDE) or data.kind != "image" or high >= classes:
        raise FedblendError(
            f"{path}: is not FEMNIST: samples of shape {list(data.train.x.shape[1:])} and {len(data.classes)} "
            f"classes; expected images [1, {SIDE}, {SIDE}] and labels 0 to {classes - 1}"
        )
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
        raise FedblendError(
            f"{where}: x reaches from {values.min():g} to {values.max():g}; LEAF's pixels are from 0 to 1"
        )
    if len(y) and (labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(FEMNIST_CLASSES)):
        raise FedblendError(f"{where}: y must hold labels from 0 to {len(FEMNIST_CLASSES) - 1} only")
    pixels = np.rint(values * 255).astype(np.uint8)
    return pixels.reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)


# Shakespeare ----------------------------------------------------------------------------------------------

CONTEXT = 80
"""Characters of a sample."""

SHAKESPEARE = DataFiles(
    name="leaf-shakespeare",
    files=("train/*.json", "test/*.json"),
    folders=("leaf/shakespeare", "shakespeare", "shakespeare/data"),
    address="https://github.com/TalwalkarLab/leaf (data/shakespeare/preprocess.sh -s niid -t sample)",
)

UNKNOWN = len(CHARACTERS)
"""Code of a character that is not in LEAF's vocabulary."""

CODES = np.full(256, UNKNOWN, np.uint8)
CODES[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))


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
        root = SHAKESPEARE.find(None) if self.folder is None else existing_path(self.folder, "data.folder")
        (train, test), roles, hashes = read_leaf(root, _parse_lines)
        facts: dict[str, Any] = {
            "source": "Caldas et al. 2018: LEAF, Shakespeare (public domain)",
            "files": hashes,
            "notes": "the folder's own split",
        }
        classes = tuple(CHARACTERS)
        return check(Dataset("leaf-shakespeare", "text", train, test, classes, roles, len(classes), facts))


def _parse_lines(x: list[Any], y: list[Any], where: str) -> UserSamples:
    """A role's samples as codes, uint8 [n, 80], and the next characters, int64 [n]."""
    for name, texts, length in (("x", x, CONTEXT), ("y", y, 1)):
        bad = next((text for text in texts if not isinstance(text, str) or len(text) != length), None)
        if bad is not None:
            found = f"{bad[:20]!r}" if isinstance(bad, str) else type(bad).__name__
            raise FedblendError(
                f"{where}: {name} holds {found}, not a text of {length} characters; is it another data set's file?"
            )
    codes, following = _encode("".join(x), f"{where}: x"), _encode("".join(y), f"{where}: y")
    return codes.reshape(len(x), CONTEXT), following.astype(np.int64)


def _encode(text: str, where: str) -> np.ndarray:
    """Text as codes uint8 [length]. Raises for a character outside LEAF's vocabulary."""
    codes = CODES[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]
    bad = np.flatnonzero(codes == UNKNOWN)
    if len(bad):
        raise FedblendError(f"{where} holds {text[bad[0]]!r}, which is none of LEAF's 80 characters")
    return codes
