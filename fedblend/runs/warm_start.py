"""A warm start: the first weights of a run that goes on from another run's model."""

from __future__ import annotations

from pathlib import Path

import torch

from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.trees import differing, in_order
from fedblend.experiment.config import Experiment
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory


def first_weights(setup: Setup, folder: Path) -> dict[str, torch.Tensor] | None:
    """The weights of the run that ``start`` names, for a run that lies in ``folder``; ``None`` without ``start``.

    Raises :class:`FedblendError` for a run without a checkpoint, and for one with another model.
    """
    given = setup.experiment.start
    if given is None:
        return None
    # A name alone is a run of the same study. What is joined to an absolute path stays as it is.
    path = folder.parent / source_run(setup.experiment)
    state = checkpoint.read(path)
    if state is None:
        raise FedblendError(
            f"start: '{given}': {path} has no checkpoint; valid: the folder of a run that was made before, or the name "
            "of an earlier one of this study"
        )
    if RunDirectory(path).status().get("state") != "done":
        raise FedblendError(f"start: '{given}': {path} is not done; go on with it first: fedblend resume {path}")
    own, found = setup.weights(), state.weights
    if apart := differing(own, found):
        raise FedblendError(f"start: '{given}': the model of {path} is another ('{apart[0]}' differs); take the same")
    # The file holds tensors in order of name; all code sees them in the model's order.
    return in_order(found, own)


def source_run(experiment: Experiment) -> str:
    """The run that an experiment begins with, its own seed filled in; empty without one."""
    return (experiment.start or "").replace("{seed}", str(experiment.seed))
