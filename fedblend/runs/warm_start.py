"""Warm start: a run whose first weights are another run's model."""

from __future__ import annotations

from pathlib import Path

import torch

from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.trees import differing, in_order
from fedblend.experiment.config import Experiment
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, how_to_resume
from fedblend.runs.predictor import require_one_model


def first_weights(setup: Setup, folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights of the run that ``start`` names, for a run in ``folder``; ``None`` without ``start``.

    Raises :class:`FedblendError` if that run has no checkpoint, is not done, has no one model, or has another
    one.
    """
    given = setup.experiment.start
    if given is None:
        return None
    # A name alone is a run of the same study. An absolute path stays unchanged when joined.
    path = folder.parent / source_run(setup.experiment)
    state = checkpoint.read(path)
    if state is None:
        raise FedblendError(
            f"start: '{given}': {path} has no checkpoint; valid: the folder of an earlier run, or the name of an "
            "earlier run of this study"
        )
    source = RunDirectory(path)
    if source.status().get("state") != "done":
        how = how_to_resume(path, source.facts())
        raise FedblendError(f"start: '{given}': {path} is not done; finish it first with: {how}")
    try:
        require_one_model(source.experiment(), path)
    except FedblendError as error:
        raise FedblendError(f"start: '{given}': {error}; valid: a run of another method") from None
    own = setup.weights()
    if different := differing(own, state.weights):
        raise FedblendError(
            f"start: '{given}': the model of {path} is another ('{different[0]}' differs); use the same"
        )
    # The file has tensors in order of name; all code expects the model's order.
    return in_order(state.weights, own)


def source_run(experiment: Experiment) -> str:
    """Return the run that an experiment starts from, with its seed filled in; empty without a warm start."""
    return (experiment.start or "").replace("{seed}", str(experiment.seed))
