"""Sites with files and data of their own, and the server that lies to them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flower_helpers import Nodes, experiment, order, weights_of
from flwr.app import Context, RecordDict

from fedblend.core.files import read_lines
from fedblend.core.trees import add_prefix
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.toml_tables import write_toml
from fedblend.flower import client as at_site
from fedblend.flower import site as site_policy
from fedblend.flower.audit import AuditLog, ReplayGuard
from fedblend.flower.client_task import ClientTask, Memory
from fedblend.flower.credentials import make_site_key
from fedblend.flower.site import Site


def site_files(
    folder: Path, number: int, of: Mapping[int, dict[str, Any]] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """The node configurations of sites, each with a site file of these fields, or of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = []
    for client in range(number):
        path = folder / f"site-{client}.toml"
        path.write_text(write_toml({**(of or {}).get(client, fields), "audit": f"audit-{client}.jsonl"}))
        configs.append({"partition-id": client, "site": str(path)})
    return configs


def write_peers(folder: Path, names: Iterable[str]) -> None:
    """Make the keys of sites of these names, and ``peers.toml`` with their public halves and names."""
    peers = {}
    for client, name in enumerate(names):
        make_site_key(folder / name)
        peers[str(client)] = f"{(folder / f'{name}.pub').read_text().strip()} {name}"
    (folder / "peers.toml").write_text(write_toml(peers))


def sent(
    log: AuditLog, run: str, round: int, client: int, kind: str, tensors: dict[str, torch.Tensor], trained: bool
) -> None:
    """Record in a log a payload that left."""
    ReplayGuard(None, log, run, round, client, kind).record_sent(tensors, trained)


def audit(folder: Path, client: int) -> list[dict[str, Any]]:
    """The lines of a site's audit log."""
    return read_lines(folder / f"audit-{client}.jsonl")


def sites_with_data(folder: Path, asked: Experiment, **fields: Any) -> list[dict[str, Any]]:
    """The node configurations of four sites whose files name the samples of the experiment's clients."""
    setup = make_setup(asked)
    test = setup.data.test
    files = {c: {**fields, "data": {"name": "npz", "path": f"data-{c}.npz"}} for c in range(4)}
    configs = site_files(folder, 4, files)
    for client in range(4):
        x, y = setup.samples(client, int(setup.population.sizes[client]))
        arrays = {"x": np.concatenate([x, test.x]), "y": np.concatenate([y, test.y])}
        split = np.repeat([0, 1], [len(y), len(test.y)])
        np.savez(folder / f"data-{client}.npz", **arrays, split=split, classes=np.array(setup.data.classes))
    return configs


def task_of(asked: Experiment | LoopEngine, client: int = 0, round: int = 0, **site: Any) -> ClientTask:
    """A client in a round at a site of this policy, which keeps nothing yet."""
    engine = asked if isinstance(asked, LoopEngine) else LoopEngine(make_setup(asked))
    return ClientTask(engine, Site(**site), client, round, Memory(Context(1, 1, {}, RecordDict(), {})))


SAMPLES, MIN_MEAN = 80, 20
"""The samples of a site, which have more pixels than that, and the fewest samples in its means."""


