"""LEAF's JSON: users, how many samples each has, and their samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.core.errors import FedblendError
from fedblend.data.loaders.places import fingerprints

Reader = Callable[[list[Any], list[Any], str], tuple[np.ndarray, np.ndarray]]
"""What makes arrays of a user's lists x and y; its third argument says whose they are, for messages."""


@dataclass(frozen=True)
class Users:
    """The samples of one half by user, in the order in which the files tell of them."""

    samples: dict[str, tuple[np.ndarray, np.ndarray]]

    def joined(self, numbers: dict[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y and the number of the user [n], all users in a row."""
        named = [(numbers[user], x, y) for user, (x, y) in self.samples.items() if len(y)]
        client = np.repeat([k for k, _, _ in named], [len(y) for _, _, y in named]).astype(np.int64)
        return np.concatenate([x for _, x, _ in named]), np.concatenate([y for _, _, y in named]), client


def read_halves(root: Path, read: Reader) -> tuple[tuple[Users, Users], dict[str, int], dict[str, str]]:
    """Both halves of a folder with ``train/*.json`` and ``test/*.json``, the users' numbers, and the files' SHA-256.

    Users are numbered in alphabetical order. Raises :class:`FedblendError` that names the file for what is damaged or
    not in LEAF's form.
    """
    files = [_listed(root / half) for half in ("train", "test")]
    prints = fingerprints([path for half in files for path in half], root)
    train, test = (_users(half, read) for half in files)
    for half, users in zip(files, (train, test), strict=True):
        if not any(len(y) for _, y in users.samples.values()):
            raise FedblendError(f"{half[0].parent}: holds no samples; at least one is needed")
    names = sorted({*train.samples, *test.samples})
    return (train, test), {name: i for i, name in enumerate(names)}, prints


def is_leaf(root: Path) -> bool:
    """Whether a folder holds JSON files of both halves."""
    return all(any((root / half).glob("*.json")) for half in ("train", "test"))


def _listed(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise FedblendError(
            f"{folder}: holds no .json file; LEAF's preprocess.sh with '-t sample' writes train/*.json and test/*.json"
        )
    return files


def _users(files: list[Path], read: Reader) -> Users:
    """Users of all files of a half; a file is let go of before the next is read, as they are large."""
    samples: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in files:
        for user, data in _content(path).items():
            if user in samples:
                raise FedblendError(f"{path}: tells of the user '{user}', of whom another file told; each has one file")
            samples[user] = read(data["x"], data["y"], f"{path}: user '{user}'")
    return Users(samples)


def _content(path: Path) -> dict[str, dict[str, list[Any]]]:
    """The table ``user_data`` of one file, checked against its lists ``users`` and ``num_samples``."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FedblendError(f"{path}: is truncated or no JSON ({str(error)[:100]}); make or fetch it anew") from None
    keys = ("users", "num_samples", "user_data")
    if not isinstance(document, dict) or any(key not in document for key in keys):
        raise FedblendError(f"{path}: is not in LEAF's form, an object with {', '.join(keys)}")
    users, counts, table = (document[key] for key in keys)
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(table, dict)):
        raise FedblendError(f"{path}: is not in LEAF's form: lists users and num_samples, and a table user_data")
    if len(counts) != len(users) or set(map(str, users)) != set(table) or len(set(map(str, users))) != len(users):
        raise FedblendError(
            f"{path}: tells of {len(users)} users, {len(counts)} numbers of samples and the data of {len(table)}; "
            "they must be the same users"
        )
    for user, count in zip(map(str, users), counts, strict=True):
        data = table[user]
        lists = [data.get(name) for name in ("x", "y")] if isinstance(data, dict) else [None]
        if not all(isinstance(one, list) and len(one) == count for one in lists):
            found = [len(one) if isinstance(one, list) else "none" for one in lists]
            raise FedblendError(
                f"{path}: user '{user}' has {count} samples by num_samples, but lists x and y of {found}; fetch it anew"
            )
    return {str(user): table[str(user)] for user in users}
