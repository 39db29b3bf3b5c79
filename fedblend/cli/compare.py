"""``fedblend compare``, ``report`` and ``inspect``: what each prints or writes about runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from fedblend import report
from fedblend.core.errors import listed
from fedblend.experiment.config import as_table
from fedblend.experiment.tables import write_toml
from fedblend.report.privacy import guarantees
from fedblend.report.tables import sites_table
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, find_runs, unstarted_runs
from fedblend.runs.groups import Group, read


def show_table(paths: list[Path], sites: bool = False) -> None:
    """Print the table of runs, or with ``sites`` their accuracy at each of the data's own clients."""
    runs = find_runs(paths)
    console = Console()
    console.print(sites_table(runs) if sites else report.compare(runs))
    for folder, slugs in unstarted_runs(paths).items():
        text = f"Not begun: {listed(slugs)}; start with: fedblend resume {shlex.quote(str(folder))}"
        console.print(text, highlight=False, soft_wrap=True)


def write_report(paths: list[Path], out: Path) -> None:
    """Write the HTML page ``out`` and its PNG for runs."""
    report.write(find_runs(paths), out, out.with_suffix(".png"))
    Console().print(f"Report: {out} and {out.with_suffix('.png')}", highlight=False, soft_wrap=True)


def inspect(paths: list[Path]) -> None:
    """Print each run's status, costs and configuration."""
    console = Console()
    for run in find_runs(paths):
        console.rule(str(run.path), align="left")
        for name, value in _summary(run).items():
            console.print(f"{name:<14}{value}", highlight=False, soft_wrap=True)
        console.print()
        console.print(write_toml(as_table(run.experiment())), highlight=False, soft_wrap=True, markup=False)


def _summary(run: RunDirectory) -> dict[str, str]:
    """Status, result and costs of a run, in words by name."""
    outcome = read(run)
    records, facts = outcome.records, outcome.facts
    sent: dict[str, dict[str, int]] = {"up": {}, "down": {}}
    seconds: dict[str, float] = {}
    for record in records:
        for direction, kinds in sent.items():
            for kind, number in record[f"bytes_{direction}"].items():
                kinds[kind] = kinds.get(kind, 0) + number
        for phase, time in record["machine"]["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + time
    last: dict[str, Any] = next((r for r in reversed(records) if "loss" in r), {})
    claims = [f"{one.what}, for {one.unit}: {one.text}" for one in guarantees([Group(outcome.label, [outcome])])]
    scores = [f"{k} {last[k]:.4f}" for k in ("accuracy", "loss") if k in last]

    def megabytes(kinds: dict[str, int]) -> str:
        return ", ".join(f"{kind} {number / 1e6:.2f} MB" for kind, number in kinds.items()) or "none"

    return {
        "status": f"done, round {outcome.round} of {outcome.rounds}" if outcome.finished else outcome.status_text,
        "checkpoint": f"round {saved}" if (saved := checkpoint.round_of(run.path)) is not None else "none intact",
        "result": ", ".join(scores) or "none yet",
        **({"privacy": "; ".join(claims)} if claims else {}),
        "sent up": megabytes(sent["up"]),
        "sent down": megabytes(sent["down"]),
        "seconds": ", ".join(f"{phase} {time:.1f}" for phase, time in seconds.items()) or "none",
        "peak memory": f"{max((r['machine']['peak_memory'] for r in records), default=0) / 1e6:.0f} MB",
        "clients": json.dumps(facts.get("clients", {})),
        "versions": json.dumps(facts.get("versions", {})),
    }
