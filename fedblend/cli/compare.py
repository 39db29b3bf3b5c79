"""``fedblend compare``, ``report`` and ``inspect``: what each prints or writes about runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from fedblend import report
from fedblend.cli.console import Console, note
from fedblend.core.errors import FedblendError, listed
from fedblend.experiment.toml_tables import set_field, write_toml
from fedblend.report.guarantees import guarantees
from fedblend.report.terminal import sites_table
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, code_of, find_runs, reading, unstarted_runs
from fedblend.runs.groups import Group, Outcome, flatten, read
from fedblend.runs.summary import totals


def print_left_out(runs: Sequence[RunDirectory], trust: bool) -> None:
    """Print one sentence on what was left out because it needs code of the runs, if anything was."""
    if not trust and (code := code_of(runs)):
        text = f"Not imported: code that these runs name ({listed(code)}); what needs it is left out."
        note(f"{text} To run it, add --trust.")


def show_table(runs: list[Path], sites: bool = False, baseline: str | None = None) -> None:
    """Print the table of runs, or with ``sites`` their accuracy at each of the data's own clients."""
    if sites and baseline is not None:
        raise FedblendError("baseline: goes with the table of results, not with --sites; leave one of them out")
    found, console = find_runs(runs), Console()
    console.print(sites_table(found) if sites else report.compare(found, baseline=baseline))
    for folder, slugs in unstarted_runs(runs).items():
        console.tell(f"Not begun: {listed(slugs)}; start with: fedblend resume {shlex.quote(str(folder))}")


def write_report(
    runs: list[Path], out: Path, trust: bool = False, baseline: str | None = None, export: Path | None = None
) -> None:
    """Write the HTML page ``out`` and its PNG for runs, and the files of an export. Raises :class:`FedblendError`."""
    if out.suffix.lower() != ".html":
        raise FedblendError(f"--out {out}: a page is HTML; valid: a name that ends in .html, such as report.html")
    found = find_runs(runs)
    report.write(found, out, out.with_suffix(".png"), trust, baseline, export)
    print_left_out(found, trust)
    more = f", and files for a paper in {export}" if export is not None else ""
    Console().tell(f"Report: {out} and {out.with_suffix('.png')}{more}")


def inspect(runs: list[Path]) -> None:
    """Print each run's status, costs and configuration; of several runs what differs, and once what they share."""
    console, found = Console(), find_runs(runs)
    configs = [flatten(read(run).config) for run in found]
    fields = dict.fromkeys(field for config in configs for field in config)
    differ = [field for field in fields if any(one.get(field) != configs[0].get(field) for one in configs)]
    for run, config in zip(found, configs, strict=True):
        with reading([run]):
            summary = _summary(read(run))
        console.rule(Text(str(run.path)), align="left")
        for name, value in (summary | {field: config[field] for field in differ if field in config}).items():
            console.tell(f"{name:<14}{' ' * (len(name) > 13)}{value}")
        console.print()
    if len(found) > 1:
        console.rule("what all runs share", align="left")
    shared: dict[str, Any] = {}
    for field, value in configs[0].items():
        if field not in differ:
            set_field(shared, field, value)
    console.tell(write_toml(shared))


def _pairs(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in table.items()) or "unknown"


def _summary(outcome: Outcome) -> dict[str, str]:
    records, facts, spent = outcome.records, outcome.facts, totals(outcome.records)
    last = outcome.evaluated[-1].as_dict() if outcome.evaluated else {}
    claims = [
        f"{one.what}, for {one.unit}: {one.text} ({one.words})" for one in guarantees([Group(outcome.label, [outcome])])
    ]
    scores = [f"{k} {last[k]:.4f}" for k in ("accuracy", "loss") if k in last]
    scores += [f"{name} {value:.4f}" for name, value in last.get("metrics", {}).items() if value is not None]
    best = {record.round: record for record in outcome.evaluated}.get(last.get("best_round", -1))
    if best is not None:
        tested = (("accuracy", best.accuracy), ("loss", best.loss))
        values = ", ".join(f"{name} {value:.4f}" for name, value in tested if value is not None)
        scores.append(f"best on validation in round {best.round}: {values}")

    memory = [r.machine["peak_memory"] for r in records if "peak_memory" in r.machine]

    def by_kind(cost: str, form: Callable[[float], str]) -> str:
        kinds = {name.partition(".")[2]: number for name, number in spent.items() if name.startswith(f"{cost}.")}
        return ", ".join(f"{kind} {form(number)}" for kind, number in kinds.items()) or "none"

    def megabytes(number: float) -> str:
        return f"{number / 1e6:.3g} MB"

    return {
        "status": f"done, round {outcome.round} of {outcome.rounds}" if outcome.finished else outcome.status_text,
        **({"missing": missing} if (missing := outcome.missing_uploads) else {}),
        "checkpoint": f"round {saved}" if (saved := checkpoint.round_of(outcome.path)) is not None else "none intact",
        "result": ", ".join(scores) or "none yet",
        **({"privacy": "; ".join(claims)} if claims else {}),
        "sent up": by_kind("bytes_up", megabytes),
        "sent down": by_kind("bytes_down", megabytes),
        "seconds": by_kind("seconds", "{:.1f}".format),
        "peak memory": f"{max(memory) / 1e6:.0f} MB" if memory else "unknown",
        **({"kernels": facts["kernels"]} if "kernels" in facts else {}),
        "clients": _pairs(facts.get("clients", {})),
        "versions": _pairs(facts.get("versions", {})),
    }
