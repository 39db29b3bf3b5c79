"""Data sets: changed files, loaded as a run loads them."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np
import tomli_w
from PIL import Image

from fedblend.core.registry import build
from surfaces.base import Case, call, changed_json, command, in_folder, spoil_path, write_npz


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def _write_idx(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for half, count in (("train", 20), ("t10k", 10)):
        images, labels = _idx(rng.integers(0, 256, (count, 28, 28))), _idx(np.arange(count) % 10)
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


def _write_cifar(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        rows = np.hstack([np.arange(10)[:, None], rng.integers(0, 256, (10, 3072))])
        (folder / name).write_bytes(rows.astype(np.uint8).tobytes())


def _write_leaf(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for half, seed in (("train", 1), ("test", 2)):
        users = {
            f"f{i}": {"x": (rng.integers(0, 256, (3, 784)) / 255).tolist(), "y": [i, i + 1, seed]} for i in range(2)
        }
        document = {"users": [*users], "num_samples": [3, 3], "user_data": users}
        (folder / half).mkdir()
        (folder / half / "all.json").write_text(json.dumps(document))


def _write_leaf_shakespeare(folder: Path) -> None:
    text = "to be or not to be that is the question whether tis nobler in the mind to suffer the slings and arrows of "
    for half, seed in (("train", 0), ("test", 3)):
        x = [(text * 2)[i + seed : i + seed + 80] for i in range(3)]
        users = {f"HAMLET{i}": {"x": x, "y": [text[seed], "o", "b"]} for i in range(2)}
        document = {"users": [*users], "num_samples": [3, 3], "user_data": users}
        (folder / half).mkdir()
        (folder / half / "all.json").write_text(json.dumps(document))


def _write_har(folder: Path) -> None:
    rng = np.random.default_rng(0)
    split = np.array(["train", "test"] * 6)
    x = rng.random((12, 9, 128)).astype(np.float32)
    np.savez(folder / "har.npz", x=x, y=np.arange(12) % 6, client=np.arange(12) // 6, split=split)


def _write_parquet(folder: Path) -> None:
    import pandas as pd

    (folder / "data").mkdir()
    for split, count in (("train", 12), ("test", 6)):
        rows = {"x": [[float(i), 1.0, 2.0] for i in range(count)], "y": [i % 2 for i in range(count)]}
        pd.DataFrame(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


DATA: dict[str, Callable[[Path], None]] = {
    "npz": lambda folder: write_npz(folder / "tiny.npz"),
    "idx": _write_idx,
    "pictures": _write_pictures,
    "fer2013": _write_fer2013,
    "heart": _write_heart,
    "cifar10": _write_cifar,
    "femnist": _write_leaf,
    "leaf-shakespeare": _write_leaf_shakespeare,
    "har": _write_har,
    "parquet": _write_parquet,
}

LOADED: dict[str, dict[str, Any]] = {
    "npz": {"name": "npz", "path": "tiny.npz"},
    "idx": {"name": "mnist", "folder": "."},
    "pictures": {"name": "image-folder", "path": "."},
    "fer2013": {"name": "fer2013", "folder": "."},
    "heart": {"name": "heart", "folder": "."},
    "cifar10": {"name": "cifar10", "folder": "."},
    "femnist": {"name": "femnist", "path": "."},
    "leaf-shakespeare": {"name": "leaf-shakespeare", "path": "."},
    "har": {"name": "har", "path": "har.npz"},
    "parquet": {"name": "hub", "dataset": ".", "inputs": "x", "label": "y"},
}


def _changed_npz(rng: Random, raw: bytes) -> bytes:
    """An archive with changed arrays, a changed header, or other members."""
    made = io.BytesIO()
    with np.load(io.BytesIO(raw)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if rng.random() < 0.7:
        np.savez(made, **mutations.of_arrays(rng, arrays))
        return made.getvalue()
    with zipfile.ZipFile(
        made, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    ) as archive:
        for name, array in arrays.items():
            stored = io.BytesIO()
            np.save(stored, array)
            member = stored.getvalue()
            archive.writestr(f"{name}.npy", mutations.of_bytes(rng, member) if rng.random() < 0.4 else member)
    return made.getvalue()


def _changed_file(rng: Random, path: Path) -> str:
    """Change a file by what it holds; returns what was done in words."""
    raw = path.read_bytes()
    if rng.random() < 0.06:
        spoil_path(rng, path)
        return f"something else in place of {path.name}"
    if path.suffix == ".npz" and rng.random() < 0.7:
        path.write_bytes(_changed_npz(rng, raw))
    elif path.suffix == ".json" and rng.random() < 0.75:
        path.write_bytes(changed_json(rng, raw))
    elif path.suffix == ".gz" and rng.random() < 0.5:
        path.write_bytes(gzip.compress(mutations.of_bytes(rng, gzip.decompress(raw)), mtime=0))
    elif path.suffix in (".csv", ".data") and rng.random() < 0.5:
        path.write_bytes(_changed_table(rng, raw))
    else:
        path.write_bytes(mutations.of_bytes(rng, raw))
    return f"changed {path.name}"


def _changed_table(rng: Random, raw: bytes) -> bytes:
    """A table with a changed word in some line."""
    lines = raw.decode().splitlines()
    at = rng.randrange(len(lines))
    words = lines[at].split(",")
    words[rng.randrange(len(words))] = str(mutations.value(rng))[:5_000]
    lines[at] = ",".join(words)
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def data_files(rng: Random, folder: Path, real: Path) -> Case:
    """A changed file of a data set, loaded and made into a setup as a run does."""
    kind = rng.choice([*DATA, "npz", "npz"])
    if kind == "parquet" and rng.random() < 0.7:
        kind = "pictures"
    shutil.copytree(real / "data" / kind, folder, dirs_exist_ok=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    done = _changed_file(rng, rng.choice(files))
    table = {"data": LOADED[kind], "partition": {"name": rng.choice(("iid", "natural", "dirichlet")), "clients": 2}}
    if table["partition"]["name"] == "natural":
        del table["partition"]["clients"]
    table |= {"model": {"name": "mlp", "hidden": [2]}, "train": {"cohort": 1, "batch_size": 4}, "rounds": 0}
    if rng.random() < 0.05:
        (folder / "experiment.toml").write_text(tomli_w.dumps(table))
        return command(folder, "run", "experiment.toml", "--jobs", 1)

    def read() -> None:
        from fedblend.experiment.config import resolve
        from fedblend.experiment.make_setup import make_setup

        with in_folder(folder, ["fedblend"]):
            spec = build("dataset", LOADED[kind])
            make_setup(resolve({**table, "data": spec}))

    return call(f"load {kind}: {done}", read)
