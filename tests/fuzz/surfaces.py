"""What is fuzzed: for each surface, one input made from a random generator, and what reads the input.

A surface takes a random generator and an empty folder. It writes a changed copy of real files into the folder and
returns what fedblend is to do with them, as a :class:`Case`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import io
import json
import os
import shutil
import struct
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import mutations
import numpy as np
import tomli_w
import torch
from PIL import Image
from safetensors.torch import load, save

from fedblend.cli import main
from fedblend.core.errors import FedblendError, printable
from fedblend.core.registry import build
from fedblend.runs.faults import user_error

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

CLEAN, MESSAGE = "clean", "message"


@dataclass
class Outcome:
    """What became of an input: ``clean`` or ``message``, and what was printed."""

    kind: str
    text: str = ""
    code: int = 0


@dataclass
class Case:
    """An input: in words, and what reads it. Errors other than :class:`FedblendError` are the fuzzer's findings."""

    words: str
    run: Callable[[], Outcome]


Surface = Callable[[Random, Path, Path], Case]
"""Takes a random generator, the empty folder of the input, and the folder of real files (:func:`make_real_files`)."""


# Running -----------------------------------------------------------------------------------------------------


def command(folder: Path, *words: object, report: bool = True) -> Case:
    """A command of ``fedblend`` in this process, in ``folder``; without ``report``, runs do not write their page."""
    arguments = [str(word) for word in words]

    def run() -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        code: Any = 0
        page = contextlib.nullcontext() if report else mock.patch("fedblend.report.write")
        with (
            page,
            _in_folder(folder, ["fedblend", *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        kind = CLEAN if code in (0, 130) else MESSAGE
        return Outcome(kind, f"{out.getvalue()}\n{err.getvalue()}", code)

    return Case(f"fedblend {' '.join(map(repr, arguments))}", run)


@contextlib.contextmanager
def _in_folder(folder: Path, arguments: list[str]) -> Iterator[None]:
    before = Path.cwd(), sys.argv, list(sys.path), dict(os.environ)
    os.chdir(folder)
    sys.argv = arguments
    try:
        yield
    finally:
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1], before[2]
        os.environ.clear()
        os.environ.update(before[3])


def call(words: str, function: Callable[[], Any]) -> Case:
    """A call of a function of fedblend; its errors are told as the command line tells them."""

    def run() -> Outcome:
        try:
            function()
        except FedblendError as error:
            return Outcome(MESSAGE, f"fedblend: error: {printable(str(error))}", 2)
        except Exception as error:
            if (message := user_error(error)) is None:
                raise
            return Outcome(MESSAGE, f"fedblend: error: {printable(message)}", 2)
        return Outcome(CLEAN)

    return Case(words, run)


# Real files --------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 1,
    "data": {"name": "npz", "path": "tiny.npz"},
    "partition": {"name": "iid", "clients": 3},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"cohort": 2, "epochs": 1, "batch_size": 8, "lr": 0.05},
    "method": {"name": "fedavg"},
    "engine": "loop",
    "ranks": 1,
    "unsafe": True,
}
"""An experiment of some hundredths of a second."""

RUNS = {
    "fedavg": {"holdout": 0.3, "target": 0.5, "rounds": 2},
    "fedmix": {"method": "fedmix", "protection": {"name": "noise", "clip": 1.0, "multiplier": 0.5}},
    "aggenhance": {"method": {"name": "aggenhance", "server_step": {"epochs": 1, "steps": 1}}, "rounds": 2},
    "fed-augmix": {"method": "fed-augmix", "channel": "wireless"},
    "mix2fld": {"method": {"name": "mix2fld", "sharing": {"samples": 4}, "server_step": {"steps": 1}}},
    "toy": {"data": "toy", "partition": "natural"},
    "study": {"methods": ["fedavg", "localmix"], "method": None, "seeds": [0, 1]},
}
"""Runs whose folders are fuzzed, as changes of :data:`TINY`."""


