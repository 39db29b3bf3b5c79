"""The ServerApp: a run of an experiment, in its run directory, whose clients are the sites of a federation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedblend.core.dataset import Population
from fedblend.core.engine import Engine
from fedblend.core.errors import FedblendError
from fedblend.core.paths import from_file
from fedblend.core.setup import Setup
from fedblend.engines.autotune import EnginePlan
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.tables import read_toml
from fedblend.flower.engine import FlowerEngine
from fedblend.flower.limits import DEADLINE, FederationLimits
from fedblend.flower.site import about_setup
from fedblend.flower.sites import Sites, Wire
from fedblend.runs.runner import Finished, execute

app = ServerApp()
log = logging.getLogger("flwr")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Make the rounds of the experiment that ``flwr run`` names; where its folder holds a run already, go on with it.

    Its run configuration is ``experiment`` (a resolved experiment file on the server), ``folder`` (the run's), and
    ``min-sites`` and ``deadline``.
    """
    asked = context.run_config
    experiment = resolve(from_file(read_toml(str(asked["experiment"])), str(asked["experiment"])))
    terms = FederationLimits(int(asked.get("min-sites", 0)), float(asked.get("deadline", DEADLINE)))
    try:
        finished = run(grid, experiment, Path(str(asked["folder"])), terms)
    except FedblendError as error:
        log.error("fedblend: error: %s", error)
        raise
    log.info("fedblend: done, %s rounds in %s", finished.state.round, finished.directory.path)


def run(grid: Wire, experiment: Experiment, folder: Path, terms: FederationLimits) -> Finished:
    """Run an experiment with the sites behind ``grid``, or go on with the run in ``folder``."""

    def federate(setup: Setup) -> tuple[Setup, Engine, EnginePlan]:
        made, sites = meet(grid, setup, terms)
        why = f"{len(sites.nodes)} of {sites.clients} sites connected"
        return made, FlowerEngine(made, sites), EnginePlan("flower", None, 1, "contiguous", why)

    return execute(experiment, folder, resume=True, listener=_tell, federate=federate)


def meet(wire: Wire, setup: Setup, terms: FederationLimits) -> tuple[Setup, Sites]:
    """The sites once they are connected, and the world with the numbers of samples that they hold of their own."""
    about = {"experiment": as_table(setup.experiment), "told": about_setup(setup)}
    clients = len(setup.population)
    server = setup.experiment.method.sharing.server
    others = clients - (server is not None)
    sites = Sites(wire, clients, terms.min_sites or others, terms.deadline, about, apart=server)
    sites.meet(others)
    return of_sites(setup, sites.facts), sites


def of_sites(setup: Setup, facts: Mapping[int, Mapping[str, Any]]) -> Setup:
    """The world with the sites' own numbers of samples, or as it is where none of them has data of its own.

    A site that is not there when a run begins holds none, and takes no part in it. Raises :class:`FedblendError` where
    only some sites have data of their own: who has which of the experiment's samples would then be unclear.
    """
    own = {client: told for client, told in facts.items() if told.get("samples") is not None}
    if not own:
        return setup
    if len(own) != len(facts):
        others = sorted(set(facts) - set(own))
        raise FedblendError(
            f"sites {sorted(own)} have data of their own (data in their site files), sites {others} have not; give "
            "all of them data, or none"
        )
    base = setup.base(setup.sizes(0))
    if base is not None:
        own |= {_server(setup, facts): {"samples": len(base[1]), "holds_out": 0}}
    sizes, held = (
        np.array([_count(own, client, word) for client in range(len(setup.population))], np.int64)
        for word in ("samples", "holds_out")
    )
    nothing = np.empty(0, np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # What is held out is only counted here; the counts' owners follow from the offsets.
    held_offsets = np.concatenate([[0], np.cumsum(held)]) if held.any() else None
    rows = np.zeros(int(held.sum()), np.int64)
    notes = {"rule": "each site's own data"}
    return replace(setup, population=Population(nothing, offsets, rows, held_offsets, notes=notes), own=base)


def _server(setup: Setup, facts: Mapping[int, Mapping[str, Any]]) -> int:
    """The client that is the server, whose samples are the experiment's own. Raises :class:`FedblendError`."""
    server = int(setup.experiment.method.sharing.server)
    if server in facts:
        raise FedblendError(
            f"method.sharing.server: client {server} is the server, with the experiment's data for its own, but a site "
            f"says that it is client {server}; give sites other partition-ids"
        )
    return server


def _count(own: Mapping[int, Mapping[str, Any]], client: int, word: str) -> int:
    number = own.get(client, {}).get(word, 0)
    if type(number) is not int or number < 0:
        raise FedblendError(f"client {client} says that it holds {number!r} samples; valid: a whole number from 0 up")
    return number


def _tell(record: dict[str, Any]) -> None:
    """One line of the log for each round."""
    score = "".join(f", {name} {record[name]:.4f}" for name in ("loss", "accuracy") if name in record)
    refused = "".join(f"; client {one['client']} refused: {one['reason']}" for one in record.get("refused", ()))
    log.info("fedblend: round %s%s%s", record["round"], score, refused)
