"""``fedblend federation`` and ``fedblend site``: try a real federation; write, check and audit a site's file."""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.table import Column, Table

from fedblend import report
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, note
from fedblend.core.errors import FedblendError, Stopped, brief, listed, or_valid, printable
from fedblend.core.files import locked_folder, make_folder_of, write_atomically
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.parts import has_option
from fedblend.experiment.study import slugify
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory, foreign_code

if TYPE_CHECKING:
    from fedblend.core.dataset import Dataset
    from fedblend.flower.app_folder import FederationLimits

POLL_S = 0.5  # Seconds between two reads of the run's records
NEARLY = 0.9  # Share of a limit from which a check warns that it is nearly used up

SERVER_LINE = re.compile(r"fedblend: (?!error: |done, )(?:round (\d+)(?=[,;]|$)|(.+))", re.MULTILINE)
"""A line of the run's log: a round, which is printed from its record, or about sites. Errors are printed at the end."""


def one_experiment(file: Path, run: str | None, changes: Sequence[Change] = ()) -> Experiment:
    """The experiment of a file, or the one named ``run`` among several."""
    runs = api.expand_file(file, changes, None).experiments
    if run is None and len(runs) > 1:
        raise FedblendError(f"{file}: has {len(runs)} runs; name one with --run: {listed(list(runs))}")
    if run is not None and run not in runs:
        raise FedblendError(f"--run {run}: no such run{or_valid(run, runs)}")
    return runs[run] if run is not None else next(iter(runs.values()))


def for_sites(experiment: Experiment, sites: int) -> Experiment:
    """The experiment with one client a site, where its partition has a number of clients. Prints a note on a change."""
    table = as_table(experiment)
    if has_option(experiment.partition, "clients"):
        table["partition"]["clients"] = sites
    table["train"]["cohort"] = min(experiment.train.cohort, sites)
    adapted = resolve(table)
    if adapted != experiment:
        console = Console(stderr=True)
        console.print(f"one client a site: {sites} clients, of which {adapted.train.cohort} train in a round")
        if lacking := _classes_of_no_site(adapted):
            text = f"no site has samples of the classes {listed(lacking)}; choose more sites, or another partition"
            console.print(f"warning: {text}")
    return adapted


def _classes_of_no_site(experiment: Experiment) -> list[str]:
    """The classes that the training samples have, and those of the experiment's clients have not."""
    import numpy as np

    from fedblend.experiment.make_setup import make_setup

    setup = make_setup(experiment)
    if setup.task.kind != "classification":
        return []
    labels = setup.data.train.y.numpy()
    held = np.unique(labels[setup.population.order])
    return [setup.data.classes[label] for label in np.setdiff1d(np.unique(labels), held)]


def _limits(experiment: Experiment, clients: int | None, min_sites: int, deadline: float | None) -> FederationLimits:
    """The limits of a federation of so many clients (``None``: only the data tell) for an experiment of real sites."""
    from fedblend.flower.app_folder import DEFAULT_DEADLINE, FederationLimits
    from fedblend.flower.limits import check_simulated

    check_simulated(experiment, own_data=False)
    if deadline is not None and not 1 <= deadline < math.inf:
        raise FedblendError(f"--deadline {deadline:g}: is not valid; valid: a number of seconds from 1")
    server = experiment.method.sharing.server
    sites = min_sites if clients is None else clients - (server is not None)
    if min_sites > sites:
        itself = "" if server is None else f", because client {server} of {clients} is the server"
        raise FedblendError(f"--min-sites {min_sites}: the federation has {sites} sites{itself}; valid: 1 to {sites}")
    return FederationLimits(min_sites, DEFAULT_DEADLINE if deadline is None else deadline)


def write_app(file: Path, changes: Sequence[Change] = (), run: str | None = None, **options: Any) -> None:
    """Write the Flower app of a file's experiment: :func:`write_app_folder` with its options."""
    write_app_folder(one_experiment(file, run, changes), **options)