class OwnSite:
    """Client 0 with a site file and 80 samples of its own, and the server that lies to it.

    Its app keeps nothing from message to message, unless :meth:`connect` begins a run of its SuperNode.
    """

    run: Nodes | None = None

    def __init__(self, folder: Path, samples: int = SAMPLES, **fields: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.x = torch.rand(SAMPLES + 80, 1, 16, 16, generator=torch.Generator().manual_seed(0)).numpy()
        self.fields = {"data": {"name": "npz", "path": "own.npz"}, "min_mean": MIN_MEAN, **fields}
        self.config = {"partition-id": 0, "site": str(folder / "site.toml")}
        self.hold(samples)
        shutil.copy(folder / "own.npz", folder / "server.npz")
        self.write(**fields)

    def hold(self, samples: int) -> None:
        """Let the site have its first ``samples`` samples; the server tests on 40 of the same file."""
        self.label(np.arange(samples + 40) % 10, samples)

    def label(self, y: np.ndarray, samples: int = SAMPLES, classes: int = 10) -> None:
        """Write the site's samples with these labels, or numbers."""
        split = np.repeat([0, 1], [samples, len(y) - samples])
        names = {"classes": np.arange(classes)} if y.dtype.kind == "i" else {}
        np.savez(self.folder / "own.npz", x=self.x[: len(y)], y=y, split=split, **names)

    def label_both(self, y: np.ndarray, classes: int = 10) -> None:
        """Write the samples of the site and of the server with these labels."""
        self.label(y, classes=classes)
        shutil.copy(self.folder / "own.npz", self.folder / "server.npz")
        self.write()

    def grid(self) -> Nodes:
        """Four sites with this site's file."""
        return Nodes(self.config | {"partition-id": client} for client in range(4))

    def write(self, **fields: Any) -> None:
        """Write the site file anew."""
        (self.folder / "site.toml").write_text(write_toml(self.fields | fields))
        at_site.engine_of.cache_clear()
        site_policy._read_cached.cache_clear()

    def experiment(self, sharing: Any = None, **changes: Any) -> Experiment:
        """An experiment whose clients share means of 20 samples."""
        means = {"name": "means", "samples_per_mean": 20}
        table = {
            "method": {"name": "fedmix", "sharing": sharing if "name" in (sharing or {}) else means | (sharing or {})},
            "data": {"name": "npz", "path": str(self.folder / "server.npz")},
            "scale": {"name": "unit"},
            "partition": {"name": "iid", "clients": 4},
            "fraction": 1.0,
            "rounds": 40,
        }
        return experiment(**(table | changes))

    def connect(self, run_id: int = 1) -> OwnSite:
        """Begin a run of the site's SuperNode, whose app keeps its memory from message to message."""
        self.run = Nodes([self.config], run_id)
        return self

    def at_once(self) -> OwnSite:
        """A second process of the site, with the memory of now."""
        other, context = copy.copy(self), self.run.contexts[1000]
        other.connect(context.run_id)
        other.run.contexts[1000].state = copy.deepcopy(context.state)
        return other

    def reply(
        self, kind: str, asked: Experiment, round: Any = 0, run_id: int = 1, tensors: Any = None, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The reply of the site's app."""
        grid = self.run or Nodes([self.config], run_id)
        return grid.reply(order(kind, asked, tensors, round=round, **fields))

    def shared(self, asked: Experiment, round: int = 0, run_id: int = 1, **more: Any) -> Any:
        """The shared inputs, [entries, ...], or why there are none."""
        fields, tensors = self.reply("query.share", asked, round, run_id, **more)
        return tensors["x"] if tensors else fields["fault"]

    def trained(
        self, asked: Experiment, run_id: int = 1, weights: Any = None, round: int = 0, **told: Any
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The reply to a request for a model."""
        tensors = weights_of(asked) if weights is None else add_prefix("weights/", weights)
        return self.reply("train", asked, round, run_id, tensors, **told)

    def scored(self, asked: Experiment, weights: Any = None, **told: Any) -> dict[str, Any]:
        """The reply to a request for scores of a model."""
        tensors = weights_of(asked) if weights is None else add_prefix("weights/", weights)
        return self.reply("evaluate", asked, tensors=tensors, **told)[0]

    def ask(self, asked: Experiment, question: dict[str, torch.Tensor]) -> Any:
        """The tensors of an answer, or why there is none."""
        fields, tensors = self.reply("query.ask", asked, tensors=question)
        return tensors or fields["fault"]

    def log(self, *kinds: str) -> list[dict[str, Any]]:
        """The lines of its audit log, of these kinds where they are given."""
        return [line for line in read_lines(self.folder / "audit.jsonl") if line["kind"] in (kinds or (line["kind"],))]

    def left(self) -> list[dict[str, Any]]:
        """The lines of its audit log without refusals."""
        return [line for line in self.log() if "refused" not in line]


def sites_of(folder: Path, run_id: int = 1, **fields: Any) -> Nodes:
    """Four sites with site files in ``folder``."""
    return Nodes(site_files(folder, 4, **fields), run_id)
