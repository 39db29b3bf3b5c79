"""Fed-AugMix's Table II in small: what InvGrad rebuilds of MNIST by severity, from untrained and trained models.

As in the paper: LeNet-5, 100 clients by Dirichlet(0.1), a tenth of them a round, a quarter of each client's samples
held out, batches of 4 and 5 local epochs; one batch of 4 and 5 local steps are attacked through the weight update, with
labels known, signed Adam at 0.1 and total variation 1e-6. Smaller than there: 5,000 digits of MNIST in place of 70,000,
300 iterations in place of 2,500, two clients (eight images) in place of 100, severities 0, 2, 6 and 10, and a "trained"
model is one after 30 rounds. The paper gives no learning rate (0.05 here), and does not say what its attacker knows of
the augmentation, so that at severity 6 each update is attacked three times, at the others once (plain):

    plain      the attacker minimises as if the loss were cross-entropy alone
    guesses    it knows the loss, and draws the augmentation's numbers itself
    knows      it knows the loss and the client's own numbers: what the randomness protects, is seen beside this

Severity 0 is plain FedAvg, for which the three are one.

    python evidence/augmix-attack.py          what is made already is kept, so that it can be stopped and gone on with

Runs and attacks are kept in runs/evidence/augmix-attack, results are written to evidence/results/augmix-attack.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.analysis.attacks.outcome import TABLE, attack_run
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.experiment.config import resolve
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "runs" / "evidence" / "augmix-attack"
RESULTS = HERE / "results" / "augmix-attack.json"

SEVERITIES, STAGES, CLIENTS = (0, 2, 6, 10), {"untrained": 0, "trained": 30}, 2
CONTROLLED = (6,)
ATTACK: dict[str, Any] = {"images": 4, "steps": 5, "iterations": 300}
ATTACKERS = ("plain", "guesses", "knows")
EXPERIMENT: dict[str, Any] = {
    "data": "mnist5k",
    "partition": {"name": "dirichlet", "clients": 100, "alpha": 0.1},
    "holdout": 0.25,
    "model": "lenet5",
    "train": {"cohort": 10, "epochs": 5, "batch_size": 4, "lr": 0.05},
    "rounds": max(STAGES.values()),
    "engine": "loop",
}


def attacks() -> Iterator[tuple[str, int, str]]:
    """Stage, severity and attacker of each attack; those that the paper's table shows first."""
    for attacker in ATTACKERS:
        for severity in SEVERITIES if attacker == "plain" else CONTROLLED:
            for name in STAGES:
                yield name, severity, attacker


def run_of(severity: int) -> RunDirectory:
    """The finished run of a severity."""
    method = {"name": "fed-augmix", "objective": {"severity": float(severity)}}
    path = FOLDER / f"s{severity}"
    if RunDirectory.is_run(path) and RunDirectory(path).status()["state"] == "done":
        return RunDirectory(path)
    api.run(resolve({**EXPERIMENT, "name": f"augmix-s{severity}", "method": method}), path, resume=True)
    return RunDirectory(path)


def victims(moment: RoundSnapshot) -> list[int]:
    """The first clients that hold a batch; the same for all severities, since the split is."""
    return np.flatnonzero(moment.task.sizes >= ATTACK["images"])[:CLIENTS].tolist()


def attacked(moment: RoundSnapshot, client: int, attacker: str) -> dict[str, Any]:
    """One attack's table: the one that is kept, or a new one's."""
    kept = FOLDER / "attacks" / moment.run.path.name / f"{attacker}-round{moment.round}-client{client}"
    if not (kept / TABLE).is_file():
        made = attack_run(moment, moment.round, client, attacker=attacker, **ATTACK)  # type: ignore[arg-type]
        if made.rebuilt.stopped:
            raise KeyboardInterrupt
        made.write(kept)
    table: dict[str, Any] = json.loads((kept / TABLE).read_text(encoding="utf-8"))
    return table


def row_of(stage: str, severity: int, attacker: str, tables: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the clients, with the standard error of the mean; PSNR is never infinite here."""
    row: dict[str, Any] = {"stage": stage, "severity": severity, "attacker": attacker}
    for measure in ("mse", "psnr", "ssim", "cost"):
        values = np.array([table[measure] for table in tables])
        row[measure] = round(float(values.mean()), 5)
        row[f"{measure}_error"] = round(float(values.std(ddof=1) / np.sqrt(len(values))), 5)
    return row | {"clients": [table["client"] for table in tables]}


def main() -> None:
    """Train, attack, and write the results."""
    torch.set_num_threads(1)
    runs = {severity: run_of(severity) for severity in SEVERITIES}
    moments: dict[tuple[int, int], RoundSnapshot] = {}
    rows = []
    for stage, severity, attacker in attacks():
        place = (severity, STAGES[stage])
        moment = moments.get(place) or RoundSnapshot.of(runs[severity], STAGES[stage])
        moments[place] = moment
        tables = [attacked(moment, client, attacker) for client in victims(moment)]
        rows.append(row_of(stage, severity, attacker, tables))
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
        write(runs, rows)


def write(runs: dict[int, RunDirectory], rows: list[dict[str, Any]]) -> None:
    """Write the results: the rows that are made so far."""
    facts = runs[0].facts()
    result = {
        "command": "python evidence/augmix-attack.py",
        "versions": facts["versions"],
        "data": {k: v for k, v in facts["data"].items() if k != "source"},
        "experiment": EXPERIMENT,
        "attack": ATTACK,
        "accuracy": {severity: round(run.metrics()[-1]["accuracy"], 5) for severity, run in runs.items()},
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
