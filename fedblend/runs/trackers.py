"""Trackers: callbacks that send the numbers of each round to TensorBoard, Weights & Biases, MLflow or a CSV file.

Each writes into the run's folder, or where its fields say, and goes on with a resumed run. Packages of trackers are in
the extra ``tracking``.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from fedblend.core.callbacks import Callback
from fedblend.core.errors import FedblendError, legible, missing_package
from fedblend.core.files import csv_frame, write_atomically, write_json
from fedblend.core.record import RoundRecord
from fedblend.core.registry import part
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.experiment.config import as_table
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import flatten


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record by name: ``accuracy``, ``bytes_up.weights``, ``machine.seconds.train``, ...

    >>> numbers_of(RoundRecord(3, loss=0.5, accuracy=None, cohort=[1, 2], bytes_up={"weights": 8}))
    {'loss': 0.5, 'bytes_up.weights': 8.0}
    """
    flat = {name: value for name, value in flatten(record.as_dict()).items() if not isinstance(value, bool)}
    return {name: float(value) for name, value in flat.items() if isinstance(value, int | float) and name != "round"}


class Noting(Callback):
    """Base of callbacks that note something during a run; parts are frozen."""

    @functools.cached_property
    def open(self) -> dict[str, Any]:
        """What is noted, such as an open file."""
        return {}


def folder_of(callback: Callback, setup: Setup) -> Path:
    """Return the run's folder. Raises :class:`FedblendError` for a run without one, as in a trial."""
    if setup.folder is None:
        name = getattr(callback, "name", type(callback).__name__)
        raise FedblendError(f"callbacks: {name} needs a run with a folder")
    return setup.folder


class Tracker(Noting):
    """Base of trackers. A tracker that a run has from its start gets the untrained model's record (round 0), too."""

    def begin(self, folder: Path, setup: Setup, round: int) -> bool:
        """Open the tracker's own log, to write rounds after ``round``; return whether it has none of them yet."""
        raise TypeError(f"{type(self).__name__} defines no begin")

    def log(self, round: int, numbers: dict[str, float]) -> None:
        raise TypeError(f"{type(self).__name__} defines no log")

    def end(self) -> None:
        """Close the log."""

    def on_run_begin(self, setup: Setup, state: RunState) -> None:
        """Open the log; a log that is new gets all earlier rounds."""
        folder = folder_of(self, setup)
        if self.begin(folder, setup, state.round):
            for record in RunDirectory(folder).records():
                if record.round <= state.round:
                    self.log(record.round, numbers_of(record))

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        self.log(record.round, numbers_of(record))

    def on_run_end(self, state: RunState) -> None:
        self.end()


@part("callback", "csv")
class CSVTable(Tracker):
    """The numbers of all rounds in `metrics.csv` in the run's folder, one row a round; it is replaced each round."""

    def begin(self, folder: Path, setup: Setup, round: int) -> bool:
        """Start with an empty table: it is written anew from the records."""
        self.open.update(path=folder / "metrics.csv", rows=[])
        return True

    def log(self, round: int, numbers: dict[str, float]) -> None:
        import pandas as pd

        self.open["rows"].append({"round": round, **numbers})
        write_atomically(self.open["path"], csv_frame(pd.DataFrame(self.open["rows"])))