def write_app_folder(
    experiment: Experiment,
    out: Path,
    folder: Path,
    min_sites: int = 0,
    deadline: float | None = None,
    credentials: Path | None = None,
) -> None:
    """Write the Flower app of an experiment into the folder ``out``; its run directory will be ``folder``."""
    from fedblend.flower import app_folder
    from fedblend.flower.site import MOST_ROUNDS
    from fedblend.flower.sites import PEERS

    limits = _limits(experiment, getattr(experiment.partition, "clients", None), min_sites, deadline)
    if credentials is not None:
        if not (credentials / PEERS).is_file():
            raise FedblendError(f"--credentials {credentials}: has no {PEERS}; valid: server of federation provision")
        limits = replace(limits, credentials=str(credentials.absolute()))
    app_folder.write_app(out, experiment, folder, limits)
    if experiment.rounds > MOST_ROUNDS:
        note(
            f"warning: this run has {experiment.rounds:,} rounds, and a site trains in {MOST_ROUNDS:,} of all runs "
            "unless its file sets rounds"
        )
    Console().print(f"Flower app: {out}; on the SuperLink's machine: flwr run {out} NAME")


def try_file(file: Path, sites: int, changes: Sequence[Change] = (), run: str | None = None, **options: Any) -> None:
    """Run a file's experiment, with one client a site, in a trial: :func:`run_trial` with its options."""
    run_trial(for_sites(one_experiment(file, run, changes), sites), sites, **options)


def run_trial(
    experiment: Experiment,
    sites: int,
    site_file: Sequence[Path] = (),
    min_sites: int = 0,
    deadline: float | None = None,
    out: Path | None = None,
) -> None:
    """Run an experiment in a trial federation on loopback, print its rounds, and stop all processes at the end."""
    import fedblend.flower  # noqa: F401  (raises where Flower is missing)
    from fedblend.flower.app_folder import write_app
    from fedblend.flower.site import read_site
    from fedblend.flower.trial import LoopbackTrial

    if len(site_file) not in (0, sites):
        raise FedblendError(f"--site-file: {len(site_file)} files for {sites} sites; give one for each site, or none")
    limits = _limits(experiment, sites, min_sites, deadline)
    audits = [read_site(path).audit for path in site_file]
    if twice := {audit for audit in audits if audit is not None and audits.count(audit) > 1}:
        raise FedblendError(f"--site-file: two sites have the audit log {min(twice)}; each needs one of its own")
    folder = out or api.free_folder(api.RUNS / f"{slugify(experiment.name)}-federation")
    console, run = Console(), folder / "run"
    with locked_folder(folder, "trial.lock", "the trial"), LoopbackTrial(folder, sites) as trial:
        try:
            console.print(f"SuperLink and {sites} SuperNodes on 127.0.0.1, logs in {folder / 'logs'}")
            note(
                f"warning: until the trial ends, every user of this machine can run code as you, through port "
                f"{trial.port} of 127.0.0.1; on a shared machine see docs/deployment.md (A trial on a shared machine)"
            )
            with console.status("starting the SuperLink") as status:
                trial.begin()
                write_app(folder / "app", experiment, run, limits)
                paths = site_file or [_site_file(folder / f"site-{site}", experiment) for site in range(sites)]
                for site, path in enumerate(paths):
                    trial.start_node(site, {"site": str(path.absolute())})
                status.update("the sites connect, load their data and share")
                # The log of an earlier start of the same trial goes on.
                read, printed = len(trial.log_of("run")), 0
                process = trial.submit(folder / "app")
                while process.poll() is None:
                    read, printed = _print_log(console, trial.log_of("run"), read, run, printed)
                    if printed:
                        status.update(
                            f"round {printed} of {experiment.rounds}" if printed <= experiment.rounds else "end"
                        )
                    time.sleep(POLL_S)
                _, printed = _print_log(console, trial.log_of("run"), read, run, printed)
                _print_rounds(console, run, printed)
                ended = [name for name, one in trial.processes.items() if name != "run" and one.poll() is not None]
        except KeyboardInterrupt:
            raise Stopped(f"stopped; to resume, give the same command with --out {folder}") from None
    # The ServerApp has ended, too: until then a run whose SuperLink is gone counts as running.
    _require_done(run, trial.log_of("run"), ended)
    console.print(report.compare([RunDirectory(run)]))
    logs = [str(read_site(path).audit) for path in paths]
    console.tell(f"Run: {run}\nWhat left the sites: {listed(logs)}")


