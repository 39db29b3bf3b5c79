"""Remake the committed results behind docs/results/ and docs/reproductions/.

    make evidence    or    python evidence/run.py [NAME ...] [--scale SCALE] [--only ROW_OR_COLUMN ...] [--seeds S,...]
    python evidence/run.py --deciding [NAME ...]
    python evidence/run.py --judge

A NAME is a study of this file (``fedmix-search``) or an item of a paper (``fedmix/table-1``). Without names, every
study runs, and then every item with a committed result. The options apply to items that are named. With --deciding,
the runs of evidence/deciding.toml are made (or those named), which would decide what is open; they take hours to days.
With --judge nothing is run: every item's claims are judged again on its committed numbers.

Runs lie in runs/evidence/NAME (studies) and runs/reproductions (items); runs that were interrupted are resumed. Results
go to evidence/results/studies/NAME.json and evidence/results/PAPER/ITEM-SCALE.json, pictures to docs/figures. Then
``python evidence/pages.py`` rewrites the tables of the pages. Studies whose data are not at hand are left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import alignment
import inversion
import map_attacks
import mix2fld

from fedblend.core.record import RoundRecord
from fedblend.papers import result as paper_result
from fedblend.papers.items import Scale
from fedblend.papers.plan import plan_item
from fedblend.papers.result import paper_numbers
from fedblend.report.guarantees import run_statements
from fedblend.runs.api import last_folder
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import read
from fedblend.runs.summary import costs

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "evidence" / "results"
FIGURES = ROOT / "docs" / "figures"
RUNS = ROOT / "runs" / "evidence"
DECIDING = ROOT / "evidence" / "deciding.toml"
REPRODUCTIONS = "runs/reproductions"
FEDBLEND = str(Path(sys.executable).with_name("fedblend"))

Table = dict[str, Any]

LOOP = ["--set", "engine=loop"]
"""The engine of the committed results. With another engine the numbers differ in the last bits."""
MNIST = ["--set", "data.folder=$FEDBLEND_DATA/MNIST/raw"]
FEMNIST = ["--set", "data.path=$FEDBLEND_DATA/femnist.npz"]
AS_FEMNIST = [
    "--set", "data={name='npz', path='$FEDBLEND_DATA/femnist.npz'}", "--set", "partition={name='natural'}",
    "--set", "train.batch_size=10", "--set", "rounds=60",
]  # fmt: skip
HEART = ["--set", "data.folder=$FEDBLEND_DATA/heart-disease"]
HAR = ["--set", "data.path=$FEDBLEND_DATA/uci-har.npz"]
CIFAR10 = ["--set", "data.folder=$FEDBLEND_DATA/cifar-10-batches-bin"]
AS_CIFAR10 = ["--set", "data={name='cifar10', folder='$FEDBLEND_DATA/cifar-10-batches-bin'}"]
BLENDS = ["--methods", "fedprox,localmix,naivemix,fedmix-checked,virtual-means,server-means"]
"""Methods of the map: the candidates of ``advise`` but ``fed-augmix`` and ``aggenhance``, which take longest."""
CHECKED = ["--methods", "fedmix-checked"]
"""FedMix with a check; the studies of the map have an earlier form of it."""
RELATIVES = ["--methods", "server-means,vhl,virtual-seeds,ccvr,flea"]
MORE_RELATIVES = ["--methods", "fedfa,statmix,virtual-xor,shared-set", "--set", "unsafe=true"]
"""Relatives that came later; ``shared-set`` shares raw samples."""
MATCHED = ["--methods", "server-matched"]
"""Clients make synthetic samples once; ``feddm``, whose 100 clients make new ones in each round, takes too long."""
REST = ["--methods", "feddyn,fedlc,aggenhance,fed-augmix"]
"""The two strongest baselines (docs/results/baselines.md), and the blends that take longest."""
EVERY_BLEND = "fedprox,localmix,naivemix,fedmix-checked,virtual-means,server-means,fed-augmix,aggenhance,feddyn,fedlc"
COMBINED = [
    "--set",
    "methods=['fedavg', {name='fedlc', label='fedlc, aggenhance', server_step='aggenhance'}, "
    "{name='server-means', label='fedlc, server-means', objective='fedlc'}]",
]
"""Two parts that help where clients have few classes, in one method: a baseline's loss, and training at the server."""
PERSONAL = ["--set", "evaluate_model=each", "--set", "methods=['ditto', 'fedper', 'fedrep', 'pfedme', 'fedproto']"]
GRID = [
    "--set",
    "tune={search='grid', trials=6, halving=true, fields={'train.lr'=[0.01, 0.02, 0.03, 0.05, 0.1, 0.2], "
    "'method.terms.proximal.mu'=[0.001, 0.01, 0.1, 1.0], 'method.terms.feddyn.alpha'=[0.001, 0.01, 0.1], "
    "'method.terms.moon.mu'=[0.1, 1.0, 5.0], 'method.terms.fedntd.beta'=[0.3, 1.0], "
    "'method.objective.tau'=[0.1, 0.5, 1.0], 'method.objective.alpha'=[0.0, 0.5, 0.9], "
    "'method.server_step.lr'=[0.003, 0.01, 0.03, 0.1, 0.3, 1.0]}}",
]
"""The grid of baselines-cifar10.toml, for baselines.toml."""
HALF = ["--set", "partition.alpha=0.5"]
ROLES = [
    "--set", "rounds=20", "--set", "eval_every=5", "--set", "data.context=40", "--set", "train.cohort=5",
    "--set", "train.epochs=1", "--set", "holdout=0.2", "--set", "validation={clients=0.1}",
    "--set", "tune={search='grid', halving=true, fields={'train.lr'=[1.0, 2.0, 4.0, 8.0]}}",
]  # fmt: skip
"""Shakespeare's roles in the map: shorter contexts and rounds, and as many learning rates as elsewhere."""
TWO_CLASSES = ["--set", "partition={name='classes', clients=100, classes_per_client=2, samples=500}"]

