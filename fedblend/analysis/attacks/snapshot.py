"""A snapshot of a run at the beginning of a round: the task that its clients receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fedblend.analysis.attacks.image_similarity import WINDOW
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.core.state import ClientState, RunState
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, only_run
from fedblend.runs.runner import first_weights, repeating

Watch = Callable[[int, int], None]
"""Called with the number of repeated rounds and their total."""


@dataclass(frozen=True)
class RoundSnapshot:
    """The round after ``round`` rounds of a run: the clients' ``task`` and the ``cohort``."""

    run: RunDirectory
    setup: Setup
    round: int
    task: TrainTask
    cohort: tuple[int, ...]
    kept_by: Callable[[int], ClientState] = lambda client: ClientState()
    """What a client outside the cohort would begin the round with, beside the model."""

    def task_of(self, client: int) -> TrainTask:
        """The task, with what the client keeps even if it is not in the cohort."""
        kept = ClientState() if client in self.cohort else self.kept_by(client)
        return replace(self.task, client_states={**self.task.client_states, client: kept}) if kept else self.task

    @staticmethod
    def load(run: Path | str | RunDirectory, round: int, watch: Watch | None = None) -> RoundSnapshot:
        """Return the snapshot of a run after ``round`` rounds (0: the model is untrained).

        The checkpoint has the last round's model. For an earlier round, the run is repeated from its start, in this
        process and with its own engine; ``watch`` receives the progress. Sharing of the round is repeated too.

        Raises :class:`FedblendError` for rounds after the checkpoint's, runs whose clients send no model, and data
        other than labelled images.
        """
        directory = run if isinstance(run, RunDirectory) else only_run(Path(run))
        reached = checkpoint.round_of(directory.path)
        if reached is None:
            raise FedblendError(
                f"{directory.path}: has no checkpoint, or a damaged one, so there is no model to attack"
            )
        if not 0 <= round <= reached:
            raise FedblendError(
                f"round: {round} is not valid: the checkpoint is of round {reached}; valid: 0 to {reached}"
            )
        upload = directory.experiment().method.upload
        if not (upload.is_model and upload.trains):
            raise FedblendError(
                f"method.upload: clients of this run send '{upload.name}' and no model, so there is no update to "
                "attack; valid: runs whose clients send models"
            )
        directory.require_samples_here()
        setup = directory.load_setup()
        _require_images(setup)
        with repeating(directory, setup) as loop:
            started = loop.begin_round(_state_at(directory, loop, round, reached, watch))
        state, cohort = started.state, tuple(started.cohort)
        return RoundSnapshot(
            directory, setup, round, started.task, cohort, lambda client: loop.cohorts.kept_by(state, client, True)
        )


def _require_images(setup: Setup) -> None:
    shape = list(setup.data.train.x.shape[1:])
    if setup.data.kind != "image" or setup.task.kind != "classification":
        raise FedblendError(
            f"data: '{setup.data.name}' holds {setup.data.kind} for {setup.task.kind}; attacks rebuild images with "
            "classes" + ", not the features of a frozen backbone" * ("backbone" in setup.data.facts)
        )
    if min(shape[-2:]) < WINDOW:
        need = f"SSIM needs at least {WINDOW} x {WINDOW} pixels"
        raise FedblendError(f"data: images of '{setup.data.name}' are of shape {shape}, but {need}")


def _state_at(directory: RunDirectory, loop: RoundLoop, round: int, reached: int, watch: Watch | None) -> RunState:
    """Return the state after a round: from the checkpoint, or by repeating the rounds."""
    if round == reached:
        state = checkpoint.read(directory.path)
        assert state is not None
        return checkpoint.match_model(state, loop.setup.weights(), len(loop.setup.population), directory.path)
    state, _ = loop.start(first_weights(loop.setup, directory.path))
    for done in range(round):
        if watch:
            watch(done, round)
        state, _ = loop.round(state)
    if watch and round:
        watch(round, round)
    return state
