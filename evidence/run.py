"""The runs behind docs/results.md: run what is missing, go on where it was stopped, write results as data.

    make evidence            or            python evidence/run.py [NAME ...]

Runs are kept in runs/evidence/NAME, results are written to evidence/results/NAME.json. Studies whose data are not
at hand are left out, with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mix2fld

from fedblend.report.privacy import run_statements
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import read
from fedblend.runs.summary import costs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUNS = Path("runs/evidence")
DATA = os.environ.get("FEDBLEND_DATA", "")

LOOP = ["--set", "engine=loop"]
"""How these results were made; `auto` might choose another engine, whose numbers differ in the last bits."""

STUDIES: dict[str, list[str]] = {
    "fashion-mnist": ["examples/fashion-mnist.toml"],
    "femnist": ["examples/femnist.toml", "--set", "data.path=$FEDBLEND_DATA/femnist.npz"],
    "femnist-twice": ["evidence/femnist-twice.toml", "--set", "data.path=$FEDBLEND_DATA/femnist.npz"],
    "shakespeare": ["examples/shakespeare.toml"],
    "fedmix-search": ["evidence/fedmix-search.toml"],
    "fedmix-scale": ["evidence/fedmix-scale.toml"],
    "fedmix-lr": ["evidence/fedmix-lr.toml"],
    "fedmix-cifar10": ["evidence/fedmix-cifar10.toml", "--set", "data.folder=$FEDBLEND_DATA/cifar-10-batches-bin"],
    "aggenhance-mnist5k": ["evidence/aggenhance-mnist5k.toml"],
    "aggenhance-fashion": ["evidence/aggenhance-fashion.toml"],
    "robustness": ["evidence/robustness.toml"],
    "heart": ["examples/heart.toml", "--set", "data.folder=$FEDBLEND_DATA/heart-disease"],
    "har": ["examples/har.toml", "--set", "data.path=$FEDBLEND_DATA/uci-har.npz"],
    "private": ["examples/private.toml"],
    "private-means": ["evidence/private-means.toml"],
    "private-base": ["evidence/private-base.toml"],
    "mix2fld-small": ["evidence/mix2fld-small.toml"],
    "mix2fld-figure-2": ["evidence/mix2fld-figure-2.toml", "--set", "data.folder=$FEDBLEND_DATA/MNIST/raw"],
    "mix2fld-figure-3": ["evidence/mix2fld-figure-3.toml", "--set", "data.folder=$FEDBLEND_DATA/MNIST/raw"],
    "xormixfl-mnist5k": ["evidence/xormixfl-mnist5k.toml", "--seeds", "0", *LOOP],
    "xormixfl-offset": ["evidence/xormixfl-offset.toml", *LOOP],
    "xormixfl-dummies": [
        "evidence/xormixfl-dummies.toml", "--seeds", "0", "--set", "data.folder=$FEDBLEND_DATA/MNIST/raw", *LOOP,
    ],
    "warm-start": ["examples/warm-start.toml"],
    "xormixfl-mnist": ["evidence/xormixfl-mnist.toml", "--set", "data.folder=$FEDBLEND_DATA/MNIST/raw", *LOOP],
}  # fmt: skip
"""Arguments of ``fedblend run`` by the name of the study."""

MEASURES: dict[str, list[str]] = {
    "xormixfl-distance": [
        "evidence/xormixfl-distance.toml", "--set", "data.folder=$FEDBLEND_DATA/MNIST/raw",
        "--blended", "1,2,3,4,5", "--mds",
    ],
    "xormixfl-offset-leaks": ["evidence/xormixfl-offset.toml"],
}  # fmt: skip
"""Arguments of ``fedblend privacy xor`` by the name of its results."""

SCRIPTS = {
    "alignment": False,
    "augmix-attack": False,
    "augmix-mnist": True,
    "invgrad": True,
    "mix2fld-privacy": True,
}
"""Studies that are scripts of this folder and write their results themselves: whether they read from FEDBLEND_DATA.