STUDIES: dict[str, list[str]] = {
    "fashion-mnist": ["run", "examples/fashion-mnist.toml"],
    "femnist": ["run", "examples/femnist.toml", *FEMNIST],
    "femnist-checked": ["run", "evidence/studies/femnist-checked.toml", *FEMNIST],
    "femnist-settings": ["run", "evidence/studies/femnist-settings.toml", *FEMNIST],
    "femnist-momentum": ["run", "evidence/studies/femnist-momentum.toml", *FEMNIST],
    "femnist-second": ["run", "evidence/studies/femnist-second.toml", *FEMNIST],
    "shakespeare": ["run", "examples/shakespeare.toml"],
    "fedmix-search": ["run", "evidence/studies/fedmix-search.toml"],
    "fedmix-scale": ["run", "evidence/studies/fedmix-scale.toml"],
    "fedmix-lr": ["run", "evidence/studies/fedmix-lr.toml"],
    "fedmix-cifar10": ["run", "evidence/studies/fedmix-cifar10.toml", *CIFAR10],
    "aggenhance-mnist5k": ["run", "evidence/studies/aggenhance-mnist5k.toml"],
    "aggenhance-fashion": ["run", "evidence/studies/aggenhance-fashion.toml"],
    "robustness": ["run", "evidence/studies/robustness.toml"],
    "heart": ["run", "examples/heart.toml", *HEART],
    "har": ["run", "examples/har.toml", *HAR],
    "private": ["run", "examples/private.toml"],
    "private-means": ["run", "evidence/studies/private-means.toml"],
    "private-base": ["run", "evidence/studies/private-base.toml"],
    "mix2fld-small": ["run", "evidence/studies/mix2fld-small.toml"],
    "mix2fld-figure-2": ["run", "evidence/studies/mix2fld-figure-2.toml", *MNIST],
    "mix2fld-figure-3": ["run", "evidence/studies/mix2fld-figure-3.toml", *MNIST],
    "xormixfl-mnist5k": ["run", "evidence/studies/xormixfl-mnist5k.toml", "--seeds", "0", *LOOP],
    "xormixfl-offset": ["run", "evidence/studies/xormixfl-offset.toml", *LOOP],
    "xormixfl-dummies": ["run", "evidence/studies/xormixfl-dummies.toml", "--seeds", "0", *MNIST, *LOOP],
    "baselines-fashion-dirichlet": ["tune", "evidence/studies/baselines.toml", *GRID],
    "baselines-fashion-classes": ["tune", "evidence/studies/baselines.toml", *GRID, *TWO_CLASSES],
    "baselines-cifar10-dirichlet": ["tune", "evidence/studies/baselines-cifar10.toml", *CIFAR10],
    "baselines-cifar10-classes": ["tune", "evidence/studies/baselines-cifar10.toml", *CIFAR10, *TWO_CLASSES],
    "personal-fashion-dirichlet": ["tune", "evidence/studies/baselines.toml", *PERSONAL],
    "personal-fashion-classes": ["tune", "evidence/studies/baselines.toml", *PERSONAL, *TWO_CLASSES],
    "personal-cifar10-dirichlet": ["tune", "evidence/studies/baselines-cifar10.toml", *PERSONAL, *CIFAR10],
    "personal-cifar10-classes": ["tune", "evidence/studies/baselines-cifar10.toml", *PERSONAL, *CIFAR10, *TWO_CLASSES],
    "map-fashion-classes": ["advise", "evidence/studies/map.toml", *BLENDS, *TWO_CLASSES],
    "map-fashion-dirichlet": ["advise", "evidence/studies/map.toml", *BLENDS],
    "map-fashion-dirichlet-half": ["advise", "evidence/studies/map.toml", *BLENDS, *HALF],
    "map-cifar10-classes": ["advise", "evidence/studies/map.toml", *BLENDS, *AS_CIFAR10, *TWO_CLASSES],
    "map-cifar10-dirichlet": ["advise", "evidence/studies/map.toml", *BLENDS, *AS_CIFAR10],
    "map-cifar10-dirichlet-half": ["advise", "evidence/studies/map.toml", *BLENDS, *AS_CIFAR10, *HALF],
    "map-femnist": ["advise", "evidence/studies/map.toml", *BLENDS, *AS_FEMNIST],
    "rates-fashion-classes": ["run", "evidence/studies/rates.toml", *TWO_CLASSES],
    "rates-fashion-dirichlet": ["run", "evidence/studies/rates.toml"],
    "rates-fashion-dirichlet-half": ["run", "evidence/studies/rates.toml", *HALF],
    "rates-cifar10-classes": ["run", "evidence/studies/rates.toml", *AS_CIFAR10, *TWO_CLASSES],
    "rates-cifar10-dirichlet": ["run", "evidence/studies/rates.toml", *AS_CIFAR10],
    "rates-cifar10-dirichlet-half": ["run", "evidence/studies/rates.toml", *AS_CIFAR10, *HALF],
    "rates-femnist": ["run", "evidence/studies/rates.toml", *AS_FEMNIST],
    "relatives-fashion-classes": ["advise", "evidence/studies/map.toml", *RELATIVES, *TWO_CLASSES],
    "relatives-fashion-dirichlet": ["advise", "evidence/studies/map.toml", *RELATIVES],
    "relatives-cifar10-classes": ["advise", "evidence/studies/map.toml", *RELATIVES, *AS_CIFAR10, *TWO_CLASSES],
    "relatives-cifar10-dirichlet": ["advise", "evidence/studies/map.toml", *RELATIVES, *AS_CIFAR10],
    "more-fashion-classes": ["advise", "evidence/studies/map.toml", *MORE_RELATIVES, *TWO_CLASSES],
    "matched-fashion-classes": ["advise", "evidence/studies/map.toml", *MATCHED, *TWO_CLASSES],
    "checked-fashion-classes": ["advise", "evidence/studies/map.toml", *CHECKED, *TWO_CLASSES],
    "checked-fashion-dirichlet": ["advise", "evidence/studies/map.toml", *CHECKED],
    "checked-cifar10-classes": ["advise", "evidence/studies/map.toml", *CHECKED, *AS_CIFAR10, *TWO_CLASSES],
    "checked-heart": ["advise", "examples/heart.toml", *CHECKED, *HEART],
    "rest-fashion-classes": ["advise", "evidence/studies/map.toml", *REST, *TWO_CLASSES],
    "rest-fashion-dirichlet": ["advise", "evidence/studies/map.toml", *REST],
    "rest-fashion-dirichlet-half": ["advise", "evidence/studies/map.toml", *REST, *HALF],
    "rest-cifar10-classes": ["advise", "evidence/studies/map.toml", *REST, *AS_CIFAR10, *TWO_CLASSES],
    "rest-cifar10-dirichlet": ["advise", "evidence/studies/map.toml", *REST, *AS_CIFAR10],
    "rest-cifar10-dirichlet-half": ["advise", "evidence/studies/map.toml", *REST, *AS_CIFAR10, *HALF],
    "rest-femnist": ["advise", "evidence/studies/map.toml", *REST, *AS_FEMNIST],
    "rest-har": ["advise", "examples/har.toml", *REST, *HAR],
    "rest-shakespeare": ["advise", "examples/shakespeare.toml", *REST, *ROLES],
    "long-fashion-classes": ["run", "evidence/studies/long.toml"],
    "long-cifar10-classes": ["run", "evidence/studies/long.toml", *AS_CIFAR10],
    "long-fedlc-cifar10-classes": ["run", "evidence/studies/long.toml", "--set", "methods=['fedlc']", *AS_CIFAR10],
    "long-aggenhance-cifar10-classes": [
        "run", "evidence/studies/long.toml", "--set", "methods=['aggenhance']", "--set", "train.lr=0.03", *AS_CIFAR10,
    ],
    "combined-cifar10-classes": ["tune", "evidence/studies/map.toml", *COMBINED, *AS_CIFAR10, *TWO_CLASSES],
    "map-heart": ["advise", "examples/heart.toml", "--methods", EVERY_BLEND, *HEART],
    "map-har": ["advise", "examples/har.toml", *BLENDS, *HAR],
    "map-shakespeare": ["advise", "examples/shakespeare.toml", *BLENDS, *ROLES],
    "warm-start": ["run", "examples/warm-start.toml"],
    "xormixfl-mnist": ["run", "evidence/studies/xormixfl-mnist.toml", *MNIST, *LOOP],
    "xormixfl-distance": [
        "paper", "xor", "evidence/studies/xormixfl-distance.toml", *MNIST, "--blended", "1,2,3,4,5", "--mds",
    ],
    "xormixfl-offset-leaks": ["paper", "xor", "evidence/studies/xormixfl-offset.toml"],
}  # fmt: skip
"""Studies that a fedblend command makes: its arguments by the study's name."""

