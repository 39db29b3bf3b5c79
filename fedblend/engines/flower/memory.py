"""What a client remembers from one message to the next: tables of tensors in Flower's context."""

from __future__ import annotations

import torch
from flwr.app import ConfigRecord, Context

from fedblend.engines.flower.messages import Tensors, arrays


class Memory:
    """Tables of tensors by name, each with a mark that says which one it is (a round, a digest).

    Flower hands the context of a node to every process that answers one of its messages, for as long as the run and
    the SuperNode live.
    """

    def __init__(self, context: Context) -> None:
        self.state = context.state

    def keep(self, name: str, mark: str, tensors: Tensors) -> None:
        """Remember a table in place of the one before."""
        self.state[name] = arrays(tensors)
        self.state[f"{name}-mark"] = ConfigRecord({"mark": mark})

    def mark(self, name: str) -> str | None:
        """The mark of the table that is remembered, or ``None`` where none is."""
        marks = self.state.config_records
        return str(marks[f"{name}-mark"]["mark"]) if f"{name}-mark" in marks else None

    def recall(self, name: str, mark: str) -> dict[str, torch.Tensor] | None:
        """The table of this mark, or ``None`` where another one, or none, is remembered."""
        if self.mark(name) != mark:
            return None
        return {key: torch.from_numpy(array.numpy()) for key, array in self.state.array_records[name].items()}
