"""``fedblend advise``: which blend helps on the user's data, what it costs, and a file to run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedblend.analysis import plotting
from fedblend.analysis.advice import BASE, Advice, Limits, read_advice, study_of
from fedblend.analysis.privacy.membership import compared
from fedblend.cli.arguments import parse_changes
from fedblend.cli.console import Console, table
from fedblend.cli.run import run_in
from fedblend.cli.tune import begin_search, lines_of_ends, told_how_to_go_on, trial_printer
from fedblend.core.errors import FedblendError, Stopped, brief, listed, or_valid
from fedblend.core.files import write_atomically, write_json
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.experiment.changes import change_field
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.presets import presets
from fedblend.experiment.study import Study, expand
from fedblend.experiment.toml_tables import read_toml, write_toml
from fedblend.report.scatter_figures import draw_advice
from fedblend.runs import api, forms
from fedblend.runs.directory import RunDirectory, locked_study, read_json
from fedblend.runs.runner import first_difference, one_thread
from fedblend.runs.tuning import BEST, MethodSearch, tune

OF_MODELS = ("weights", "masked", "keys", "scores", "loss", "metrics", "local-loss")
KINDS = tuple(kind for kind in PAYLOAD_KINDS if kind not in OF_MODELS)
"""What clients may send beside their models and the scores of these."""

ADVISED = "advice.toml"  # The file of the advised method
OPTIONS = "options.json"  # The file of the first call's options, which ``--resume`` goes on with
NOT_GIVEN: tuple[Any, ...] = (None, [])  # Values of options that are not given

NOTE = (
    "Scores are on the test samples, the mean of the last three evaluations. Differences are paired over seeds, with "
    "95 % intervals. Helps, hurts: certain among all comparisons of the table (Holm's correction, 5 % in all). May "
    "help, may hurt: zero lies outside the interval, which is of one comparison. MB: sent and received by a client. "
    "Leak: an attacker's advantage in telling members from others (0 or below: guessing, 1: certain)."
)


def options_of(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the first call in a folder, from which no given one may differ; those given in a new folder."""
    if not (first := read_json(folder / OPTIONS, forms.AdviceOptions)):
        return dict(given)
    for name, value in given.items():
        if value not in NOT_GIVEN and value != first.get(name):
            begun = "without it" if first.get(name) in NOT_GIVEN else f"with {brief(first[name])}"
            raise FedblendError(
                f"--{name} {brief(value)}: the advice in {folder} was begun {begun}; leave --{name} out, or name "
                "another folder (--out)"
            )
    return {name: first.get(name) for name in given}