MAY_FAIL = {"robustness", *(name for name in STUDIES if name.startswith("rates-"))}
"""Studies in which some runs are expected to fail."""


def main() -> None:
    """Remake the studies and items that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--scale", default="laptop", choices=("laptop", "paper"), help="of the items that are named")
    parser.add_argument(
        "--only", nargs="*", action="extend", default=[], help="rows or columns of the items (repeatable)"
    )
    parser.add_argument("--seeds", help="of the items, such as 0,1")
    parser.add_argument("--deciding", action="store_true", help="make the runs of evidence/deciding.toml")
    parser.add_argument("--judge", action="store_true", help="judge all claims again, without runs")
    given = parser.parse_args()
    if given.judge:
        same = _numbers_by_origin()
        for path in (path for path in sorted(RESULTS.glob("*/*.json")) if path.parent.name != "studies"):
            write_result(path, judged_again(path, same), json.loads(path.read_text())["commit"])
        return
    if given.deciding:
        make_deciding(given.names)
        return
    studies = [name for name in given.names if "/" not in name]
    items = [name for name in given.names if "/" in name]
    every_study = [*STUDIES, *FUNCTIONS]
    unknown = [name for name in studies if name not in every_study]
    if unknown:
        raise SystemExit(f"unknown study {unknown[0]!r}; valid: {', '.join(every_study)}, or an item PAPER/ITEM")
    options = ["--seeds", given.seeds] if given.seeds else []
    options += [option for line in given.only for option in ("--only", line)]
    commands = [["reproduce", name, "--scale", given.scale, *options] for name in items]
    if not given.names:
        studies, commands = every_study, committed_commands()
    for name in studies:
        remake_study(name)
    for command in commands:
        remake_item(command)


# Deciding runs ----------------------------------------------------------------------------------------------


def deciding_runs() -> dict[str, Table]:
    """The runs of evidence/deciding.toml by name, those with the fewest hours first."""
    runs = tomllib.loads(DECIDING.read_text(encoding="utf-8"))
    return dict(sorted(runs.items(), key=lambda one: one[1]["hours"]))


def deciding_command(run: Table) -> list[str]:
    """The arguments of ``fedblend`` that make a deciding run, or resume it."""
    options = [option for line in run.get("only", ()) for option in ("--only", line)]
    seeds = ",".join(map(str, run["seeds"]))
    return ["reproduce", run["item"], "--scale", run["scale"], "--seeds", seeds, *options]


def make_deciding(names: Sequence[str]) -> None:
    """Make the deciding runs with these names, or all; finished runs are not made again."""
    runs = deciding_runs()
    unknown = [name for name in names if name not in runs]
    if unknown:
        raise SystemExit(f"unknown deciding run {unknown[0]!r}; valid: {', '.join(runs)}")
    chosen = {name: run for name, run in runs.items() if not names or name in names}
    for name, run in chosen.items():
        on_gpu = f", or {run['gpu']:g} h on an H100" if "gpu" in run else ""
        print(f"{name}: about {run['hours']:g} h on two cores{on_gpu}: {run['decides']}", flush=True)
    for run in chosen.values():
        remake_item(deciding_command(run))


# Studies ----------------------------------------------------------------------------------------------------


def remake_study(name: str) -> None:
    """Run a study and write its result; leave it out, with the reason, where its data are not at hand."""
    arguments = STUDIES.get(name, [])
    folder = os.environ.get("FEDBLEND_DATA", "")
    if not folder and (name in NEED_DATA or any("$FEDBLEND_DATA" in word for word in arguments)):
        print(f"{name}: left out, since FEDBLEND_DATA names no folder with its data")
        return
    path = RESULTS / "studies" / f"{name}.json"
    if name in FUNCTIONS:
        FUNCTIONS[name](path)
        result = json.loads(path.read_text())
    else:
        command = [FEDBLEND, *(word.replace("$FEDBLEND_DATA", folder) for word in arguments)]
        shown = shell_line(["fedblend", *arguments])
        if arguments[0] == "run":
            command += ["--out", str(RUNS / name), "--resume"]
            subprocess.run(command, cwd=ROOT, check=name not in MAY_FAIL)
            result = study_result(RUNS / name, shown)
            if name in ROW_CHANGES:
                result["runs"] = ROW_CHANGES[name](RUNS / name, result["runs"])
        elif arguments[0] == "tune":
            result = tuned_result(RUNS / name, command, shown)
        elif arguments[0] == "advise":
            result = advised_result(RUNS / name, command, shown)
        else:
            subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=True)
            result = {"command": shown, **json.loads(path.read_text())}
    write_result(path, result)
    print(f"{name}: result written to {path.relative_to(ROOT)}")


def advised_result(folder: Path, command: list[str], shown: str) -> Table:
    """Ask for advice: a study's result, and the advice."""
    subprocess.run([*command, "--out", str(folder), "--resume"], cwd=ROOT, check=True)
    advice = json.loads((folder / "advice.json").read_text(encoding="utf-8"))
    # A search that was given more values has the runs of its last best values in a folder of their own.
    return {**study_result(last_folder(folder / "runs"), shown), "advice": advice}


