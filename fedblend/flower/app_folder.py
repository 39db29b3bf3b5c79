"""The Flower app that ``flwr run`` submits: a folder with one file, since all code is fedblend's and installed."""

from __future__ import annotations

from pathlib import Path

from fedblend import __version__
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.tables import write_toml
from fedblend.flower.limits import FederationLimits
from fedblend.runs.files import write_atomically

EXPERIMENT = "experiment.toml"


def write_app(folder: Path, experiment: Experiment, run: Path, terms: FederationLimits) -> None:
    """Write the app for an experiment whose run directory, on the server's machine, is ``run``.

    The resolved experiment lies beside the app's ``pyproject.toml`` and is read by the ServerApp where it lies; sites
    hear of it by the messages. Raises :class:`FedblendError` if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be used as a folder for the app: {error.strerror}") from None
    write_atomically(folder / EXPERIMENT, write_toml(as_table(experiment)))
    config = {
        "experiment": str((folder / EXPERIMENT).absolute()),
        "folder": str(run.absolute()),
        "min-sites": terms.min_sites,
        "deadline": terms.deadline,
    }
    components = {"serverapp": "fedblend.flower:server_app", "clientapp": "fedblend.flower:client_app"}
    project = {
        "project": {
            "name": "fedblend-app",
            "version": __version__,
            "description": "A federation of fedblend",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {"flwr": {"app": {"publisher": "fedblend", "components": components, "config": config}}},
    }
    write_atomically(folder / "pyproject.toml", write_toml(project))
