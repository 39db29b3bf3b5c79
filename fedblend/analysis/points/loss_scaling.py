"""Batches in which loss scaling took the large lambda (Fed-AugMix, section IV-E), counted by repeating a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedblend.core.callbacks import Callback
from fedblend.core.engine import CohortResult, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.engines import require_device
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.objectives.augmix import LARGE, AugMix
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.runner import first_weights, one_thread


@dataclass(frozen=True)
class ClientSwitches:
    """A client's batches in one round (from 1), and ``large``, the number of them with the large lambda."""

    round: int
    client: int
    batches: int
    large: int


@dataclass(frozen=True)
class RoundSwitches:
    """All clients' batches in one round, and ``large``, the number of them with the large lambda."""

    round: int
    batches: int
    large: int

    @property
    def share(self) -> float:
        """Fraction of batches with the large lambda; 0 without batches."""
        return self.large / max(1, self.batches)


def sum_by_round(rows: Iterable[ClientSwitches]) -> list[RoundSwitches]:
    """Return the totals of each round, in order."""
    sums: dict[int, tuple[int, int]] = {}
    for row in rows:
        batches, large = sums.get(row.round, (0, 0))
        sums[row.round] = batches + row.batches, large + row.large
    return [RoundSwitches(round, *sums[round]) for round in sorted(sums)]


def describe_switches(totals: Sequence[RoundSwitches]) -> str:
    """Describe the rounds with the large lambda in one line.

    >>> describe_switches([RoundSwitches(i + 1, 4, large) for i, large in enumerate([4, 4, 1, 0])])
    'large in all batches of rounds 1 to 2; last in round 3; 9 of 16 batches in all'
    >>> describe_switches([RoundSwitches(1, 4, 0)])
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


class SwitchCounter(Callback):
    """Count each client's batches with the large lambda, from AugMix's notes on each batch.

    ``rows`` has the rows of all rounds, in order; ``on_round`` is called with the rows of each round.
    """

    def __init__(self, on_round: Callable[[list[ClientSwitches]], None] | None = None) -> None:
        self.on_round = on_round
        self.rows: list[ClientSwitches] = []

    def on_updates(self, task: TrainTask, result: CohortResult) -> None:
        flags = {client: notes[LARGE] for client, notes in result.notes.items() if LARGE in notes}
        rows = [ClientSwitches(task.round + 1, client, len(found), int(found.sum())) for client, found in flags.items()]
        self.rows += rows
        if self.on_round:
            self.on_round(rows)


def switches(run: Path | str, on_round: Callable[[list[ClientSwitches]], None] | None = None) -> list[ClientSwitches]:
    """Return a row for each client of each round of a run: its number of batches with the large lambda.

    All rounds are repeated with the loop engine; ``on_round`` is called with each round's rows. Raises
    :class:`FedblendError` if the run's objective has no loss scaling.
    """
    directory = RunDirectory(Path(run))
    experiment = directory.experiment()
    objective = experiment.method.objective
    if not isinstance(objective, AugMix) or not (objective.loss_scaling and objective.severity):
        raise FedblendError(
            f"method.objective: '{objective.name}' of {run} switches no lambda; valid: 'augmix' with loss_scaling and "
            "a severity above 0"
        )
    directory.require_samples_here()
    require_device(experiment.device)
    counter = SwitchCounter(on_round)
    with one_thread():
        setup = make_setup(experiment)
        engine = LoopEngine(setup, experiment.device)
        engine.notes = True
        loop = RoundLoop(setup, engine, [counter])
        state, _ = loop.start(first_weights(setup, directory.path))
        for _ in range(checkpoint.round_of(directory.path) or 0):
            state, _ = loop.round(state)
    return counter.rows