def tuned_result(folder: Path, command: list[str], shown: str) -> Table:
    """Tune a study's methods, run each with its best values and all seeds: a study's result, and what tuning found."""
    search = folder / "search"
    subprocess.run([*command, "--out", str(search), "--resume"], cwd=ROOT, check=True)
    best = [FEDBLEND, "run", str(search / "best.toml"), "--out", str(folder / "best"), "--resume"]
    # A learning rate that was best for one seed may diverge with another; the result says which runs did.
    subprocess.run(best, cwd=ROOT, check=False)
    with (search / "trials.csv").open(encoding="utf-8", newline="") as lines:
        trials = [
            {
                "method": row["method"],
                "values": json.loads(row["values"]),
                "score": float(row["score"]) if row["score"] else None,
                "rounds": int(row["rounds"]),
            }
            for row in csv.DictReader(lines)
        ]
    return {**study_result(folder / "best", shown), "trials": trials}


def shell_line(words: Sequence[str]) -> str:
    """Quote words as one shell line, in which the shell replaces variables such as $FEDBLEND_DATA."""
    return " ".join(_double_quoted(word) if "$" in word else shlex.quote(word) for word in words)


def _double_quoted(word: str) -> str:
    """A word in double quotes: the shell replaces variables; backslashes, quotes and backticks are escaped."""
    return '"' + re.sub(r'([\\"`])', r"\\\1", word) + '"'