Attacks keep what they have made; `alignment` and `mix2fld-privacy` begin anew each time.
"""

MAY_FAIL = {"robustness"}
"""Studies of which some runs are expected to break off."""


def main(names: list[str]) -> None:
    """Run the studies that are named, or all."""
    known = [*STUDIES, *MEASURES, *SCRIPTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown study {unknown[0]!r}; valid: {', '.join(known)}")
    for name in names or known:
        if name in SCRIPTS:
            _run_script(name)
            continue
        arguments = MEASURES[name] if name in MEASURES else STUDIES[name]
        if any("$FEDBLEND_DATA" in a for a in arguments) and not DATA:
            print(f"{name}: left out, since FEDBLEND_DATA names no folder with its data")
            continue
        if name in MEASURES:
            measured(name, arguments)
            continue
        folder = RUNS / name
        filled = [a.replace("$FEDBLEND_DATA", DATA) for a in arguments]
        command = [str(Path(sys.executable).with_name("fedblend")), "run", *filled, "--out", str(folder), "--resume"]
        # Runs that break down are results too: where an adversary wins, for one.
        subprocess.run(command, cwd=ROOT, check=name not in MAY_FAIL)
        results = HERE / "results" / f"{name}.json"
        results.parent.mkdir(exist_ok=True)
        shown = in_a_shell(["fedblend", "run", *arguments])
        told = results_of(ROOT / folder, shown)
        if name == "mix2fld-figure-2":
            told["runs"] += mix2fld.symmetric_rows(ROOT / folder, told["runs"])
        elif name == "mix2fld-figure-3":
            told["runs"] = mix2fld.device_rows(ROOT / folder, told["runs"])
        results.write_text(json.dumps(told, indent=1) + "\n")
        print(f"{name}: results written to {results.relative_to(ROOT)}")


def measured(name: str, arguments: list[str]) -> None:
    """Measure what seeds tell of raw samples, and keep it with the command that measured it."""
    results = HERE / "results" / f"{name}.json"
    command = [str(Path(sys.executable).with_name("fedblend")), "privacy", "xor"]
    filled = [a.replace("$FEDBLEND_DATA", DATA) for a in arguments]
    subprocess.run([*command, *filled, "--json", str(results)], cwd=ROOT, check=True)
    told = {"command": in_a_shell(["fedblend", "privacy", "xor", *arguments]), **json.loads(results.read_text())}
    results.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{name}: results written to {results.relative_to(ROOT)}")


def _run_script(name: str) -> None:
    """Run a study that is a script of its own, and writes its results itself."""
    if SCRIPTS[name] and not DATA:
        print(f"{name}: left out, since FEDBLEND_DATA names no folder with its data")
        return
    subprocess.run([sys.executable, HERE / f"{name}.py"], cwd=ROOT, check=True)


def in_a_shell(words: Sequence[str]) -> str:
    """One line that a shell takes for these words, with what a variable such as $FEDBLEND_DATA holds in its place."""
    return " ".join(_quoted(word) if "$" in word else shlex.quote(word) for word in words)


def _quoted(word: str) -> str:
    """In double quotes, where a shell reads variables; backslashes, quotes and backticks stand for themselves."""
    return '"' + re.sub(r'([\\"`])', r"\\\1", word) + '"'


def results_of(folder: Path, command: str) -> dict[str, Any]:
    """A study's results: each finished run's curve and costs, with the command, versions and data checksums.

    Of runs that failed, what broke them off and in which round.
    """
    everything = find_runs([folder])
    runs = [run for run in everything if read(run).finished]
    failed = [outcome for outcome in map(read, everything) if outcome.state == "failed"]
    facts = runs[0].facts()
    data = {k: v for k, v in facts["data"].items() if k != "source"}
    return {
        "command": command,
        "versions": facts["versions"],
        "data": data,
        "scale": facts["scale"],
        "clients": facts["clients"],
        "runs": [row_of(run) for run in runs],
        "failed": [
            {"method": o.label, "seed": o.seed, "failed": o.round + 1, "reason": o.status.get("reason")} for o in failed
        ],
    }


def row_of(run: RunDirectory) -> dict[str, Any]:
    """One run: accuracy and loss of each evaluated round, bytes and seconds by kind, peak memory."""
    outcome = read(run)
    total: dict[str, float] = defaultdict(float)
    for record in outcome.records:
        for name, number in costs(record).items():
            total[name] += number
    evaluated = outcome.evaluated
    row: dict[str, Any] = {
        "method": outcome.label,
        "seed": outcome.seed,
        "rounds": [r["round"] for r in evaluated],
        "accuracy": [round(r["accuracy"], 5) for r in evaluated if "accuracy" in r],
        "loss": [round(r["loss"], 5) for r in evaluated],
        "costs": {name: round(number, 1) for name, number in total.items()},
        "peak_memory": max(r["machine"]["peak_memory"] for r in outcome.records),
        "refused": sum(len(r.get("refused", [])) for r in outcome.records),
    }
    claims = {one.what: one.by_round for one in run_statements(outcome)}
    if claims:
        row["epsilon"] = claims
    if outcome.evaluated and "channel" in outcome.evaluated[-1]:
        row["clock"] = clock_of(outcome.records)
        row["air"] = mix2fld.air_of(outcome.records)
        row["lost"] = sum(len(r.get("lost", [])) for r in outcome.records)
    if any("change" in r for r in outcome.records):
        row["change"] = [r["change"] and round(r["change"], 5) for r in outcome.records if "change" in r]
    return row | {name: evaluated[-1][name] for name in ("clients", "sites", "per_class") if name in evaluated[-1]}


def clock_of(records: list[dict[str, Any]]) -> list[float]:
    """Seconds from the beginning to each evaluated round, on the air and in computing side by side."""
    total, times = 0.0, []
    for record in records:
        total += costs(record)["clock"]
        if "loss" in record:
            times.append(round(total, 4))
    return times


if __name__ == "__main__":
    main(sys.argv[1:])