def _site_file(folder: Path, experiment: Experiment) -> Path:
    """The path of a trial's site file; a new one permits what the method sends, and trusts what the run names."""
    from fedblend.flower.site import KINDS, MOST_ROUNDS, SAFE, files_of, site_text

    path = folder / "site.toml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sharing = experiment.method.sharing
        kind = sharing.bytes_kind
        permitted = (kind,) if kind in KINDS and kind not in SAFE and sharing.plan.active else ()
        # Means of hidden states are new in each round, and masked means in each start of a trial.
        sharings = max(1, experiment.rounds) if sharing.plan.repeats or sharing.plan.who == "groups" else 1
        trusted = [*foreign_code(as_table(experiment)), *files_of(experiment.data).values()]
        # A trial that is begun again counts rounds anew.
        rounds = experiment.rounds + MOST_ROUNDS
        text = site_text(path, None, SAFE + permitted, sharings=sharings, trusted=trusted, rounds=rounds)
        write_atomically(path, text)
    return path


def _print_log(console: Console, log: str, read: int, run: Path, printed: int) -> tuple[int, int]:
    """Print what the log has after ``read`` characters; return how many are read, and how many records printed."""
    whole = log.rfind("\n") + 1
    for number, line in SERVER_LINE.findall(log[read:whole]):
        if number:
            printed = _print_rounds(console, run, printed, int(number) + 1)
        else:
            console.tell(line)
    return max(read, whole), printed


def _print_rounds(console: Console, run: Path, printed: int, end: int | None = None) -> int:
    """Print the records after the first ``printed``, up to ``end``; returns how many are printed."""
    records = RunDirectory(run).records()[:end]
    for record in records[printed:]:
        scores = {"loss": record.loss, "accuracy": record.accuracy}
        score = "".join(f"  {name} {value:.4f}" for name, value in scores.items() if value is not None)
        refused = "".join(f"  client {one['client']} refused: {one['reason']}" for one in record.refused or ())
        console.tell(f"round {record.round}{score}{refused}")
    return max(printed, len(records))


def _require_done(run: Path, log: str, ended: Sequence[str] = ()) -> None:
    """Raise :class:`FedblendError` with the reason unless a run is done; ``ended`` are processes that ended early."""
    status = RunDirectory(run).status() if RunDirectory.is_run(run) else {"state": "not begun"}
    if status["state"] == "done":
        return
    errors = re.findall(r"(?:fedblend: error|FedblendError): (.+)", log)
    gone = f"{listed(ended)} ended early" if ended else "see the log"
    reason = status.get("reason") or (errors[-1] if errors else gone)
    raise FedblendError(
        f"the federation's run is {status['state']}: {reason} (logs in {run.parent / 'logs'}; "
        f"the log of client K is site-K.log); to resume, give the same command with --out {run.parent}"
    )


def init_site(
    path: Path, data: Path | None = None, min_mean: int = 2, target: Sequence[str] = (), **options: Any
) -> None:
    """Write a new site file, and print what ``data`` holds; ``target`` and ``options`` are those of a table."""
    from fedblend.flower.site import read_site, site_text

    chosen = {"target": target[0] if len(target) == 1 else target, **options}
    table = {option: value for option, value in chosen.items() if value}
    if path.exists():
        raise FedblendError(f"{path}: exists already; edit it, or give another name")
    if data is None and table:
        raise FedblendError(f"--data: is missing beside --{next(iter(table))}; give this site's table")
    held = None if data is None else _load(data, table)
    make_folder_of(path)
    write_atomically(path, site_text(path, data, min_mean=min_mean, table=table))
    read_site(path)
    console = Console()
    if held is not None:
        _print_content(held, min_mean, console)
    console.tell(
        f"Site file: {path}; read it and decide what may leave, then: fedblend site check {shlex.quote(str(path))}"
    )
    earlier = path.parent / "audit.jsonl"
    if earlier.exists():
        console.tell(
            f'{earlier}: is not continued; if it is the log of this site, write audit = "audit.jsonl" into the file'
        )