def study_result(folder: Path, command: str) -> Table:
    """A study's result: the command, versions, data checksums, and a row for each finished run and each failed one."""
    everything = find_runs([folder])
    runs = [run for run in everything if read(run).finished]
    failed = [outcome for outcome in map(read, everything) if outcome.state == "failed"]
    facts = runs[0].facts()
    return {
        "command": command,
        "versions": facts["versions"],
        "data": {key: value for key, value in facts["data"].items() if key != "source"},
        "scale": facts["scale"],
        "clients": facts["clients"],
        "runs": [run_row(run) for run in runs],
        "failed": [
            {"method": o.label, "seed": o.seed, "failed": o.round + 1, "reason": o.status.get("reason")} for o in failed
        ],
    }


def run_row(run: RunDirectory) -> Table:
    """One run: accuracy and loss of each evaluated round, bytes and seconds by kind, peak memory."""
    outcome = read(run)
    total: dict[str, float] = defaultdict(float)
    for record in outcome.records:
        for name, number in costs(record).items():
            total[name] += number
    evaluated = outcome.evaluated
    row: Table = {
        "method": outcome.label,
        "seed": outcome.seed,
        "rounds": [r.round for r in evaluated],
        "accuracy": [round(r.accuracy, 5) for r in evaluated if r.accuracy is not None],
        # A run that diverges has losses that JSON cannot hold.
        "loss": [round(r.loss, 5) if math.isfinite(r.loss) else None for r in evaluated if r.loss is not None],
        "costs": {name: round(number, 1) for name, number in total.items()},
        "peak_memory": max(r.machine["peak_memory"] for r in outcome.records),
        "refused": sum(len(r.refused or ()) for r in outcome.records),
    }
    guarantees = {one.what: one.by_round for one in run_statements(outcome)}
    if guarantees:
        row["epsilon"] = guarantees
    if evaluated and evaluated[-1].channel is not None:
        row["clock"] = _clock_seconds(outcome.records)
        row["air"] = _air_seconds(outcome.records)
        row["lost"] = sum(len(r.lost or ()) for r in outcome.records)
    changes = [r.change for r in outcome.records if r.converged is not None]
    if changes:
        row["change"] = [change and round(change, 5) for change in changes]
    if shares := [
        round(r.measured["taylor_failed"], 5) for r in outcome.records if "taylor_failed" in (r.measured or {})
    ]:
        row["taylor_failed"] = shares
    last = evaluated[-1].as_dict() if evaluated else {}
    return row | {name: last[name] for name in ("clients", "sites", "per_class") if name in last}


