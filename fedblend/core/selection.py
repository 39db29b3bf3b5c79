"""What a selection is: the choice of the clients that take part in a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from fedblend.core.part import Part
from fedblend.core.trees import Tensors


@dataclass(frozen=True)
class SelectionContext:
    """What a selection may use to choose the clients of a round."""

    round: int
    """The round, counted from 0."""
    clients: np.ndarray
    """Clients that may be chosen, in order, int64 [n]: they hold samples, and no late upload of theirs is awaited."""
    number: int
    """Clients to choose, at most: ``train.cohort``, or n where that is less."""
    sizes: np.ndarray
    """Samples that each client of the federation holds in this round, int64 [all clients]."""
    state: Tensors
    """What the selection keeps."""
    rng: np.random.Generator
    """The round's own generator."""
    losses: Callable[[np.ndarray], np.ndarray]
    """Sends the model to these clients, which reply with their mean loss under it: float64 [clients], NaN for one of
    which no loss arrives. For selections by "losses" only."""


class Selection(Part):
    """Base of all selections. Override :meth:`choose`; the other methods keep a table from round to round."""

    to_define = ("choose",)
    renamed: ClassVar[Mapping[str, str]] = {"asks_losses": 'by = "losses"', "is_uniform": 'by = "chance"'}
    by: Literal["chance", "losses", "other"] = "other"
    """"losses" where :meth:`choose` asks clients for losses; "chance" only where each set of as many clients is equally
    likely: then, and only then, secret choices make noise hide more.
    """

    @property
    def by_losses(self) -> bool:
        """Whether losses decide who is chosen."""
        return self.by == "losses" or type(self).after_round is not Selection.after_round

    def require_possible(self, holding: np.ndarray, cohort: int) -> None:
        """Raise :class:`FedblendError` if a ``cohort`` cannot be chosen from the clients ``holding`` samples."""

    def init_state(self, clients: int) -> dict[str, torch.Tensor]:
        """The table before the first round, in a federation of so many clients."""
        return {}

    def choose(self, context: SelectionContext) -> Any:
        """The clients of the round, each once, in any order: int64 [at most ``context.number``]."""
        raise TypeError(f"{type(self).__name__} defines no choose")

    def after_round(self, state: Tensors, uploads: Sequence[tuple[int, int, float | None]]) -> dict[str, torch.Tensor]:
        """The next table, from client, samples and mean training loss of each good upload, if the loss is known."""
        return dict(state)


def draw(rng: np.random.Generator, clients: np.ndarray, number: int, log_weights: np.ndarray) -> np.ndarray:
    """Draw up to ``number`` clients one after another, each among those that are left by exp(``log_weights``).

    The largest of log_weights + Gumbel noise have this distribution, in this order (Vieira 2014); no weight is too
    small.
    """
    return clients[np.argsort(-(log_weights + rng.gumbel(size=len(clients))), kind="stable")[:number]]
