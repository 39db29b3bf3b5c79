"""What seeds for the server show, in words: the labels of each, and what was done to the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.analysis.plotting import Picture, as_png, mixture
from fedblend.analysis.privacy.seed_trace import SeedTrace, seed_traces
from fedblend.core.errors import FedblendError
from fedblend.experiment.setup import make_setup
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory

STRIPS = 6
"""Seeds of which it is shown what became of them."""

GAP, TIMES = 3, 3
"""Pixels between two images of a strip, and how many times as large it is shown."""

OPEN = "Where the hiding sample is black, the hidden one is seen as it is."


def labels_of(sharing: object, entries: Mapping[str, torch.Tensor], classes: Sequence[str]) -> list[str] | None:
    """The labels of each seed in words; ``None`` for what is shared by labels or mixtures of labels alone.

    ``entries`` are tensors with a row a seed: ``y``, and ``dummies`` where there are any.
    """
    names = list(classes)
    if isinstance(sharing, XorSeeds):
        pairs = zip(entries["y"].tolist(), entries["dummies"][:, 0].tolist(), strict=True)
        return [f"{names[own]} XOR {names[dummy]}" for own, dummy in pairs]
    if isinstance(sharing, MixedTargetSeeds):
        dummies = entries["dummies"].long()
        shares = torch.tensor(sharing.shares(dummies.shape[1]))
        return _shares(torch.cat([entries["y"].long()[:, None], dummies], dim=1), shares, names)
    if isinstance(sharing, MixedSeeds):
        return _shares(entries["y"].long(), torch.tensor([sharing.lam, 1 - sharing.lam]), names)
    return None


def _shares(labels: torch.Tensor, shares: torch.Tensor, names: Sequence[str]) -> list[str]:
    soft = (F.one_hot(labels, len(names)) * shares[:, None]).sum(1)
    return [mixture(row, names) for row in soft]


def covers_of(sharing: object) -> str | None:
    """What each image is, in a sentence or two; ``None`` for anything but mixed or encoded seeds."""
    if isinstance(sharing, XorSeeds):
        told = f"Each image is a sample of one label{_blend(sharing)}, hidden by the XOR with one of another."
        if sharing.offset:
            return f"{told} Hiding samples were raised by random grey levels from 0 to {sharing.offset}."
        return f"{told} {OPEN}"
    if isinstance(sharing, MixedTargetSeeds):
        return f"Each image is a sample of one label{_blend(sharing)}, mixed up with samples of others."
    if isinstance(sharing, MixedSeeds):
        undone = ", which the server mixes inversely with that of another device" * sharing.inverse
        return f"Each image is the mixture of two samples of different labels{undone}."
    return None


def _blend(sharing: Any) -> str:
    return f", a blend of up to {sharing.p}," if sharing.p > 1 else ""


# What became of single samples ------------------------------------------------------------------------------


def strips_of(run: Path, sharing: object, rows: np.ndarray, classes: Sequence[str]) -> list[Picture]:
    """What became of some of a run's seeds, a picture each; none where the run's data are not at hand any more.

    From the left: the raw target and dummy, what was sent, the server's own sample, and what it decoded; in MixFL the
    first three (Figure 2).
    """
    if not isinstance(sharing, XorSeeds | MixedTargetSeeds):
        return []
    try:
        state = checkpoint.read(run)
        told = seed_traces(make_setup(RunDirectory(run).experiment()), state, rows) if state is not None else []
    except (FedblendError, OSError):
        return []
    return [Picture(as_png(_strip(one)), one.client, _words(one, classes)) for one in told]


def _strip(one: SeedTrace) -> np.ndarray:
    """The images of a story side by side on white, [C, H, W] in [0, 1]."""
    shown = [image for image in (one.target, one.dummy, one.sent, one.server_dummy, one.decoded) if image is not None]
    white = np.full((*shown[0].shape[:2], GAP), 255, np.uint8)
    parts = [part for image in shown for part in (image.numpy(), white)][:-1]
    return np.concatenate(parts, axis=2).repeat(TIMES, 1).repeat(TIMES, 2) / 255


def _words(one: SeedTrace, classes: Sequence[str]) -> str:
    target, dummy = (classes[label] for label in one.labels)
    words = f"{target}, {dummy}, what was sent"
    return f"{words}, the server's {dummy}, what it decoded" if one.decoded is not None else words