def _clock_seconds(records: list[RoundRecord]) -> list[float]:
    """Seconds from the start to each evaluated round, transmissions and computing together."""
    totals = accumulate(costs(record)["clock"] for record in records)
    return [round(total, 4) for total, record in zip(totals, records, strict=True) if record.loss is not None]


def _air_seconds(records: list[RoundRecord]) -> list[float]:
    """Seconds of transmissions from the start to each evaluated round."""
    totals = accumulate(sum((record.channel or {}).values()) for record in records)
    return [round(total, 4) for total, record in zip(totals, records, strict=True) if record.loss is not None]


ROW_CHANGES: dict[str, Callable[[Path, list[Table]], list[Table]]] = {
    "mix2fld-figure-2": mix2fld.with_symmetric_rows,
    "mix2fld-figure-3": mix2fld.with_device_accuracies,
}
"""Studies whose rows are extended after the runs."""

FUNCTIONS: dict[str, Callable[[Path], None]] = {
    "alignment": alignment.write,
    "augmix-attack": lambda path: inversion.run_augmix("augmix-attack", path, run_row),
    "augmix-mnist": lambda path: inversion.run_augmix("augmix-mnist", path, run_row),
    "invgrad": inversion.run_single_updates,
    "map-attacks": map_attacks.run_map_attacks,
    "mix2fld-privacy": mix2fld.write_sample_privacy,
}
"""Studies that no fedblend command makes. Attack studies resume; the others start again."""

