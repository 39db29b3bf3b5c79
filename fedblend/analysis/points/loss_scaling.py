"""When loss scaling switched lambda (Fed-AugMix, section IV-E): a run's log does not tell, so it is made again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedblend.core.engine import ClientUpdate, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.engines import require_device
from fedblend.engines.loop import LoopEngine
from fedblend.experiment.setup import make_setup
from fedblend.methods.objectives.augmix import AugMix
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.runner import one_thread


@dataclass(frozen=True)
class Switched:
    """Of a client's round (the first is 1): its ``batches``, and how many of them took the large lambda."""

    round: int
    client: int
    batches: int
    large: int


@dataclass(frozen=True)
class Total:
    """Of a round: the ``batches`` of all its clients, and how many of them took the large lambda."""

    round: int
    batches: int
    large: int

    @property
    def share(self) -> float:
        """The share that took it; 0 where there was no batch."""
        return self.large / max(1, self.batches)


def totals_of(rows: Iterable[Switched]) -> list[Total]:
    """The totals of each round, in order."""
    sums: dict[int, tuple[int, int]] = {}
    for row in rows:
        batches, large = sums.get(row.round, (0, 0))
        sums[row.round] = batches + row.batches, large + row.large
    return [Total(round, *sums[round]) for round in sorted(sums)]


def in_words(totals: Sequence[Total]) -> str:
    """When lambda was the large one, in a sentence.

    >>> in_words([Total(1, 4, 4), Total(2, 4, 4), Total(3, 4, 1), Total(4, 4, 0)])
    'large in all batches of rounds 1 to 2; last in round 3; 9 of 16 batches in all'
    >>> in_words([Total(1, 4, 0)])
    'large in none of 4 batches'
    """
    batches, large = (sum(getattr(one, name) for one in totals) for name in ("batches", "large"))
    if not large:
        return f"large in none of {batches:,} batches"
    first = [one.round for one in totals if one.large < one.batches][:1]
    whole = [one.round for one in totals if not first or one.round < first[0]]
    words = [f"large in all batches of rounds {whole[0]} to {whole[-1]}"] if whole else []
    last = max(one.round for one in totals if one.large)
    words += [f"last in round {last}"] if not whole or last > whole[-1] else []
    return "; ".join([*words, f"{large:,} of {batches:,} batches in all"])


@dataclass
class Noting:
    """An AugMix objective as it is, that also notes of each batch whether its lambda was the large one."""

    objective: AugMix
    flags: list[torch.Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)

    def loss(self, *given: Any) -> torch.Tensor:
        """The objective's own, with this one's :meth:`weight`."""
        return type(self.objective).loss(self, *given)  # type: ignore[arg-type]

    def phases(self) -> tuple[Callable[..., torch.Tensor], ...]:
        """The objective's own, the last of them with this one's :meth:`weight`."""
        return (*self.objective.phases()[:-1], self.loss)

    def weight(self, own: torch.Tensor, divergence: torch.Tensor) -> torch.Tensor:
        """The objective's own."""
        self.flags.append(own > self.objective.threshold * divergence)
        return self.objective.weight(own, divergence)


class _NotingEngine(LoopEngine):
    """The reference engine, which keeps what was noted of each client."""

    def __init__(self, setup: Setup, noting: Noting) -> None:
        super().__init__(setup, setup.experiment.device)
        self.noting = noting
        self.rows: list[Switched] = []

    def train(self, task: TrainTask, clients: Iterable[int]) -> Iterator[ClientUpdate]:
        """Train each client, and count its batches."""
        for client in clients:
            self.noting.flags.clear()
            yield from super().train(task, [client])
            flags = self.noting.flags
            self.rows.append(Switched(task.round + 1, client, len(flags), int(sum(map(bool, flags)))))


def switches(run: Path | str, on_round: Callable[[list[Switched]], None] | None = None) -> list[Switched]:
    """A row for each client of each round of a run: how many of its batches took the large lambda.

    All rounds are made again by the reference engine; ``on_round`` is called with each round's rows. Raises
    :class:`FedblendError` if the run's objective scales no loss.
    """
    directory = RunDirectory(Path(run))
    experiment = directory.experiment()
    objective = experiment.method.objective
    if not isinstance(objective, AugMix) or not (objective.loss_scaling and objective.severity):
        raise FedblendError(
            f"method.objective: '{objective.name}' of {run} switches no lambda; valid: 'augmix' with loss_scaling and "
            "a severity above 0"
        )
    require_device(experiment.device)
    noting = Noting(objective)
    method = experiment.method.model_copy(update={"objective": noting})
    setup = replace(make_setup(experiment), experiment=experiment.model_copy(update={"method": method}))
    rows: list[Switched] = []
    with one_thread():
        engine = _NotingEngine(setup, noting)
        federation = RoundLoop(setup, engine)
        state, _ = federation.start()
        for _ in range(checkpoint.round_of(directory.path) or 0):
            engine.rows = []
            state, _ = federation.round(state)
            rows += engine.rows
            if on_round:
                on_round(engine.rows)
    return rows