@part("callback", "tensorboard")
class TensorBoard(Tracker):
    """Curves for TensorBoard in the folder `tensorboard` of the run: ``tensorboard --logdir runs`` shows all runs."""

    def begin(self, folder: Path, setup: Setup, round: int) -> bool:
        """Open a file of events; a resumed run hides rounds that it makes again."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_package("the callback tensorboard", "tensorboard", "tracking") from None
        path = folder / "tensorboard"
        is_new = not path.exists()
        self.open["writer"] = SummaryWriter(str(path), purge_step=None if is_new else round + 1)
        return is_new

    def log(self, round: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            # A slash makes groups on the page.
            self.open["writer"].add_scalar(name.replace(".", "/"), number, round)
        self.open["writer"].flush()

    def end(self) -> None:
        self.open.pop("writer").close()


@part("callback", "wandb")
class WandB(Tracker):
    """Weights & Biases. Nothing leaves this machine unless `mode` says so; ``wandb sync`` sends offline runs later."""

    project: str = "fedblend"
    """Project that runs belong to."""
    mode: Literal["offline", "online"] = "offline"
    """Where rounds go: to the run's folder `wandb` (`offline`), or to the service (`online`)."""

    def begin(self, folder: Path, setup: Setup, round: int) -> bool:
        try:
            import wandb
        except ImportError:
            raise missing_package("the callback wandb", "wandb", "tracking") from None
        known = folder / "wandb.json"
        is_new = not known.exists()
        if is_new:
            write_json(known, {"id": secrets.token_hex(4)})
        identity = json.loads(known.read_text(encoding="utf-8"))["id"]
        try:
            self.open["run"] = wandb.init(
                project=self.project,
                name=f"{folder.parent.name}/{folder.name}",
                id=identity,
                resume="allow",
                mode=self.mode,
                dir=str(folder),
                config=as_table(setup.experiment),
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # of wandb's own kinds: no account, no network
            told = f"callbacks: wandb cannot begin a run ({legible(error)}); valid: mode = 'offline'"
            raise FedblendError(told) from None
        return is_new

    def log(self, round: int, numbers: dict[str, float]) -> None:
        self.open["run"].log({name.replace(".", "/"): number for name, number in numbers.items()}, step=round)

    def end(self) -> None:
        self.open.pop("run").finish()


STORES = ("http", "https", "sqlite", "postgresql", "mysql", "file", "databricks")


def _known_store(uri: str) -> str:
    if "@" in uri.partition("://")[2].partition("/")[0] or "password=" in uri:
        raise FedblendError(
            "callbacks: mlflow: uri: it holds a user's name or password, and the run's folder keeps it in plain text; "
            "valid: a uri without them (http: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD), or no uri, "
            "with the whole one in MLFLOW_TRACKING_URI"
        )
    if "://" in uri and uri.split("://")[0] not in STORES:
        raise FedblendError(f"callbacks: mlflow: uri: '{uri}' is no store of MLflow; valid: a folder, or http(s)://...")
    return uri


@part("callback", "mlflow")
class MLflow(Tracker):
    """MLflow, with an MLflow run for each run, in the experiment of the study's name."""

    uri: Annotated[str, AfterValidator(_known_store)] = ""
    """Where runs are kept: a folder, or an address such as `http://localhost:5000` or `sqlite:///mlflow.db`. By default
    `$MLFLOW_TRACKING_URI`, where alone a password may be, and without it the folder `mlruns` beside the run's folder.
    """

    def begin(self, folder: Path, setup: Setup, round: int) -> bool:
        # MLflow refuses stores in folders without the first, and reports its use without the second.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise missing_package("the callback mlflow", "mlflow", "tracking") from None
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or str(folder.parent / "mlruns")
        known = folder / "mlflow.json"
        is_new = not known.exists()
        try:
            client = mlflow.MlflowClient(uri if ":" in uri else Path(uri).absolute().as_uri())
            if is_new:
                write_json(known, {"run": _new_run(client, folder, setup)})
            run = json.loads(known.read_text(encoding="utf-8"))["run"]
            client.update_run(run, status="RUNNING")
        except (MlflowException, OSError) as error:
            # The environment's uri may hold a password, and the error the uri.
            where = uri if uri == self.uri or "://" not in uri else "$MLFLOW_TRACKING_URI"
            raise FedblendError(f"callbacks: mlflow: {where}: {legible(error).replace(uri, where)}") from None
        self.open.update(client=client, run=run)
        return is_new

    def log(self, round: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name.replace(".", "/"), number, now, round) for name, number in numbers.items()]
        self.open["client"].log_batch(self.open["run"], metrics)

    def end(self) -> None:
        self.open["client"].set_terminated(self.open["run"])


def _new_run(client: Any, folder: Path, setup: Setup) -> str:
    name = folder.parent.name or "fedblend"
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    identity = str(client.create_run(number, run_name=folder.name).info.run_id)
    for field, value in flatten(as_table(setup.experiment)).items():
        client.log_param(identity, field, str(value)[:500])
    return identity
