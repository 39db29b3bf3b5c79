"""The task of a site's client in one round, and the site's memory between messages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context

from fedblend.core.errors import FedblendError, legible
from fedblend.core.files import sole_writer
from fedblend.core.setup import Setup
from fedblend.core.trees import add_prefix, strip_prefix
from fedblend.engines.loop_engine import LoopEngine
from fedblend.flower.messages import MessageContent, Tensors, to_record
from fedblend.flower.secrets import private_folder
from fedblend.flower.site import UNWRITTEN, Site
from fedblend.runs import checkpoint

KEPT = ("parts", "parts-before", "own", "own-before", "shared")
"""Tables that nobody but the client has: what parts keep, its own weights, and shared data that do not leave it."""

MOST_RUNS = 100  # Runs of which a site keeps these tables on its disk: a server names as many as it likes
WHAT_IS_KEPT = "what this site keeps of a run"  # What is in ``audit.state``, for messages


@dataclass(frozen=True)
class ClientTask:
    """A client at its site in one round: its engine, its memory, and the site's policy."""

    engine: LoopEngine
    site: Site
    client: int
    round: int
    memory: Memory
    begin: Callable[[], None] = field(default=lambda: None)
    """Counts a training or a masked payload, before it is computed."""
    covers: Callable[[np.ndarray, np.ndarray], None] = field(default=lambda tags, groups: None)
    """Notes the samples of what is shared, as :class:`SampleSet` has them; may raise :class:`RefusedByPolicy`."""
    counts: Callable[[str], None] | None = None
    """Notes the digest of a request to share and of its result; ``None`` for other requests."""

    @property
    def setup(self) -> Setup:
        return self.engine.setup

    @property
    def size(self) -> int:
        """Samples that the client holds in this round."""
        return int(self.setup.sizes(self.round)[self.client])


Work = Callable[[ClientTask, dict[str, Any], Tensors], MessageContent]
"""A handler of messages: fields and tensors of the reply, from those of the message."""


class Memory:
    """Tables of tensors by name, each with a mark that says which one it is (a round, a digest).

    Flower hands the context of a node to every process that answers one of its messages, for as long as the run and
    the SuperNode live. A site with a site file also keeps the tables of :data:`KEPT` on its disk, in the folder
    ``audit.state`` for ``audit.jsonl``: one file for each run directory and client, which :meth:`save` replaces whole.
    A restarted SuperNode, or the Flower run of a restarted server, has no context and reads the file. Only the site's
    user can read the folder. ``run`` is the random name of the server's run directory: no other server can guess it.
    """

    def __init__(self, context: Context, site: Site | None = None, client: int = 0, run: str = "") -> None:
        self.state, self.path = context.state, None
        if site is not None and site.audit is not None:
            folder = Path(site.audit).with_suffix(".state")
            # The server chooses the name.
            digest = hashlib.sha256(run.encode()).hexdigest()[:32]
            self.path = folder / f"{digest}-{client}.safetensors"

    def keep(self, name: str, mark: str, tensors: Tensors) -> None:
        """Keep a table in place of the previous one."""
        if name in KEPT:
            self._restore()
        self.state[name] = to_record(tensors)
        self.state[f"{name}-mark"] = ConfigRecord({"mark": mark})

    def mark(self, name: str) -> str | None:
        """The mark of the kept table, or ``None``."""
        if name in KEPT:
            self._restore()
        marks = self.state.config_records
        return str(marks[f"{name}-mark"]["mark"]) if f"{name}-mark" in marks else None

    def recall(self, name: str, mark: str) -> dict[str, torch.Tensor] | None:
        """The kept table, or ``None`` if its mark is another."""
        if self.mark(name) != mark:
            return None
        return {key: torch.from_numpy(array.numpy()) for key, array in self.state.array_records[name].items()}

    def save(self) -> None:
        """Write the tables that nobody else has to the site's disk. Raises :class:`FedblendError` if that fails."""
        if self.path is None:
            return
        marks = {name: mark for name in KEPT if (mark := self.mark(name)) is not None}
        tables = {f"{name}/": self.recall(name, mark) or {} for name, mark in marks.items()}
        tensors = {path: t for name, table in tables.items() for path, t in add_prefix(name, table).items()}
        private_folder(self.path.parent, WHAT_IS_KEPT)
        with sole_writer(self.path.parent):
            checkpoint.write_table(self.path, {"marks": marks}, tensors, UNWRITTEN)
            kept = sorted(self.path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
            for ended in kept[:-MOST_RUNS]:
                ended.unlink()

    def _restore(self) -> None:
        if self.path is None or any(f"{name}-mark" in self.state for name in KEPT) or not self.path.exists():
            return
        private_folder(self.path.parent, WHAT_IS_KEPT)
        try:
            fields, tensors = checkpoint.read_table(self.path)
            marks = {name: str(mark) for name, mark in fields["marks"].items() if name in KEPT}
        except (*checkpoint.DAMAGED, AttributeError) as error:
            raise FedblendError(
                f"{self.path}: is damaged: {legible(error)}; it has what only this site keeps of a run; restore it "
                "from a copy, or begin a new run"
            ) from None
        for name, mark in marks.items():
            self.state[name] = to_record(strip_prefix(f"{name}/", tensors))
            self.state[f"{name}-mark"] = ConfigRecord({"mark": mark})
