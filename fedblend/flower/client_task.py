"""The task of a site's client in one round, and the site's memory between messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, Context

from fedblend.core.setup import Setup
from fedblend.engines.loop import LoopEngine
from fedblend.flower.messages import MessageContent, Tensors, to_record
from fedblend.flower.site import Site


@dataclass(frozen=True)
class ClientTask:
    """A client at its site in one round: its engine, its memory, and the site's policy."""

    engine: LoopEngine
    site: Site
    client: int
    round: int
    memory: Memory
    begin: Callable[[], None] = field(default=lambda: None)
    """Counts a masked payload, before it is computed."""

    @property
    def setup(self) -> Setup:
        """The engine's setup."""
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
    the SuperNode live.
    """

    def __init__(self, context: Context) -> None:
        self.state = context.state

    def keep(self, name: str, mark: str, tensors: Tensors) -> None:
        """Keep a table in place of the previous one."""
        self.state[name] = to_record(tensors)
        self.state[f"{name}-mark"] = ConfigRecord({"mark": mark})

    def mark(self, name: str) -> str | None:
        """The mark of the kept table, or ``None``."""
        marks = self.state.config_records
        return str(marks[f"{name}-mark"]["mark"]) if f"{name}-mark" in marks else None

    def recall(self, name: str, mark: str) -> dict[str, torch.Tensor] | None:
        """The kept table, or ``None`` if its mark is another."""
        if self.mark(name) != mark:
            return None
        return {key: torch.from_numpy(array.numpy()) for key, array in self.state.array_records[name].items()}
