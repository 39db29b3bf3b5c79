"""A round of a run as it begins: what its clients are plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend import engines
from fedblend.analysis.attacks.metrics import WINDOW
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.engines.autotune import EnginePlan
from fedblend.experiment.setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, only_run
from fedblend.runs.runner import one_thread
from fedblend.runs.warm_start import first_weights

Watch = Callable[[int, int], None]
"""Called with how many rounds are made again, and of how many."""


@dataclass(frozen=True)
class RoundSnapshot:
    """The round that follows ``round`` rounds of a run: what clients are plan in it (``task``), and its ``cohort``."""

    run: RunDirectory
    setup: Setup
    round: int
    task: TrainTask
    cohort: tuple[int, ...]

    @staticmethod
    def load(run: Path | str | RunDirectory, round: int, watch: Watch | None = None) -> RoundSnapshot:
        """The moment at which a run has made ``round`` rounds (0: the model is untrained).

        The checkpoint holds the last round's model; for an earlier one the run's rounds are made again from the start,
        in this process and with the engine that it had (``watch`` follows). What is shared in the round is shared.

        Raises :class:`FedblendError` for rounds that were not made, runs whose clients send no model, and data that
        are no labelled images.
        """
        directory = run if isinstance(run, RunDirectory) else only_run(Path(run))
        experiment = directory.experiment()
        reached = checkpoint.round_of(directory.path)
        if reached is None:
            raise FedblendError(f"{directory.path}: has no checkpoint (or a damaged one), so no model to attack")
        if not 0 <= round <= reached:
            raise FedblendError(
                f"round: {round} is not valid: this run is kept up to round {reached}; valid: 0 to {reached}"
            )
        _require_models(experiment)
        setup = make_setup(experiment)
        _require_images(setup)
        with one_thread():
            task, cohort = _task_of(directory, setup, round, reached, watch)
        return RoundSnapshot(directory, setup, round, task, cohort)


def _require_models(experiment: Any) -> None:
    upload = experiment.method.upload
    if not (upload.is_model and upload.trains):
        raise FedblendError(
            f"method.upload: clients of this run send '{upload.name}', no model that an update could be plan from; "
            "valid: runs whose clients send models"
        )


def _require_images(setup: Setup) -> None:
    shape = list(setup.data.train.x.shape[1:])
    if setup.data.kind != "image" or setup.task.kind != "classification":
        raise FedblendError(
            f"data: '{setup.data.name}' holds {setup.data.kind} for {setup.task.kind}; attacks rebuild images that "
            "have labels"
        )
    if min(shape[-2:]) < WINDOW:
        raise FedblendError(
            f"data: images of '{setup.data.name}' are of shape {shape}, but the measures of an attack (SSIM) need at "
            f"least {WINDOW} x {WINDOW} pixels"
        )


def _task_of(
    directory: RunDirectory, setup: Setup, round: int, reached: int, watch: Watch | None
) -> tuple[TrainTask, tuple[int, ...]]:
    """What the clients of a round were plan when they began, and which they were."""
    plan = directory.facts().get("engine")
    engines.require_device(setup.experiment.device)
    engine = engines.make(setup, EnginePlan(**{**plan, "ranks": 1}) if plan else engines.plan_engine(setup, 1, 1))
    try:
        loop = RoundLoop(setup, engine)
        begun = loop.begin_round(_state_at(directory, loop, round, reached, watch))
        return begun.task, tuple(begun.cohort)
    finally:
        engine.close()


def _state_at(directory: RunDirectory, loop: RoundLoop, round: int, reached: int, watch: Watch | None) -> RunState:
    """The state after a round: the checkpoint's, or of rounds that are made again."""
    if round == reached:
        state = checkpoint.read(directory.path)
        assert state is not None
        return checkpoint.match_model(state, loop.setup.weights(), len(loop.setup.population), directory.path)
    state, _ = loop.start(first_weights(loop.setup, directory.path))
    for made in range(round):
        if watch:
            watch(made, round)
        state, _ = loop.round(state)
    if watch and round:
        watch(round, round)
    return state
