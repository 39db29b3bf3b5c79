"""Run directories, paths and permissions, and words of the command line."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from random import Random

import mutations
import numpy as np
import torch
from safetensors.torch import load, save

from surfaces.base import Case, changed_json, changed_lines, changed_toml, command, finished_run, spoil_path

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


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


RUN_COMMANDS = _lines("""
    compare RUN
    compare RUN
    compare RUN --sites
    inspect RUN
    inspect RUN
    report RUN --out page.html
    resume RUN --jobs 1
    resume RUN --jobs 1
    run tiny.toml --out RUN --resume --jobs 1
    leaks RUN
    switches RUN
    boundaries RUN
    points RUN --epochs 1 --vae-epochs 0
    attack RUN --round 0 --client 0 --iterations 2 --images 1
""")

PATH_COMMANDS = _lines("""
    run experiment.toml --jobs 1
    run experiment.toml --jobs 1 --out new
    run experiment.toml --jobs 1 --out out --resume
    run new --jobs 1
    run experiment.toml --jobs 1 --data new
    run experiment.toml --jobs 1 --set data=image-folder --set data.path=pictures
    resume out --jobs 1
    resume RUN --jobs 1
    compare out
    compare RUN
    inspect out
    report out --out new
    report out --out new/page.html
    leaks out --out new
    attack RUN --round 0 --client 0 --iterations 1 --images 1 --out new
    data show experiment.toml --out new
    site init new
    site init new/site.toml
    site audit new
    federation app experiment.toml --out new --folder run
    run experiment.toml --jobs 1 --set start=new/run
    run experiment.toml --jobs 1 --set start=RUN/
""")

COMMANDS = _lines("""
    run experiment.toml --jobs 1 --out new --seeds 0,1 --engine loop --ranks 1 --set rounds=1 --set train.lr=0.1
    run experiment.toml --jobs 1
    resume out --jobs 1 --ranks 1
    report out --out page.html
    compare out
    compare out --sites
    inspect out
    list
    list methods
    list fedmix
    list objective
    new fedmix digits
    new fedavg mnist5k
    data show experiment.toml --out split.png --set partition.clients=2
    channel experiment.toml --samples 10,50 --set channel=wireless
    points out --epochs 1 --lr 0.1 --batch-size 2 --vae-epochs 0 --out points
    boundaries out --out boundaries.png
    attack out/fedavg-seed0 --round 0 --client 0 --attack invgrad --images 1 --iterations 1 --restarts 1
    attack out/fedavg-seed0 --round 1 --client 1 --attacker plain --steps 1 --iterations 1 --images 1
    switches out --out switches
    leaks out --out leaks
    privacy samples experiment.toml --lambdas 0.1,0.2 --samples 2 --devices 2 --repeats 1
    privacy xor experiment.toml --blended 1,2 --repeats 1 --out pictures --json xor.json
    reproduce --list
    reproduce fedmix/table-1 --scale smoke --only fedavg --jobs 1 --seeds 0
    federation app experiment.toml --out app --folder run --min-sites 2 --deadline 5
    federation up experiment.toml --sites 2 --deadline 5 --out trial
    site init site.toml --data tiny.npz --min-mean 3
    site check site.toml
    site audit site.toml --last 3
    --version
""")


def _command(rng: Random, folder: Path, words: list[str], run: Path | None = None) -> Case:
    """A command on a run's folder, which the words name RUN."""
    words = [word.replace("RUN", str(run)) for word in words] if run else words
    return command(folder, *words, report=rng.random() < 0.1)


def run_directories(rng: Random, folder: Path, real: Path) -> Case:
    """A run whose files are changed, read by a command."""
    shutil.copytree(real / "runs" / rng.choice([*RUNS, "fedavg", "fedavg"]), folder / "out")
    shutil.copy(real / "runs" / "tiny.npz", folder)
    runs = sorted(path.parent for path in (folder / "out").rglob("config.toml"))
    for run in runs:
        # A run names its data by an absolute path.
        text = (run / "config.toml").read_text().replace(str(real / "runs"), str(folder))
        (run / "config.toml").write_text(text)
    files = [run / file for run in runs for file in RUN_FILES] + [folder / "out" / "study.json"]
    for path in rng.sample([path for path in files if path.is_file()], rng.choice((1, 1, 1, 2))):
        if rng.random() < 0.08:
            spoil_path(rng, path)
        else:
            change = mutations.of_bytes if rng.random() < 0.25 else CHANGES[path.suffix]
            path.write_bytes(change(rng, path.read_bytes()))
    run = rng.choice([folder / "out", *runs]).relative_to(folder)
    return _command(rng, folder, rng.choice(RUN_COMMANDS), run)


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
    others = ("weights/x", "client/0/weights/x", "client/-1/x", "client/x", "x", "owner")
    with contextlib.suppress(TypeError, ValueError, KeyError):  # KeyError: the format has no complex numbers
        array = np.ascontiguousarray(mutations.of_array(rng, tensors.pop(name).numpy()))
        tensors[rng.choice((name, name, name, *others))] = torch.from_numpy(array)
        return save(tensors, metadata)
    return raw


CHANGES = {
    ".json": changed_json,
    ".jsonl": changed_lines,
    ".toml": changed_toml,
    ".safetensors": _changed_checkpoint,
}


def paths(rng: Random, folder: Path, real: Path) -> Case:
    """A command that is given, in place of a file or folder, something else, or that may not read or write there."""
    run = finished_run(folder, real)
    shutil.copytree(real / "data" / "pictures", folder / "pictures")
    inside = [path for path in folder.rglob("*") if path.is_file()]
    target = rng.choice([*inside, folder / "out", run, folder / "pictures", folder / "pictures" / "a", folder / "new"])
    if rng.random() < 0.7 or not target.exists():
        spoil_path(rng, target)
    else:
        target.chmod(rng.choice((0, 0o111, 0o444, 0o500)))
    return _command(rng, folder, rng.choice(PATH_COMMANDS), run.relative_to(folder))


def command_lines(rng: Random, folder: Path, real: Path) -> Case:
    """A valid command with changed words."""
    finished_run(folder, real)
    return _command(rng, folder, mutations.of_words(rng, rng.choice([*COMMANDS, []])))