def check_site(path: Path, experiment: Path | None = None, run: str | None = None) -> None:
    """Load a site's samples and keys, and print them beside what its file allows and what its audit log has counted.

    Of an ``experiment`` the digest is printed, and all that the site refuses of it.
    """
    from fedblend.engines import require_device
    from fedblend.flower.audit import AuditLog
    from fedblend.flower.credentials import expiry_warnings
    from fedblend.flower.limits import agreed_digest, used_limits
    from fedblend.flower.refusals import refusals
    from fedblend.flower.site import read_site, trust_of

    site, console, held = read_site(path), Console(), None
    if site.data is not None:
        with console.status("loading the samples"), _named(path), trust_of(site):
            held = site.data.load()
        _print_content(held, site.min_mean, console)
    else:
        console.tell("Samples: none; the site trains on its client's part of the experiment's data (data, for trials)")
    console.tell(f"May leave: {', '.join(site.allow) or 'nothing'}")
    if site.federation is not None:
        warnings = [f"warning: {text}" for text in expiry_warnings([Path(site.federation.ca)])]
        console.tell("\n".join([f"Site {site.federation.client}: {site.federation.name}", *warnings]))
    log = Path(str(site.audit))
    with _named(path):
        if site.key is not None:
            console.tell(_keys_of(site.key, site.peers, site.min_sum))
        elif site.peers is not None:
            raise FedblendError("key: is missing; with peers a site signs its keys; valid: its private key")
        require_device(site.device)
        _require_writable(log)
    record = AuditLog(site.audit)
    with record.verified() as found:
        limits = used_limits(site, record)
        if experiment is not None:
            with trust_of(site):
                asked = one_experiment(experiment, run)
            refused = refusals(site, asked, held, record)
    console.tell(
        f"Audit log: {log}: payloads: {found['payloads']:,}; trained in {limits['rounds'][0]:,} of at most "
        f"{site.rounds:,} rounds"
    )
    for field, (used, most) in limits.items():
        if used >= NEARLY * most:
            word = "used up" if used >= most else "nearly used up"
            console.tell(f"warning: {field}: {word}, {used:,} of at most {most:,} over all runs")
    if experiment is not None:
        console.tell(f'agreed = "{agreed_digest(asked)}"')
        for reason in refused:
            console.tell(f"refused: {reason}")
        if refused:
            raise FedblendError(f"{path}: this site does not take part in {experiment}: {refused[0]}")
    console.tell(f"{path}: no fault found")


@contextmanager
def _named(what: Path | str) -> Iterator[None]:
    try:
        yield
    except FedblendError as error:
        raise FedblendError(f"{what}: {error}") from None


def _require_writable(log: Path) -> None:
    if not log.parent.is_dir():
        raise FedblendError(f"audit: {log.parent}: no such folder; valid: a folder that this user can write to")
    # Each payload takes the log's lock. It is not taken here, since a file of another user would keep the site from it.
    for file in (log, log.with_name(f"{log.name}.lock")):
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise FedblendError(f"audit: {file}: this user cannot write it; valid: a file that it can write")


def _keys_of(key: str, peers: str | None, min_sum: int) -> str:
    """Sign with a site's key; return whose it is. Raises :class:`FedblendError` if it is of no use, or unsafe."""
    from fedblend.experiment.toml_tables import read_toml
    from fedblend.flower.secure_aggregation.masks import is_signed, public_key, sign

    signed = sign(key, b"fedblend site check")
    table = {} if peers is None else read_toml(peers)
    _require_mode("key", key, 0o027, "read or change it", "640")
    if peers is None:
        return f"Key: {key}; it signs (without peers the server could take another site's place)"
    _require_mode("peers", peers, 0o022, "change it", "644")
    for client, line in table.items():
        if not client.isdecimal() or public_key(str(line)) is None:
            valid = 'valid: a client\'s number and its public key, such as 0 = "ecdsa-sha2-nistp384 AAAA..."'
            raise FedblendError(f"peers: {peers}: {client} = {brief(line)} is no client and key; {valid}")
    owners = [client for client, line in table.items() if is_signed(str(line), b"fedblend site check", signed)]
    if len(owners) != 1:
        found = f"the clients {' and '.join(owners)} have" if owners else f"none of its {len(table)} clients has"
        raise FedblendError(f"peers: {peers}: {found} the public key of {key}; valid: one client has it")
    if min_sum > len(table):
        text = f"min_sum: {min_sum}: {peers} has {len(table)} sites, so that no masked sum can include this one"
        raise FedblendError(f"{text}; valid: 2 to {len(table)}")
    return f"Key: client {owners[0]} of the {len(table)} in {peers}"