def advise(
    file: Path,
    methods: str = "",
    megabytes: float | None = None,
    least: float | None = None,
    leaves: Sequence[str] | None = None,
    changes: Sequence[str] | None = None,
    resume: bool = False,
    out: Path | None = None,
    jobs: int | None = None,
) -> None:
    """Tune the candidates with the same budget, run each with all seeds, measure what leaks, and print the answer."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    options: dict[str, Any] = {
        "methods": names, "set": changes, "megabytes": megabytes, "least": least, "leaves": leaves
    }  # fmt: skip
    content, folder = begin_search("advise", file, parse_changes(changes), resume, out)
    if resume and folder.exists():
        options = options_of(folder, options)
        content, _ = begin_search("advise", file, parse_changes(options["set"]), True, folder)
    known, names = presets(), options["methods"]
    for method in names:
        if method not in known:
            valid = or_valid(method, known, everything="fedblend list methods")
            raise FedblendError(f"--methods {method}: unknown method{valid}")
    for kind in options["leaves"] or ():
        if kind not in (*KINDS, "none"):
            raise FedblendError(f"--leaves {kind}: unknown{or_valid(kind, (*KINDS, 'none'))}")
    leaving = None if options["leaves"] is None else frozenset(options["leaves"]) - {"none"}
    limits = Limits(options["megabytes"], options["least"], leaving)
    study, left_out = study_of(content, names or None, limits)
    notes = Console(stderr=True)
    for method, reason in left_out.items():
        notes.tell(f"{method}: left out, since it cannot be used here: {reason}")
    seeds = listed([str(seed) for seed in study["seeds"]])
    filled = " (the file's, and others up to three)" if len(content.get("seeds", study["seeds"])) < 3 else ""
    notes.tell(f"{len(study['methods'])} methods are tuned, then run with the seeds {seeds}{filled}")
    with locked_study(folder), told_how_to_go_on("advise", file, folder):
        write_json(folder / OPTIONS, options)
        searches = tune(study, folder / "search", trial_printer(notes), foreign_fields=True)
        tuned = expand(api.load(folder / "search" / BEST))
        place = _runs_folder(folder, tuned)
        try:
            run_in(tuned, place, True, jobs, tabled=False)
        except Stopped:
            raise
        except FedblendError as error:  # the answer says which methods failed with a seed
            notes.tell(str(error))
    runs = [RunDirectory(place / slug) for slug in tuned.experiments if RunDirectory.is_run(place / slug)]
    notes.print("measuring what leaks")
    with one_thread():
        advice = read_advice(runs, searches[0].metric, searches[0].larger_is_better, limits, left_out)
    _tell(folder, advice, searches, runs[0])


def _tell(folder: Path, advice: Advice, searches: Sequence[MethodSearch], first: RunDirectory) -> None:
    facts, console = first.facts(), Console()
    data = f"{facts['data']['name']}, {facts['clients']['number']:,} clients"
    _write(folder, advice, read_toml(folder / "search" / BEST), searches)
    figure = draw_advice(advice, data, compared(make_setup(first.experiment())))
    write_atomically(folder / "advice.png", plotting.png_bytes(figure))
    console.print(_table(advice))
    console.tell(NOTE, style="dim")
    for line in (*advice.answer(), *lines_of_ends(searches)):
        console.tell(line)
    told = [f"Figure: {folder / 'advice.png'}, numbers: {folder / 'advice.json'}"]
    told += [f"To run it: fedblend run {folder / ADVISED}"] * (advice.to_run is not None)
    console.tell("\n".join(told))


def _runs_folder(folder: Path, tuned: Study) -> Path:
    """The folder of the runs with the best values: a new one where a longer search has found others."""

    def holds_others(place: Path) -> bool:
        return any(
            RunDirectory.has_begun(place / slug) and first_difference(RunDirectory(place / slug), experiment)
            for slug, experiment in tuned.experiments.items()
        )

    return next(place for place in api.numbered(folder / "runs") if not holds_others(place))


def _table(advice: Advice) -> Table:
    score = "accuracy %" if advice.metric == "accuracy" else advice.metric
    numbers = [score, f"minus {BASE}", "MB", "leak"]
    made = table(["method"], numbers, ruled=True, no_wrap=True, padding=(0, 1, 0, 0))
    made.columns[0].no_wrap = True
    for heading in ("what leaves", "answer"):
        made.add_column(heading, overflow="fold")
    for option in advice.options:
        leaves = ", ".join(option.leaves)
        made.add_row(
            option.method,
            advice.as_text(option.score),
            advice.interval(option),
            f"{option.megabytes:.3g}",
            "" if math.isnan(option.exposure) else f"{option.exposure:.3f}",
            f"{leaves} to {'all' if option.to_clients else 'the server'}" if leaves else "model only",
            option.fault or advice.verdict(option),
        )
    return made


def _write(folder: Path, advice: Advice, best: dict[str, object], searches: Sequence[MethodSearch]) -> None:
    if advice.to_run is None:
        (folder / ADVISED).unlink(missing_ok=True)
    else:
        chosen = advice.to_run.method
        values = next(search.best.values for search in searches if search.label == chosen and search.best)
        table = {key: value for key, value in best.items() if key not in ("method", "variants")}
        table["method"] = chosen
        for name, value in values.items():
            change_field(table, name, value)
        write_atomically(folder / ADVISED, write_toml(table))
    write_json(folder / "advice.json", advice.table())