NEED_DATA = {"augmix-mnist", "invgrad", "map-attacks", "mix2fld-privacy"}
"""Studies of :data:`FUNCTIONS` that read from FEDBLEND_DATA."""


# Items of the papers ------------------------------------------------------------------------------------------


def committed_commands() -> list[list[str]]:
    """The arguments of ``fedblend`` that each committed item's result names."""
    results = [
        json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json")) if path.parent.name != "studies"
    ]
    return [shlex.split(result["command"])[1:] for result in results]


def remake_item(command: list[str]) -> None:
    """Run an item by ``fedblend reproduce`` and copy its result to the committed ones.

    Numbers of the committed result that were made in the same way stay, where their runs are not on this machine. If a
    number was made in another way and is not made anew, the committed result stays as it is. A run that failed, as one
    that diverges does, has no number; the result names it.
    """
    item = command[1]
    scale = cast(Scale, command[command.index("--scale") + 1] if "--scale" in command else "paper")
    committed, folder = RESULTS / f"{item}-{scale}.json", ROOT / REPRODUCTIONS / item / scale
    _seed_result(item, scale, folder / "result.json")
    before = _written(folder / "result.json")
    status = _exit_status([FEDBLEND, *command, "--out", REPRODUCTIONS])
    if _written(folder / "result.json") != before:
        commit_result(committed, folder)
        print(f"{item}: result written to {committed.relative_to(ROOT)}")
    if status:
        raise SystemExit(status)


def judged_again(committed: Path, same: Mapping[str, Table]) -> Table:
    """A committed result with today's claims and paper's numbers, judged on the numbers that it has.

    Cells that are new in the paper's file get the numbers that other results have of the ``same`` experiment and
    measure (:func:`_numbers_by_origin`).
    """
    result: Table = json.loads(committed.read_text())
    plan = plan_item(result["item"], result["scale"], ())
    for name, empty in _empty_cells(result["item"], result["scale"]).items():
        cells = result["quantities"][name]["cells"]
        there = {(cell["row"], cell["column"]) for cell in cells}
        new = [cell | {"ours": same[cell["made_by"]]} for cell in empty["cells"] if same.get(cell["made_by"])]
        cells += [cell | {"paper_std": None} for cell in new if (cell["row"], cell["column"]) not in there]
        numbers = paper_numbers(plan.item, name)
        for cell in cells:
            cell["paper"] = paper_result.as_json(numbers.get((cell["row"], cell["column"])))
    measured = _measured(result)
    plan = plan.showing({key[1:3] for key in measured})
    result["rows"] = {cell.row: result["rows"].get(cell.row, plan.item.rows[cell.row].label) for cell in plan.cells}
    values: paper_result.Values = defaultdict(dict)
    for (name, row, column, seed), value in measured.items():
        values[name, row, column][int(seed.removeprefix("seed "))] = math.inf if value in ("never", "∞") else value
    return result | {"claims": paper_result.judged_claims(plan, values)}