def tiny(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The tiny experiment, with its data in ``folder``."""
    table = {**copy.deepcopy(TINY), **copy.deepcopy(changes or {})}
    if table["data"] == TINY["data"]:
        write_npz(folder / "tiny.npz")
    return {key: inner for key, inner in table.items() if inner is not None}


def write_npz(path: Path) -> None:
    """A data set of 45 small images of three writers."""
    np.savez(path, **_arrays())


def _arrays() -> dict[str, np.ndarray]:
    rng, y = np.random.default_rng(0), np.arange(45) % 3
    x = (rng.integers(0, 90, (45, 6, 6)) + y[:, None, None] * 60).astype(np.uint8)
    names = {"client_names": np.array(["ann", "ben", "cia"]), "classes": np.array(["a", "b", "c"])}
    return {"x": x, "y": y, "client": np.arange(45) // 15, "split": np.arange(45) % 5 // 4, **names}


def make_real_files(folder: Path) -> None:
    """Write the runs, data sets and messages that are changed."""
    runs = folder / "runs"
    runs.mkdir(parents=True)
    for name, changes in RUNS.items():
        table = tiny(runs, changes)
        (runs / f"{name}.toml").write_text(tomli_w.dumps(table))
        outcome = command(runs, "run", f"{name}.toml", "--out", name, "--jobs", 1).run()
        if outcome.code:
            raise RuntimeError(f"{name}: {outcome.text}")
    for name, write in DATA.items():
        (folder / "data" / name).mkdir(parents=True)
        write(folder / "data" / name)


# Experiment files --------------------------------------------------------------------------------------------


@functools.cache
def _fields() -> list[tuple[str, str | None, str | None, str]]:
    """Every field of an experiment and of every part, as (path of its table, name of a part, field, type)."""
    from fedblend.core.registry import MODULES
    from fedblend.experiment.options import kind_entries, table_entries

    found: list[Any] = []
    for entry in [*table_entries(), *(entry for kind in MODULES for entry in kind_entries(kind))]:
        part = None if entry.kind == "table" else entry.name
        found += [(entry.where, part, option.name, option.type) for option in entry.options]
        if entry.kind != "table":
            found.append((entry.where, entry.name, None, ""))
    return found


def _some_experiment(rng: Random, folder: Path) -> dict[str, Any]:
    """The tiny experiment with one of the named methods, partitions, or other parts."""
    from fedblend.experiment.presets import presets

    table = tiny(folder)
    table["method"] = {"name": rng.choice(list(presets()))}
    if rng.random() < 0.2:
        table["methods"] = ["fedavg", {"name": "fedmix", "objective": {"lambda": 0.2}}]
        del table["method"]
    if rng.random() < 0.2:
        table |= {"grid": {"train.lr": [0.1, 0.2]}, "seeds": [0, 1]}
    return table


def experiment_tables(rng: Random, folder: Path, real: Path) -> Case:
    """A tiny experiment, of which a field, or an entry, has a value at the edge of what it takes."""
    table = _some_experiment(rng, folder)
    for _ in range(rng.choice((1, 1, 1, 2))):
        where, part, option, kind = rng.choice(_fields())
        if where == "data" and rng.random() < 0.8:
            continue
        inside = table
        if where.startswith("method"):
            table.pop("methods", None)
        for step in where.split(".") if where else []:
            if not isinstance(inside.get(step), dict):
                inside[step] = {}
            inside = inside[step]
        if part is not None:
            inside.clear()
            inside["name"] = part
        if option is not None:
            inside[option] = mutations.fitting(rng, kind)
        if where == "method.terms" or where == "callbacks":
            outer = table["method"] if where == "method.terms" and isinstance(table.get("method"), dict) else table
            outer[where.split(".")[-1]] = [inside]
    if rng.random() < 0.2:
        table = mutations.of_table(rng, table)
    return _file_case(rng, folder, table)


def _file_case(rng: Random, folder: Path, table: Any) -> Case:
    table = mutations.plain(table, toml=True)
    try:
        text = tomli_w.dumps(table if isinstance(table, dict) else {"x": table})
    except (TypeError, ValueError, RecursionError):
        text = mutations.of_lines(rng, tomli_w.dumps(tiny(folder)))
    return _text_case(rng, folder, text.encode("utf-8", "surrogatepass"))


def _text_case(rng: Random, folder: Path, text: bytes) -> Case:
    (folder / "experiment.toml").write_bytes(text)
    words: tuple[object, ...] = ("run", "experiment.toml", "--jobs", 1)
    if rng.random() < 0.1:
        words = rng.choice((("data", "show", "experiment.toml"), ("channel", "experiment.toml")))
    if rng.random() < 0.04:
        words = rng.choice(
            (
                ("federation", "app", "experiment.toml", "--out", "app", "--folder", "run"),
                ("privacy", "samples", "experiment.toml", "--samples", 4, "--repeats", 1),
                ("privacy", "xor", "experiment.toml"),
            )
        )
    return command(folder, *words, report=rng.random() < 0.1)


def experiment_text(rng: Random, folder: Path, real: Path) -> Case:
    """A real experiment file with changed lines or bytes."""
    text = tomli_w.dumps(_some_experiment(rng, folder))
    if rng.random() < 0.3:
        example = rng.choice(sorted(EXAMPLES.glob("*.toml"))).read_text()
        table = {**tomllib.loads(example), **{key: TINY[key] for key in ("data", "model", "engine", "ranks", "rounds")}}
        table["train"] = {**table.get("train", {}), "epochs": 1, "steps": 2}
        text = tomli_w.dumps(table)
    if rng.random() < 0.8:
        return _text_case(rng, folder, mutations.of_lines(rng, text).encode("utf-8", "surrogatepass"))
    return _text_case(rng, folder, mutations.of_bytes(rng, text.encode()))


# Data sets ---------------------------------------------------------------------------------------------------


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


def _changed_json(rng: Random, raw: bytes) -> bytes:
    table = mutations.plain(mutations.of_table(rng, json.loads(raw)), toml=False)
    try:
        return json.dumps(table).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return mutations.of_bytes(rng, raw)


def _spoil_path(rng: Random, path: Path) -> None:
    """Put something else in a file's place: a folder, a link to nowhere or to itself, an unreadable or endless file."""
    path.unlink() if path.is_file() or path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    kind = rng.randrange(8)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to("nowhere")
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.write_bytes(b"")
    elif kind == 4:
        path.write_bytes(b"x = 1\n")
        path.chmod(0)
    elif kind == 5:
        os.mkfifo(path)
    elif kind == 6:
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
        path.chmod(0)


def _changed_file(rng: Random, path: Path) -> str:
    """Change a file by what it holds; returns what was done in words."""
    raw = path.read_bytes()
    if rng.random() < 0.06:
        _spoil_path(rng, path)
        return f"something else in place of {path.name}"
    if path.suffix == ".npz" and rng.random() < 0.7:
        path.write_bytes(_changed_npz(rng, raw))
    elif path.suffix == ".json" and rng.random() < 0.75:
        path.write_bytes(_changed_json(rng, raw))
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
        from fedblend.experiment.setup import make_setup

        with _in_folder(folder, ["fedblend"]):
            spec = build("dataset", LOADED[kind])
            make_setup(resolve({**table, "data": spec}))

    return call(f"load {kind}: {done}", read)


# Run directories ---------------------------------------------------------------------------------------------

RUN_FILES = ("config.toml", "facts.json", "status.json", "metrics.jsonl", "checkpoint.safetensors", "split.json")


def run_directories(rng: Random, folder: Path, real: Path) -> Case:
    """A run whose files are changed, read by a command."""
    name = rng.choice([*RUNS, "fedavg", "fedavg"])
    shutil.copytree(real / "runs" / name, folder / "out")
    if (real / "runs" / "tiny.npz").exists():
        shutil.copy(real / "runs" / "tiny.npz", folder)
    runs = sorted(path.parent for path in (folder / "out").rglob("config.toml"))
    for run in runs:
        # A run names its data by an absolute path.
        text = (run / "config.toml").read_text().replace(str(real / "runs"), str(folder))
        (run / "config.toml").write_text(text)
    files = [run / file for run in runs for file in RUN_FILES] + [folder / "out" / "study.json"]
    for _ in range(rng.choice((1, 1, 1, 2))):
        _change_run_file(rng, rng.choice([path for path in files if path.is_file()] or files))
    run = rng.choice([folder / "out", *runs]).relative_to(folder)
    return command(folder, *rng.choice(_RUN_COMMANDS)(run))


_RUN_COMMANDS: tuple[Callable[[Path], tuple[object, ...]], ...] = (
    lambda run: ("compare", run),
    lambda run: ("compare", run),
    lambda run: ("compare", run, "--sites"),
    lambda run: ("inspect", run),
    lambda run: ("inspect", run),
    lambda run: ("report", run, "--out", "page.html"),
    lambda run: ("resume", run, "--jobs", 1),
    lambda run: ("resume", run, "--jobs", 1),
    lambda run: ("run", "tiny.toml", "--out", run, "--resume", "--jobs", 1),
    lambda run: ("leaks", run),
    lambda run: ("switches", run),
    lambda run: ("boundaries", run),
    lambda run: ("points", run, "--epochs", 1, "--vae-epochs", 0),
    lambda run: ("attack", run, "--round", 0, "--client", 0, "--iterations", 2, "--images", 1),
)  # fmt: skip


def _change_run_file(rng: Random, path: Path) -> None:
    if not path.is_file():
        return
    if rng.random() < 0.08:
        _spoil_path(rng, path)
        return
    raw = path.read_bytes()
    if rng.random() < 0.25:
        path.write_bytes(mutations.of_bytes(rng, raw))
    elif path.suffix == ".json":
        path.write_bytes(_changed_json(rng, raw))
    elif path.suffix == ".jsonl":
        path.write_bytes(_changed_lines(rng, raw))
    elif path.suffix == ".toml":
        table = mutations.plain(mutations.of_table(rng, tomllib.loads(raw.decode())), toml=True)
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            path.write_bytes(tomli_w.dumps(table if isinstance(table, dict) else {}).encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(_changed_checkpoint(rng, raw))


def _changed_lines(rng: Random, raw: bytes) -> bytes:
    """JSON lines with one or two of them changed, doubled, moved or removed."""
    lines = raw.splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        at, kind = rng.randrange(len(lines)) if lines else 0, rng.randrange(8)
        if not lines:
            break
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, lines[at])
        elif kind == 2:
            lines.insert(0, lines.pop(at))
        else:
            lines[at] = _changed_json(rng, lines[at]) if lines[at].startswith(b"{") else b"{}"
    return b"\n".join(lines) + b"\n"


def _changed_checkpoint(rng: Random, raw: bytes) -> bytes:
    """A checkpoint with a changed header, or changed tensors."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    kind = rng.randrange(3)
    if kind == 0:
        changed = _changed_json(rng, json.dumps(header).encode())
        return struct.pack("<Q", len(changed)) + changed + raw[8 + length :]
    tensors, metadata = load(raw), header["__metadata__"]
    if kind == 1:
        state = _changed_json(rng, metadata["state"].encode())
        return save(tensors, {"state": state.decode("utf-8", "replace")})
    name = rng.choice(list(tensors))
    with contextlib.suppress(TypeError, ValueError):
        array = np.ascontiguousarray(mutations.of_array(rng, tensors.pop(name).numpy()))
        other = rng.choice(
            (name, name, name, "weights/x", "client/0/weights/x", "client/-1/x", "client/x", "x", "owner")
        )
        tensors[other] = torch.from_numpy(array)
    return save(tensors, metadata)


# Sites -------------------------------------------------------------------------------------------------------


def site_files(rng: Random, folder: Path, real: Path) -> Case:
    """A changed site file, audit log or key file, read by ``site audit`` or as a node reads it."""
    from fedblend.flower.site import KINDS, read_site, site_text

    write_npz(folder / "tiny.npz")
    path, log = folder / "site.toml", folder / "audit.jsonl"
    text = site_text(path, folder / "tiny.npz" if rng.random() < 0.5 else None, KINDS)
    text = text.replace("# max_seeds", "max_seeds").replace("# rounds", "rounds")
    line = {"time": "2026-01-01T00:00:00Z", "run": "a/1", "round": 0, "client": 0, "kind": "weights", "bytes": 24}
    line |= {"tensors": {"w": ["float32", 2, 3]}, "sha256": "0" * 64, "trained": True}
    refusal = {**{key: line[key] for key in ("time", "run", "round", "client", "kind")}, "refused": "no"}
    raw = "".join(json.dumps(one) + "\n" for one in (line, refusal, {**line, "round": 1})).encode()
    kind = rng.randrange(5)
    if kind <= 1:
        table = mutations.plain(mutations.of_table(rng, tomllib.loads(text)), toml=True)
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = tomli_w.dumps(table if isinstance(table, dict) else {})
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        log.write_bytes(raw)
    elif kind == 2:
        path.write_bytes(mutations.of_bytes(rng, text.encode()))
        log.write_bytes(raw)
    else:
        path.write_text(text)
        log.write_bytes(_changed_lines(rng, raw) if rng.random() < 0.7 else mutations.of_bytes(rng, raw))
        if rng.random() < 0.1:
            _spoil_path(rng, log)
    if rng.random() < 0.6:
        return command(folder, "site", "audit", *(["--last", 2] if rng.random() < 0.3 else []))

    def read() -> None:
        from fedblend.flower.audit import AuditLog

        site = read_site(path)
        record = AuditLog(site.audit)
        record.rounds_trained()
        record.has_sent("a/1", 0, 0, "weights", True)
        if site.data is not None:
            site.data.load()

    return call("read a site file and its audit log", read)


def paths(rng: Random, folder: Path, real: Path) -> Case:
    """A command that is given, in place of a file or folder, something else, or that may not read or write there."""
    shutil.copytree(real / "runs" / "fedavg", folder / "out")
    (folder / "experiment.toml").write_text(tomli_w.dumps(tiny(folder)))
    shutil.copytree(real / "data" / "pictures", folder / "pictures")
    run = next((folder / "out").rglob("config.toml")).parent
    inside = [path for path in folder.rglob("*") if path.is_file()]
    places = [*inside, folder / "out", run, folder / "pictures", folder / "pictures" / "a", folder / "new"]
    target = rng.choice(places)
    if rng.random() < 0.7 or not target.exists():
        if not target.exists():
            target.write_bytes(b"")
        _spoil_path(rng, target)
    else:
        target.chmod(rng.choice((0, 0o111, 0o444, 0o500)))
    relative = run.relative_to(folder)
    words = rng.choice(
        (
            ("run", "experiment.toml", "--jobs", 1),
            ("run", "experiment.toml", "--jobs", 1, "--out", "new"),
            ("run", "experiment.toml", "--jobs", 1, "--out", "out", "--resume"),
            ("run", "new", "--jobs", 1),
            ("run", "experiment.toml", "--jobs", 1, "--data", "new"),
            ("run", "experiment.toml", "--jobs", 1, "--set", "data=image-folder", "--set", "data.path=pictures"),
            ("resume", "out", "--jobs", 1),
            ("resume", relative, "--jobs", 1),
            ("compare", "out"),
            ("compare", relative),
            ("inspect", "out"),
            ("report", "out", "--out", "new"),
            ("report", "out", "--out", "new/page.html"),
            ("leaks", "out", "--out", "new"),
            (
                "attack",
                relative,
                *["--round", "0", "--client", "0", "--iterations", "1", "--images", "1", "--out", "new"],
            ),
            ("data", "show", "experiment.toml", "--out", "new"),
            ("site", "init", "new"),
            ("site", "init", "new/site.toml"),
            ("site", "audit", "new"),
            ("federation", "app", "experiment.toml", "--out", "new", "--folder", "run"),
            ("run", "experiment.toml", "--jobs", 1, "--set", "start=new/run"),
            ("run", "experiment.toml", "--jobs", 1, "--set", f"start={relative}/"),
        )
    )
    return command(folder, *words)


# Words of a command line -------------------------------------------------------------------------------------

COMMANDS = tuple(
    text.split()
    for text in (
        "run experiment.toml --jobs 1 --out new --seeds 0,1 --engine loop --ranks 1 --set rounds=1 --set train.lr=0.1",
        "run experiment.toml --jobs 1",
        "resume out --jobs 1 --ranks 1",
        "report out --out page.html",
        "compare out",
        "compare out --sites",
        "inspect out",
        "list",
        "list methods",
        "list fedmix",
        "list objective",
        "new fedmix digits",
        "new fedavg mnist5k",
        "data show experiment.toml --out split.png --set partition.clients=2",
        "channel experiment.toml --samples 10,50 --set channel=wireless",
        "points out --epochs 1 --lr 0.1 --batch-size 2 --vae-epochs 0 --out points",
        "boundaries out --out boundaries.png",
        "attack out/fedavg-seed0 --round 0 --client 0 --attack invgrad --images 1 --iterations 1 --restarts 1",
        "attack out/fedavg-seed0 --round 1 --client 1 --attacker plain --steps 1 --iterations 1 --images 1",
        "switches out --out switches",
        "leaks out --out leaks",
        "privacy samples experiment.toml --lambdas 0.1,0.2 --samples 2 --devices 2 --repeats 1",
        "privacy xor experiment.toml --blended 1,2 --repeats 1 --out pictures --json xor.json",
        "reproduce --list",
        "reproduce fedmix/table-1 --scale smoke --only fedavg --jobs 1 --seeds 0",
        "federation app experiment.toml --out app --folder run --min-sites 2 --deadline 5",
        "federation up experiment.toml --sites 2 --deadline 5 --out trial",
        "site init site.toml --data tiny.npz --min-mean 3",
        "site audit site.toml --last 3",
        "--version",
        "",
    )
)


def command_words(rng: Random, folder: Path, real: Path) -> Case:
    """A valid command with changed words."""
    shutil.copytree(real / "runs" / "fedavg", folder / "out")
    (folder / "experiment.toml").write_text(tomli_w.dumps(tiny(folder)))
    return command(folder, *mutations.of_words(rng, list(rng.choice(COMMANDS))))


# Messages of a federation ------------------------------------------------------------------------------------

ASKED = ("fedavg", "fedmix", "fd", "aggenhance-secure", "mix2fld", "masked", "scaffold")
"""Methods whose messages are changed; ``masked`` is FedMix with secure sums."""


def _asked(name: str) -> Any:
    from fedblend.experiment.config import resolve

    method: Any = {"name": "fedmix", "aggregator": "secure-mean"} if name == "masked" else {"name": name}
    if name == "mix2fld":
        method |= {"sharing": {"samples": 40}, "server_step": {"steps": 1}}
    # A site reads no file that a server names.
    table = {**TINY, "data": "digits", "fraction": 0.1, "method": method}
    table["train"] = {**TINY["train"], "cohort": 3}
    return resolve(table)


@functools.cache
def _messages(name: str, folder: Path) -> list[tuple[str, int, Any, dict[str, Any], dict[str, torch.Tensor]]]:
    """What the server sends in a run of this method: kind, client, state of the client before, fields and tensors."""
    from flower_helpers import Nodes, through

    from fedblend.flower.app_folder import FederationLimits
    from fedblend.flower.messages import unpack
    from fedblend.flower.server import run

    folder.mkdir(parents=True, exist_ok=True)
    grid = Nodes({"partition-id": client} for client in range(3))
    kept: list[Any] = []
    answer = grid.app

    def listening(message: Any, context: Any) -> Any:
        state = copy.deepcopy(context.state)
        kept.append((message.metadata.message_type, grid.client(context.node_id), state, *unpack(message.content)))
        return answer(message, context)

    grid.app = listening  # type: ignore[assignment]
    assert through
    run(grid, _asked(name), folder / "run", FederationLimits(min_sites=3, deadline=20))
    return kept


def _changed_content(rng: Random, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """A message's content with changed fields, tensors or records."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedblend.flower.messages import pack, to_record

    kind = rng.randrange(8)
    if kind <= 3 or not tensors:
        changed = mutations.plain(mutations.of_table(rng, fields), toml=False)
        try:
            text = json.dumps(changed)
        except (ValueError, RecursionError):
            text = "[" * 100_000
        if rng.random() < 0.1:
            text = mutations.of_bytes(rng, text.encode()).decode("utf-8", "replace")
        content = RecordDict({"fields": ConfigRecord({"fields": text})})
        if tensors:
            content["tensors0"] = to_record(tensors)
        return content
    if kind <= 5:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        changed_arrays = mutations.of_arrays(rng, arrays)
        made = {}
        for name, array in changed_arrays.items():
            with contextlib.suppress(TypeError, ValueError):
                made[name] = Array(np.ascontiguousarray(array).reshape(array.shape))
        content = pack(fields)
        content["tensors0"] = ArrayRecord(made)
        return content
    content = pack(fields)
    name = rng.choice(list(tensors))
    stored = io.BytesIO()
    np.save(stored, tensors[name].numpy())
    bad = Array("float32", tuple(tensors[name].shape), "numpy.ndarray", mutations.of_bytes(rng, stored.getvalue()))
    others = {n: Array(t.numpy()) for n, t in tensors.items() if n != name}
    content["tensors0"] = ArrayRecord({**others, name: bad})
    return content


def site_messages(rng: Random, folder: Path, real: Path) -> Case:
    """A changed message of a server to the app of a site."""
    from flwr.app import Context, Message

    from fedblend.flower.client import app
    from fedblend.flower.messages import unpack

    name = rng.choice(ASKED)
    kind, client, state, fields, tensors = rng.choice(_messages(name, real.parent / "messages" / name))
    content = _changed_content(rng, fields, tensors)
    config = {"partition-id": client}
    if rng.random() < 0.2:
        config[rng.choice(("partition-id", "site"))] = rng.choice((*mutations.TEXTS[:8], 10**12, -1, 1.5))

    def run() -> Outcome:
        message = Message(content, 1, kind, group_id="0")
        message.metadata.__dict__["_message_id"] = "1"
        reply = app(message, Context(1, 1, config, copy.deepcopy(state), {}))
        if not reply.has_content():
            raise RuntimeError(f"the site's app replied with an error: {reply.error.reason}")
        said, _ = unpack(reply.content)
        return Outcome(MESSAGE, f"fedblend: error: {said['fault']}", 2) if "fault" in said else Outcome(CLEAN)

    return Case(f"a site is sent a changed {kind} of {name}", run)


def server_messages(rng: Random, folder: Path, real: Path) -> Case:
    """A changed reply of a site to the app of the server."""
    from flower_helpers import Nodes
    from flwr.app import Message

    from fedblend.flower.app_folder import FederationLimits
    from fedblend.flower.messages import unpack
    from fedblend.flower.server import run

    name = rng.choice(ASKED)
    grid = Nodes({"partition-id": client} for client in range(3))
    victim, number = rng.randrange(3), rng.randrange(6)
    seen = [0]

    def spoil(who: int, message: Any, reply: Any) -> Any:
        if who != victim or not reply.has_content():
            return reply
        seen[0] += 1
        if seen[0] - 1 != number % 3 and rng.random() < 0.7:
            return reply
        return Message(_changed_content(rng, *unpack(reply.content)), reply_to=message)

    grid.spoil = spoil
    asked = _asked(name)
    limits = FederationLimits(min_sites=2, deadline=2)
    return call(f"a server is sent changed replies in {name}", lambda: run(grid, asked, folder / "run", limits))


SURFACES: dict[str, Surface] = {
    "experiment tables": experiment_tables,
    "experiment text": experiment_text,
    "data files": data_files,
    "run directories": run_directories,
    "site files and audit logs": site_files,
    "paths and permissions": paths,
    "command lines": command_words,
    "messages to a site": site_messages,
    "messages to a server": server_messages,
}
"""Every surface by its name in :data:`fuzz.SHARES`."""
