"""Data sets: changed files, loaded as a run loads them."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np
import tomli_w
from datasets_helpers import cifar, idx
from PIL import Image

from fedblend.core.registry import build
from surfaces.base import Case, call, changed_json, command, in_folder, spoil_path, write_npz


def _write_idx(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for half, count in (("train", 20), ("t10k", 10)):
        images, labels = idx(rng.integers(0, 256, (count, 28, 28))), idx(np.arange(count) % 10)
        (folder / f"{half}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images, mtime=0))
        (folder / f"{half}-labels-idx1-ubyte").write_bytes(labels)


def _write_pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for i, kind in enumerate(("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")):
        for name in "ab":
            (folder / name).mkdir(exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).save(folder / name / f"{i}.png", format=kind)


def _write_fer2013(folder: Path) -> None:
    rng, rows = np.random.default_rng(0), ["emotion,pixels,Usage"]
    for i, usage in enumerate(("Training",) * 4 + ("PublicTest", "PrivateTest")):
        rows.append(f"{i},{' '.join(map(str, rng.integers(0, 256, 48 * 48)))},{usage}")
    (folder / "fer2013.csv").write_text("\n".join(rows) + "\n")


def _write_heart(folder: Path) -> None:
    line = "{}.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,{}"
    for i, name in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        rows = [line.format(40 + i + k, k % 2) for k in range(8)]
        (folder / f"processed.{name}.data").write_text("\n".join(rows) + "\n")


def _write_leaf(folder: Path, samples: Callable[[int, int], tuple[list[Any], list[Any]]]) -> None:
    """Write two users with three ``samples(user, seed)`` each."""
    for seed, half in enumerate(("train", "test")):
        users = {f"user{i}": dict(zip("xy", samples(i, seed), strict=True)) for i in range(2)}
        document = {"users": [*users], "num_samples": [3, 3], "user_data": users}
        (folder / half).mkdir()
        (folder / half / "all.json").write_text(json.dumps(document))


def _pictures_of_user(user: int, seed: int) -> tuple[list[Any], list[Any]]:
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 784)) / 255
    return pixels.tolist(), [user, user + 1, seed]


def _lines_of_user(user: int, seed: int) -> tuple[list[Any], list[Any]]:
    text = 2 * "to be or not to be that is the question whether tis nobler in the mind to suffer the slings of "
    return [text[i + seed : i + seed + 80] for i in range(3)], [text[seed], "o", "b"]


def _write_har(folder: Path) -> None:
    x, split = np.random.default_rng(0).random((12, 9, 128)).astype(np.float32), np.array(["train", "test"] * 6)
    np.savez(folder / "har.npz", x=x, y=np.arange(12) % 6, client=np.arange(12) // 6, split=split)


def _write_parquet(folder: Path) -> None:
    import pandas as pd

    (folder / "data").mkdir()
    for split, count in (("train", 12), ("test", 6)):
        rows = {"x": [[float(i), 1.0, 2.0] for i in range(count)], "y": [i % 2 for i in range(count)]}
        pd.DataFrame(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


DATA: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "npz": (lambda folder: write_npz(folder / "tiny.npz"), {"name": "npz", "path": "tiny.npz"}),
    "idx": (_write_idx, {"name": "mnist", "folder": "."}),
    "pictures": (_write_pictures, {"name": "image-folder", "path": "."}),
    "fer2013": (_write_fer2013, {"name": "fer2013", "folder": "."}),
    "heart": (_write_heart, {"name": "heart", "folder": "."}),
    "cifar10": (cifar, {"name": "cifar10", "folder": "."}),
    "femnist": (lambda folder: _write_leaf(folder, _pictures_of_user), {"name": "femnist", "path": "."}),
    "leaf-shakespeare": (
        lambda folder: _write_leaf(folder, _lines_of_user),
        {"name": "leaf-shakespeare", "path": "."},
    ),
    "har": (_write_har, {"name": "har", "path": "har.npz"}),
    "parquet": (_write_parquet, {"name": "hub", "dataset": ".", "inputs": "x", "label": "y"}),
}
"""What writes the files of a data set, and what loads them."""


def _changed_npz(rng: Random, raw: bytes) -> bytes:
    """An archive with changed arrays, a changed header, or other members."""
    made = io.BytesIO()
    with np.load(io.BytesIO(raw)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if rng.random() < 0.7:
        np.savez(made, **mutations.of_arrays(rng, arrays))
        return made.getvalue()
    packed = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(made, "w", packed) as archive:
        for name, array in arrays.items():
            stored = io.BytesIO()
            np.save(stored, array)
            member = stored.getvalue()
            archive.writestr(f"{name}.npy", mutations.of_bytes(rng, member) if rng.random() < 0.4 else member)
    return made.getvalue()


def _changed_table(rng: Random, raw: bytes) -> bytes:
    """A table with a changed word in some line."""
    lines = raw.decode().splitlines()
    at = rng.randrange(len(lines))
    words = lines[at].split(",")
    words[rng.randrange(len(words))] = str(mutations.value(rng))[:5_000]
    lines[at] = ",".join(words)
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def _changed_gzip(rng: Random, raw: bytes) -> bytes:
    return gzip.compress(mutations.of_bytes(rng, gzip.decompress(raw)), mtime=0)


CHANGES = {".npz": _changed_npz, ".json": changed_json, ".gz": _changed_gzip, ".csv": _changed_table}
CHANGES[".data"] = _changed_table


def data_files(rng: Random, folder: Path, real: Path) -> Case:
    """A changed file of a data set, loaded and made into a setup as a run does."""
    kind = rng.choice([*DATA, "npz", "npz"])
    if kind == "parquet" and rng.random() < 0.7:
        kind = "pictures"
    shutil.copytree(real / "data" / kind, folder, dirs_exist_ok=True)
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    if rng.random() < 0.06:
        spoil_path(rng, path)
    else:
        change = CHANGES.get(path.suffix, mutations.of_bytes) if rng.random() < 0.65 else mutations.of_bytes
        path.write_bytes(change(rng, path.read_bytes()))
    partition = rng.choice(({"name": "natural"}, {"name": "iid", "clients": 2}, {"name": "dirichlet", "clients": 2}))
    table: dict[str, Any] = {"data": DATA[kind][1], "partition": partition, "model": {"name": "mlp", "hidden": [2]}}
    table |= {"train": {"cohort": 1, "batch_size": 4}, "rounds": 0}
    if rng.random() < 0.05:
        (folder / "experiment.toml").write_text(tomli_w.dumps(table))
        return command(folder, "run", "experiment.toml", "--jobs", 1)

    def read() -> None:
        from fedblend.experiment.config import resolve
        from fedblend.experiment.make_setup import make_setup

        with in_folder(folder, ["fedblend"]):
            make_setup(resolve({**table, "data": build("dataset", DATA[kind][1])}))

    return call(f"load {kind} with another {path.name}", read)