def _written(path: Path) -> int | None:
    """When a file was written, in nanoseconds; ``None`` if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def _exit_status(command: list[str]) -> int:
    """Run a command and return its exit status. Ctrl-C is left to the command, which still writes its result."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _seed_result(item: str, scale: Scale, path: Path) -> None:
    """Write the result that an item's runs begin with: the one beside the runs, or else the committed one.

    Cells get the numbers that another committed item has of the same experiment and measure. Pictures of committed
    results are left out, since they are made from runs.
    """
    same = _numbers_by_origin()
    known = [one for one in (path, RESULTS / f"{item}-{scale}.json") if one.exists()]
    result = json.loads(known[0].read_text()) if known else {"quantities": _empty_cells(item, scale)}
    for quantity in result["quantities"].values():
        for cell in quantity["cells"]:
            own = cell["ours"] if path.exists() else {}
            numbers = same[cell["made_by"]] | cell["ours"]
            cell["ours"] = {seed: value for seed, value in numbers.items() if not str(value).endswith(".png")} | own
    if _measured(result):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))


def _numbers_by_origin() -> dict[str, Table]:
    """The numbers of all committed items by seed, by what made them: experiment and measure."""
    same: dict[str, Table] = defaultdict(dict)
    for path in sorted(RESULTS.glob("*/*.json")):
        for quantity in json.loads(path.read_text()).get("quantities", {}).values():
            for cell in quantity["cells"]:
                same[cell["made_by"]] |= cell["ours"]
    return same


def _empty_cells(item: str, scale: Scale) -> dict[str, Table]:
    """The quantities of an item, with cells that name their experiments."""
    plan = plan_item(item, scale)
    return {
        name: {
            "cells": [
                {"row": cell.row, "column": cell.column, "made_by": plan.provenance(name, cell), "ours": {}}
                for cell in plan.cells
                if (name, cell.row, cell.column) in plan.measures
            ]
        }
        for name in plan.item.quantities
    }


def _measured(result: Table) -> dict[tuple[str, ...], Any]:
    """The numbers and pictures of a result, by quantity, row, column and seed."""
    return {
        (name, cell["row"], cell["column"], f"seed {seed}"): value
        for name, quantity in result["quantities"].items()
        for cell in quantity["cells"]
        for seed, value in cell["ours"].items()
    }


def commit_result(committed: Path, folder: Path) -> None:
    """Copy a result to the committed ones, and its pictures to docs/figures.

    Raises :class:`SystemExit` if the committed result has numbers that this one has not.
    """
    result = json.loads((folder / "result.json").read_text())
    before = json.loads(committed.read_text()) if committed.exists() else {"quantities": {}}
    old, new = _measured(before), _measured(result)
    lost = sorted(old.keys() - new.keys())
    if lost:
        raise SystemExit(
            f"{committed.relative_to(RESULTS)}: {len(lost)} of its numbers were made with other settings and are not "
            f"made anew, the first of {' '.join(lost[0])}; it is left as it is, and the new result is "
            f"{folder / 'result.json'}. Without --only and with all seeds every number is made anew."
        )
    name = "-".join(committed.with_suffix("").parts[-2:])
    for cell in (cell for quantity in result["quantities"].values() for cell in quantity["cells"]):
        for seed, value in cell["ours"].items():
            if isinstance(value, str) and value.endswith(".png"):
                picture = "-".join(part for part in (name, cell["row"], cell["column"], seed) if part) + ".png"
                shutil.copyfile(folder / value, FIGURES / picture)
                cell["ours"][seed] = f"figures/{picture}"
    write_result(committed, result, before.get("commit") if old == new else None)


# Writing ------------------------------------------------------------------------------------------------------


def write_result(path: Path, result: Table, commit: str | None = None) -> None:
    """Write a result as JSON with the commit of the code that made it, or another; lists of numbers are one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result | {"commit": commit or commit_of_code()}, indent=1)
    path.write_text(NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")


NUMBERS = re.compile(r"\[\s*(-?\d[^\[\]{}\":]*)\]")
"""A list in JSON that holds nothing but numbers."""


def commit_of_code() -> str:
    """The commit of the code that runs, with a + if the code has been changed since; empty outside of git."""
    code = ["fedblend", "evidence/*.py", "evidence/studies"]
    commit, changes = (
        subprocess.run(["git", *line], cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
        for line in (["rev-parse", "--short=8", "HEAD"], ["status", "--porcelain", "--", *code])
    )
    return f"{commit}{'+' * bool(changes)}"


if __name__ == "__main__":
    main()
