"""The ServerApp: runs an experiment in its run directory, with the sites of a federation as clients."""

from __future__ import annotations

import datetime
import functools
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import RunNotRunningException

from fedblend.core.dataset import Population
from fedblend.core.engine import Engine
from fedblend.core.errors import FedblendError, brief, legible, listed
from fedblend.core.files import locked_folder, write_atomically
from fedblend.core.paths import from_file, read_text
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup
from fedblend.engines.autotune import EnginePlan
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.toml_tables import read_toml
from fedblend.flower.app_folder import DEFAULT_DEADLINE, FederationLimits
from fedblend.flower.credentials import expiry_warnings
from fedblend.flower.flower_engine import FlowerEngine
from fedblend.flower.process_guard import end_with_parent
from fedblend.flower.site import describe_setup
from fedblend.flower.sites import PEERS, Sites, is_sample_count
from fedblend.runs.directory import CONFIG, OWN_DATA, STATUS, RunDirectory
from fedblend.runs.runner import FinishedRun, execute, keep_failure

Counts = Mapping[int, Mapping[str, Any]]  # Numbers of samples by client and by :data:`COUNTS`

COUNTS = ("samples", "holds_out", "validates")  # Samples to train on, held out, and kept for validation
CLIENTS = re.compile(r"(?:clients? |missing: )\d+(?:(?:, (?:client )?| and )\d+)*")  # Numbers of clients in a message
RUN_NAME = "sites.id"  # File in a run directory: the name of the run at the sites

app = ServerApp()
log = logging.getLogger("flwr")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that ``flwr run`` submitted, or continue the run in its folder.

    The run configuration has ``experiment`` (the path of a resolved experiment file on the server), ``folder`` (the
    run directory), ``min-sites``, ``deadline`` and ``credentials`` (:class:`FederationLimits`).
    """
    end_with_parent()
    config = context.run_config
    experiment = resolve(from_file(read_toml(str(config["experiment"])), str(config["experiment"])))
    credentials = str(config.get("credentials", ""))
    limits = FederationLimits(
        int(config.get("min-sites", 0)), float(config.get("deadline", DEFAULT_DEADLINE)), credentials
    )
    folder = Path(str(config["folder"]))
    try:
        log.addFilter(SiteNames(names_of(peers_of(credentials))))
        finished = run(grid, experiment, folder, limits)
    except (SystemExit, RunNotRunningException):
        # Flower ends this process so at `flwr stop`, and where the SuperLink is gone.
        directory = RunDirectory(folder)
        if RunDirectory.is_run(folder) and directory.status()["state"] == "killed":
            directory.set_status("stopped", directory.status()["round"], "by flwr stop, or its SuperLink is gone")
        raise
    except FedblendError as error:
        log.error("fedblend: error: %s", error)
        raise
    log.info("fedblend: done, %s rounds in %s", finished.state.round, finished.directory.path)


def run(grid: Grid, experiment: Experiment, folder: Path, limits: FederationLimits) -> FinishedRun:
    """Run an experiment with the sites behind ``grid``, or continue the run in ``folder``."""

    def federate(setup: Setup) -> tuple[Setup, Engine, EnginePlan]:
        try:
            federated, sites = connect(grid, setup, limits)
        except FedblendError as error:
            # Scripts read the status of a run that has not begun, too.
            keep_failure(folder, experiment, str(error))
            raise
        why = f"{len(sites.nodes)} of {sites.clients} sites connected"
        return federated, FlowerEngine(federated, sites), EnginePlan("flower", None, 1, "contiguous", why)

    def tell(record: RoundRecord) -> None:
        warn_of_expiry(limits.credentials, datetime.date.today())
        scores = {"loss": record.loss, "accuracy": record.accuracy}
        score = "".join(f", {name} {value:.4f}" for name, value in scores.items() if value is not None)
        refused = "".join(f"; client {one['client']} refused: {one['reason']}" for one in record.refused or ())
        log.info("fedblend: round %s%s%s", record.round, score, refused)

    # Sites receive nothing of a run that another process makes, and its name and its numbers of samples hold.
    with locked_folder(folder, "sites.lock", "this run directory"):
        if RunDirectory.is_run(folder) and not RunDirectory.has_begun(folder):
            # It failed before it began, and is no run until it begins.
            for name in (STATUS, CONFIG):
                (folder / name).unlink(missing_ok=True)
        return execute(experiment, folder, resume=True, listener=tell, federate=federate)


def connect(grid: Grid, setup: Setup, limits: FederationLimits) -> tuple[Setup, Sites]:
    """Wait for the sites; return the setup with the sites' own numbers of samples, and the connected sites."""
    if setup.experiment.start is not None and setup.experiment.begins_at_clients:
        raise FedblendError(
            "start: sites that begin with models of their own do not have the earlier run's; valid over Flower: no "
            "start, or a method and a channel with which clients begin each round with the server's model"
        )
    # Callbacks and the selection run at the server alone; sites would refuse those that are not fedblend's own.
    experiment = {**as_table(setup.experiment), "callbacks": [], "selection": "uniform"}
    name = _run_name(setup.folder)
    setup_fields = {"experiment": experiment, "setup": describe_setup(setup), "run": name}
    clients, server = len(setup.population), setup.experiment.method.sharing.server
    read_peers = functools.partial(peers_of, limits.credentials)
    least = limits.min_sites or clients - (server is not None)
    sites = Sites(grid, clients, least, limits.deadline, setup_fields, server, read_peers)
    if known := _known_counts(setup):
        sites.expect(client for client, fields in known.items() if fields["samples"] and client != server)
    sites.wait_until_connected(len(sites.expected))
    for client in sorted(sites.expected):
        node, samples = sites.nodes.get(client), sites.hello_fields.get(client, {}).get("samples")
        known_by = "not connected" if node is None else f"node {node}"
        log.info("fedblend: client %s: %s%s", client, known_by, "" if samples is None else f", {samples:,} samples")
    connected = sites.nodes.keys() & sites.expected
    log.info("fedblend: %s of %s sites are connected; the run begins", len(connected), len(sites.expected))
    if setup.folder is not None and not (setup.folder / RUN_NAME).exists():
        setup.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(setup.folder / RUN_NAME, name)
    federated = setup_of_sites(setup, sites.hello_fields, known)
    if names := names_of(read_peers()):
        notes = federated.population.notes | {"sites": [names.get(client, "") for client in range(clients)]}
        federated = replace(federated, population=replace(federated.population, notes=notes))
    if federated.population.elsewhere:
        sites.expect(client for client in np.flatnonzero(federated.population.sizes).tolist() if client != server)
    return federated, sites


