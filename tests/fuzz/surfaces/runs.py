"""Run directories, paths and permissions, and words of the command line."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random

import mutations
import numpy as np
import tomli_w
import torch
from safetensors.torch import load, save

from surfaces.base import Case, changed_json, changed_lines, command, spoil_path, tiny

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
    present = [path for path in files if path.is_file()]
    for path in rng.sample(present, rng.choice((1, 1, 1, 2))):
        _change_run_file(rng, path)
    run = rng.choice([folder / "out", *runs]).relative_to(folder)
    return command(folder, *rng.choice(_RUN_COMMANDS)(run), report=rng.random() < 0.1)


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
    if rng.random() < 0.08:
        spoil_path(rng, path)
        return
    raw = path.read_bytes()
    if rng.random() < 0.25:
        path.write_bytes(mutations.of_bytes(rng, raw))
    elif path.suffix == ".json":
        path.write_bytes(changed_json(rng, raw))
    elif path.suffix == ".jsonl":
        path.write_bytes(changed_lines(rng, raw))
    elif path.suffix == ".toml":
        table = mutations.plain(mutations.of_table(rng, tomllib.loads(raw.decode())), toml=True)
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            path.write_bytes(tomli_w.dumps(table if isinstance(table, dict) else {}).encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(_changed_checkpoint(rng, raw))


def _changed_checkpoint(rng: Random, raw: bytes) -> bytes:
    """A checkpoint with a changed header, or changed tensors."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    kind = rng.randrange(3)
    if kind == 0:
        changed = changed_json(rng, json.dumps(header).encode())
        return struct.pack("<Q", len(changed)) + changed + raw[8 + length :]
    tensors, metadata = load(raw), header["__metadata__"]
    if kind == 1:
        state = changed_json(rng, metadata["state"].encode())
        return save(tensors, {"state": state.decode("utf-8", "replace")})
    name = rng.choice(list(tensors))
    with contextlib.suppress(TypeError, ValueError):
        array = np.ascontiguousarray(mutations.of_array(rng, tensors.pop(name).numpy()))
        other = rng.choice(
            (name, name, name, "weights/x", "client/0/weights/x", "client/-1/x", "client/x", "x", "owner")
        )
        tensors[other] = torch.from_numpy(array)
    with contextlib.suppress(KeyError):  # complex numbers, which the format does not know
        return save(tensors, metadata)
    return raw


# Paths ------------------------------------------------------------------------------------------------------


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
        spoil_path(rng, target)
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
    return command(folder, *words, report=rng.random() < 0.1)


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
        "site check site.toml",
        "site audit site.toml --last 3",
        "--version",
        "",
    )
)


def command_words(rng: Random, folder: Path, real: Path) -> Case:
    """A valid command with changed words."""
    shutil.copytree(real / "runs" / "fedavg", folder / "out")
    (folder / "experiment.toml").write_text(tomli_w.dumps(tiny(folder)))
    return command(folder, *mutations.of_words(rng, list(rng.choice(COMMANDS))), report=rng.random() < 0.1)
