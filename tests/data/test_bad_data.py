"""Damaged, wrong and missing data files give one message."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_input_helpers import refused_at_once, run
from cli_helpers import succeeded
from helpers import each

pytestmark = pytest.mark.usefixtures("elsewhere")


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made = {"x": rng.standard_normal((40, 5)), "y": np.arange(40) % 3, **changes}
    return {name: array for name, array in made.items() if array is not None}


def with_nan() -> np.ndarray:
    x = arrays()["x"]
    x[7, 2] = np.nan
    return x


@each(
    ("given", "words"),
    [
        (arrays(x=with_nan()), ("x holds NaN", "1 samples", "finite")),
        (arrays(y=np.full(40, np.inf)), ("y holds NaN or infinity",)),
        (arrays(x=np.ones(40)), ("'x'", "[40]", "valid: images uint8")),
        (arrays(x=np.ones((39, 5))), ("'x'", "[39, 5]", "40 entries")),
        (arrays(x=np.ones((40, 0))), ("'x'", "[40, 0]")),
        (arrays(x=None), ("no array 'x'", "are needed")),
        (arrays(y=np.arange(40) - 1), ("labels in 'y' are from -1", "valid: ")),
        (arrays(y=np.full((40, 2), 3)), ("'y'", "[n, 2] holds 3", "valid: 0 and 1")),
        (arrays(y=np.eye(2)[np.arange(40) % 2]), ("'y' [n, 2] has one 1 in each row, as one-hot", "y.argmax(1)")),
        (arrays(y=np.eye(2, dtype=int)[np.arange(40) % 2]), ("[n, 2] has one 1 in each row, as one-hot", "'labels'")),
        (arrays(client=np.arange(40)), ("is needed; data.test_share takes none of a client or class with a single",)),
        (arrays(client=np.arange(40) // 2), ("it is empty", "if it is drawn, give a larger data.test_share: 0.25")),
        (arrays(split=["train"] * 39 + ["tset"]), ("'split' holds 'tset'", "'test'")),
        (arrays(split=["train"] * 40), ("test half", "empty")),
        (arrays(client=np.ones(40)), ("'client'", "float64", "valid: ")),
        (arrays(clients=np.arange(40) % 4), ("'clients' is unknown", "did you mean 'client'?")),
        (arrays(y=None, labels=np.arange(40) % 3), ("no array 'y'", "labels", "are needed")),
        (arrays(y=np.arange(40) % 3 + 1), ("begin at 1", "class 0 would have no sample", "number them from 0")),
        (arrays(y=np.arange(40) % 3 * 10), ("reach to 20", "only 3 of these 21 classes", "0, 10, 20", "'classes'")),
        (arrays(x=np.ones((0, 5)), y=np.ones(0, int)), ("holds no samples",)),
        (arrays(x=np.array([{}] * 40)), ("holds objects",)),
    ],
)
def test_arrays_of_a_wrong_shape_or_content(given: dict[str, Any], words: tuple[str, ...]) -> None:
    np.savez("given.npz", **given)
    refused_at_once(run({"data": {"name": "npz", "path": "given.npz"}}), "given", *words)


@each("compressed", [False, True])
@each("share", [0.0, 0.3, 0.9, 0.99])
def test_a_truncated_archive(share: float, compressed: bool) -> None:
    (np.savez_compressed if compressed else np.savez)("cut.npz", **arrays())
    raw = Path("cut.npz").read_bytes()
    Path("cut.npz").write_bytes(raw[: int(share * len(raw))])
    refused_at_once(run({"data": {"name": "npz", "path": "cut.npz"}}), "cut.npz", "no valid .npz archive")


def test_an_archive_with_a_flipped_byte() -> None:
    np.savez("flipped.npz", **arrays())
    raw = bytearray(Path("flipped.npz").read_bytes())
    raw[700] ^= 255
    Path("flipped.npz").write_bytes(raw)
    refused_at_once(run({"data": {"name": "npz", "path": "flipped.npz"}}), "flipped.npz")


@each(
    ("content", "said"),
    [
        (b"a,a,y\n1,2,u\n1,2,v\n", "t.csv: has two columns named 'a'"),
        (b"a,y\n1,2,u\n3,4,v\n", "t.csv: rows have more cells than the header; valid: a name for each column"),
        (
            b",a,y\n0,1,u\n1,2,v\n",
            "t.csv has no name, as row numbers that pandas writes or a separator at the end of each line; valid: a "
            "header with all names (pandas: index=False), or data.features without this column",
        ),
        ("a,y\n1,ü\n".encode("latin-1"), "t.csv: is no text in UTF-8; valid: UTF-8 (Excel saves it as 'CSV UTF-8')"),
        (
            b'a,y\n"1,5",u\n"2,5",v\n',
            "data.features: column 'a' holds numbers with commas or percent signs, such as '1,5'; write digits and "
            "decimal points only",
        ),
        (
            b"a,y\n1e39,u\ninf,v\n",
            "t.csv: column 'a' holds infinity, or a number beyond float32, in 2 rows; valid: finite numbers",
        ),
        (
            b"a,y\n1,0.0\n2,1.0\n",
            "data.target: column 'y' holds only 0.0 and 1.0; valid: 0 and 1 or text for classes, or data.task = "
            "'regression' for numbers to predict",
        ),
    ],
)
def test_a_table_that_would_silently_become_other_data(content: bytes, said: str) -> None:
    Path("t.csv").write_bytes(content)
    refused_at_once(run({"data": {"name": "table", "path": "t.csv", "target": "y"}}), said)


def test_missing_files() -> None:
    refused_at_once(run({"data": {"name": "npz", "path": "nowhere.npz"}}), "data.path: ", "/nowhere.npz'", "existing")
    refused_at_once(run({"data": "npz"}), "path", "missing")
    refused_at_once(run({"data": {"name": "npz", "path": "."}}), "path", "folder")
    refused_at_once(run({"data": {"name": "mnist", "folder": "nowhere"}}), "data.folder: ", "/nowhere'")
    refused_at_once(run({"data": {"name": "mnist", "folder": "."}}), "train-images-idx3-ubyte", "gzipped or not")


def idx(*shape: int) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(int(np.prod(shape)))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train-images-idx3-ubyte", lambda raw: raw, ()),
        ("train-images-idx3-ubyte", lambda raw: raw[:-1], ("truncated", "[20, 28, 28]")),
        ("train-images-idx3-ubyte", lambda raw: raw[:10], ("truncated", "header")),
        ("train-images-idx3-ubyte", lambda raw: b"", ("nothing",)),
        ("train-images-idx3-ubyte", lambda raw: raw + b"\0", ("too long",)),
        ("train-images-idx3-ubyte", lambda raw: gzip.compress(raw)[:-9], ("truncated or damaged",)),
        ("train-images-idx3-ubyte", lambda raw: idx(20, 14, 14), ("14 x 14", "28 x 28")),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-3], ("truncated", "[20]")),
        ("t10k-labels-idx1-ubyte", lambda raw: idx(19), ("19 labels",)),
        ("t10k-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x0b", ("label 11", "0 to 9")),
        ("t10k-labels-idx1-ubyte", lambda raw: idx(20, 28, 28), ("0x00000801",)),
    ],
)
def test_a_truncated_or_wrong_idx_file(name: str, damage: Callable[[bytes], bytes], words: tuple[str, ...]) -> None:
    folder = Path("mnist")
    folder.mkdir()
    for half in ("train", "t10k"):
        (folder / f"{half}-images-idx3-ubyte").write_bytes(idx(20, 28, 28))
        (folder / f"{half}-labels-idx1-ubyte").write_bytes(idx(20))
    good = {"data": {"name": "mnist", "folder": "mnist"}, "rounds": 0}
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    if words:
        refused_at_once(run(good), name, *words)
    else:
        succeeded(run(good))