def _require_mode(field: str, file: str, loose: int, may: str, valid: str) -> None:
    if os.name != "nt" and os.stat(file).st_mode & loose:
        raise FedblendError(f"{field}: {file}: other users can {may}; run: chmod {valid} {shlex.quote(file)}")


def _load(path: Path, table: Mapping[str, Any]) -> Dataset:
    from fedblend.core import registry
    from fedblend.data.loaders.table import SUFFIXES, read_frame
    from fedblend.flower.site import samples_of

    if not path.is_file():
        raise FedblendError(f"--data {path}: no such file; give this site's samples (.npz, or a table: .csv, .parquet)")
    is_table = path.suffix.lower() in SUFFIXES
    if is_table and "target" not in table:
        columns = list(read_frame(path).columns)
        raise FedblendError(f"--target: is missing; {path} is a table; valid: the column to predict: {listed(columns)}")
    if table and not is_table:
        raise FedblendError(f"--{next(iter(table))}: {path} is no table; valid: with {', '.join(SUFFIXES)}")
    with _named("--data"):
        return cast("Dataset", registry.build("dataset", samples_of(path, table), "data").load())


def _print_content(data: Dataset, min_mean: int, console: Console) -> None:
    x = data.train.x
    names = data.classes or data.labels
    kind = "classes" if data.classes else "labels"
    target = f"{len(names)} {kind}: {listed(names)}" if names else f"{data.outputs} numbers to predict"
    sizes = f"{len(x)} to train on, {len(data.test.x)} for tests (not used)"
    console.tell(f"Samples: {sizes}; shape {'x'.join(map(str, x.shape[1:]))}; {target}")
    if len(x) < min_mean:
        console.tell(
            f"warning: min_mean {min_mean}: this site has {len(x)} samples to train on: no mean of them leaves"
        )


def show_audit(
    path: Path,
    last: int | None = None,
    since: str | None = None,
    run: str | None = None,
    json: bool = False,
    verify: bool = False,
    accept: bool = False,
) -> None:
    """Check or print a site's audit log, as a table or lines of JSON, of one run or since a date; rounds begin at 1."""
    from fedblend.flower.audit import AuditLog, audit_rows
    from fedblend.flower.site import read_site

    log, console = AuditLog(read_site(path).audit), Console()
    if accept:
        log.accept()
    if verify or accept:
        with log.verified() as found:
            gaps = f"; the site's user accepted {found['gaps']} gaps before" if found["gaps"] else ""
            console.tell(f"{log.path}: {found['lines']:,} lines, and all fit{gaps}")
        return
    if since is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?Z?)?", since):
        raise FedblendError(f"--since {since}: is no date; valid: 2026-01-31, or 2026-01-31T13:00")
    lines = [line for line in log.lines() if line["time"] >= (since or "")]
    lines = [line for line in lines if run in (None, line["run"], line["run"].partition("/")[0])]
    if json:
        for line in lines[-last:] if last else lines:
            print(dumps({**line, "round": line["round"] + 1}))
        return
    table = Table(
        Column("time", no_wrap=True), Column("run", overflow="fold"), "round", "kind", "what", "bytes", "sha256"
    )
    for row in audit_rows(lines[-last:] if last else lines):
        table.add_row(*map(printable, row))
    console.print(table)
    total = sum(line.get("bytes", 0) for line in lines)
    left, refused = (sum(field in line for line in lines) for field in ("tensors", "refused"))
    console.tell(f"{left} payloads, {total:,} bytes, {refused} refusals in {log.path}")
