"""The folder that ``flwr run`` submits, and the limits of a federation.

The folder holds a ``pyproject.toml`` and the experiment; both apps are in the installed fedblend.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedblend import __version__
from fedblend.core.errors import FedblendError
from fedblend.core.files import write_atomically
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.toml_tables import write_toml

DEFAULT_DEADLINE = 600.0  # Seconds that one exchange with the sites may take by default
EXPERIMENT = "experiment.toml"


@dataclass(frozen=True)
class FederationLimits:
    """How many sites a federation needs, and how long it waits for them."""

    min_sites: int = 0
    """Sites that must be connected before an exchange begins; 0: all clients."""
    deadline: float = DEFAULT_DEADLINE
    """Seconds that sites have to connect, and to reply to one message."""
    credentials: str = ""
    """The server's folder of `fedblend federation provision`, with the sites' public keys and the certificates."""


def write_app(folder: Path, experiment: Experiment, run: Path, limits: FederationLimits) -> None:
    """Write the Flower app of an experiment into ``folder``; ``run`` is the run directory on the server's machine.

    The ServerApp reads the resolved experiment from this folder; sites receive it in messages. Raises
    :class:`FedblendError` if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be used as a folder for the app: {error.strerror}") from None
    write_atomically(folder / EXPERIMENT, write_toml(as_table(experiment)))
    config = {
        "experiment": str((folder / EXPERIMENT).absolute()),
        "folder": str(run.absolute()),
        "min-sites": limits.min_sites,
        "deadline": limits.deadline,
        "credentials": limits.credentials,
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