def peers_of(credentials: str) -> dict[int, str]:
    """Return the lines of the sites' public keys by client; none without a folder of credentials."""
    if not credentials:
        return {}
    return {int(client): str(line) for client, line in read_toml(Path(credentials) / PEERS).items()}


@functools.cache
def warn_of_expiry(credentials: str, today: datetime.date) -> None:
    """Warn of certificates in the folder of credentials that expire soon, once a day."""
    for text in expiry_warnings(Path(credentials, f"{name}.crt") for name in ("server", "ca")) if credentials else ():
        log.warning("fedblend: %s", text)


def names_of(peers: Mapping[int, str]) -> dict[int, str]:
    """Return the names of sites: what stands behind their public keys."""
    return {client: legible(" ".join(line.split()[2:]), 50) for client, line in peers.items()}


class SiteNames(logging.Filter):
    """Writes the names of sites behind the numbers of clients in fedblend's lines of a log."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if self.names and text.startswith("fedblend: "):
            record.msg, record.args = CLIENTS.sub(lambda found: re.sub(r"\d+", self._named, found[0]), text), ()
        return True

    def _named(self, number: re.Match[str]) -> str:
        name = self.names.get(int(number[0]))
        return f"{number[0]} ({name})" if name else number[0]


def _run_name(folder: Path | None) -> str:
    """Return the random name under which sites keep what a method keeps at them; a new one for a new run."""
    if folder is None or not (folder / RUN_NAME).exists():
        return secrets.token_hex(16)
    remedy = "restore it from a copy, or begin again in another folder"
    name = read_text(folder / RUN_NAME, remedy)
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise FedblendError(f"{folder / RUN_NAME}: is damaged: {brief(name)}, not 32 hexadecimal digits; {remedy}")
    return name


def setup_of_sites(setup: Setup, hello_fields: Mapping[int, Mapping[str, Any]], known: Counts | None = None) -> Setup:
    """Return the setup with the sites' own numbers of samples, unchanged where no site has data of its own.

    ``known`` are the numbers with which a run began that is continued: it weighs and draws clients as if it had not
    been interrupted, and refuses uploads of a site whose number has changed. A site that is not connected when a run
    begins has no samples and takes no part in the run. Raises :class:`FedblendError` where only some sites have data of
    their own (the owner of each of the experiment's samples would then be undefined), and where the sites that take
    part are too few for a round.
    """
    own: dict[int, Mapping[str, Any]] = {
        client: fields for client, fields in hello_fields.items() if fields.get("samples") is not None
    }
    if not own and not known:
        return setup
    if known == {}:
        raise FedblendError(
            f"sites {sorted(own)} have data of their own (data in their site files), but the run began with sites "
            "that had none; restore their site files, or begin again in another folder"
        )
    if without := sorted(set(hello_fields) - set(own)):
        raise FedblendError(
            f"sites {sorted(own) or sorted(known or {})} have data of their own (data in their site files), sites "
            f"{without} have not; give all of them data, or none"
        )
    base = setup.base(setup.sizes(0))
    if base is not None:
        own |= {_server_client(setup, hello_fields): {"samples": len(base[1])}}
    if known:
        _warn_of_changes(own, known)
        own = dict(known)
    table = {f: [own.get(client, {}).get(f, 0) for client in range(len(setup.population))] for f in COUNTS}
    sizes, held, validation = (np.array(table[field], np.int64) for field in COUNTS)
    _require_enough(setup, sizes)
    # The server only counts the samples at the sites; the owner of each follows from the offsets.
    population = Population(
        np.empty(0, np.int64),
        np.concatenate([[0], np.cumsum(sizes)]),
        *_counted(held),
        validation_order=_counted(validation)[0],
        validation_offsets=_counted(validation)[1],
        server_order=setup.population.server_order,
        # From here a continued run has them again.
        notes={"rule": OWN_DATA, **table},
    )
    return replace(setup, population=population, own=base)


def _known_counts(setup: Setup) -> Counts | None:
    """Return the numbers of samples with which the run in the setup's folder began, by client.

    Empty where sites had no data of their own; ``None`` for a new run, and for one of an older version.
    """
    if setup.folder is None or not RunDirectory.has_begun(setup.folder):
        return None
    run = RunDirectory(setup.folder)
    if not run.is_of_sites:
        return {}
    notes = run.facts()["partition"]
    rows = [notes.get(field) for field in COUNTS]
    if rows == [None] * len(COUNTS):
        return None
    if not all(isinstance(row, list) and len([*filter(is_sample_count, row)]) == len(setup.population) for row in rows):
        raise FedblendError(
            f"{setup.folder}: facts.json has not the number of samples of each of {len(setup.population)} clients; "
            "restore the file, or begin again in another folder"
        )
    return {client: dict(zip(COUNTS, numbers, strict=True)) for client, numbers in enumerate(zip(*rows, strict=True))}


def _warn_of_changes(own: Counts, known: Counts) -> None:
    for client, fields in own.items():
        before, now = ({f: table.get(f, 0) for f in COUNTS} for table in (known[client], fields))
        if before != now:
            text = "fedblend: client %s has other samples (%s) than when the run began (%s); its replies with other "
            log.warning(text + "numbers are refused", client, now, before)


def _require_enough(setup: Setup, sizes: np.ndarray) -> None:
    experiment, absent = setup.experiment, np.flatnonzero(sizes == 0).tolist()
    if not absent:
        return
    present = min(experiment.train.cohort, len(sizes) - len(absent))
    try:
        experiment.method.aggregator.require_possible(present)
        if present < experiment.min_uploads:
            raise FedblendError(f"min_uploads: {experiment.min_uploads} is more than {present}")
    except FedblendError as error:
        raise FedblendError(
            f"clients {listed(absent)} are not connected, or have no samples, and the others are too few for a round: "
            f"{error}. Start their SuperNodes, and continue with the same command"
        ) from None
    text = "fedblend: clients %s are not connected, or have no samples, and take no part in the run; %s clients a round"
    log.warning(text, listed(absent), present)


def _counted(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return placeholders for samples at the sites, and the offsets of the clients; ``None`` where there are none.

    The placeholders are one number in memory, because a site may state any number.
    """
    offsets = np.concatenate([[0], np.cumsum(numbers)]) if numbers.any() else None
    return np.broadcast_to(np.int64(0), int(numbers.sum())), offsets


def _server_client(setup: Setup, hello_fields: Mapping[int, Mapping[str, Any]]) -> int:
    server = int(setup.experiment.method.sharing.server)
    if server in hello_fields:
        raise FedblendError(
            f"method.sharing.server: client {server} is the server, which has the experiment's data, but a site has "
            f"partition-id {server}; give sites other partition-ids"
        )
    return server
