"""What left each client, as images: read from a run's checkpoint, on the way back to pixels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fedblend.analysis.plotting import Picture, as_png, mixture
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.data.scale import Scaler
from fedblend.report.privacy import part_class
from fedblend.report.seeds import STRIPS, covers_of, labels_of, strips_of
from fedblend.runs import checkpoint
from fedblend.runs.groups import Group, Outcome

IMAGES = ("x", "seeds")
"""What images are called among the entries."""

MOST = 24
"""Images shown of one run."""


@dataclass(frozen=True)
class Gallery:
    """Images that left the clients of one run, and what they are; ``methods`` share exactly these.

    ``strips`` show what became of single samples, where the run's data are at hand.
    """

    methods: tuple[str, ...]
    seed: int
    raw: bool
    covers: str
    shown: int
    entries: int
    pictures: list[Picture]
    strips: list[Picture]


def galleries(groups: Sequence[Group]) -> list[Gallery]:
    """A gallery for each way of sharing that sends images, of the first seed's run that has any.

    Methods that share alike, on one split and seed, stand under one gallery. Runs whose images cannot be
    shown (no checkpoint, hidden states, text) are left out.
    """
    made: dict[str, Gallery] = {}
    for g in groups:
        for outcome in g.outcomes:
            known = made.get(_sends(outcome))
            gallery = known or _gallery(outcome, g.name)
            if gallery is None:
                continue
            if known is not None:
                gallery = Gallery(**{**vars(known), "methods": (*known.methods, g.name)})
            made[_sends(outcome)] = gallery
            break
    return list(made.values())


def _sends(outcome: Outcome) -> str:
    """All that decides what leaves the clients of a run."""
    fields = ("data", "scale", "partition", "fraction", "holdout", "arrival", "policy", "seed", "protection")
    decides = {field: outcome.config.get(field) for field in fields}
    return json.dumps(decides | {"sharing": outcome.config["method"].get("sharing")}, sort_keys=True, default=str)


def _gallery(outcome: Outcome, method: str) -> Gallery | None:
    data = outcome.facts.get("data", {})
    sharing = part_class(outcome.config, "sharing")
    path = outcome.path / checkpoint.NAME
    if data.get("kind") != "image" or not getattr(sharing, "leaves_client", False) or not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            names = [name.removeprefix("entries/") for name in file.keys() if name.startswith("entries/")]  # noqa: SIM118
            images_in = next((name for name in IMAGES if name in names), None)
            if images_in is None or "y" not in names:
                return None
            x = file.get_slice(f"entries/{images_in}")
            labels = {name: file.get_tensor(f"entries/{name}") for name in names if name != images_in}
            owner, held = file.get_tensor("owner").numpy(), file.get_tensor("shared_sizes").numpy()
            if list(x.get_shape()[1:]) != list(data["shape"]) or not len(owner):
                return None
            rows = spread(owner, MOST)
            images = torch.stack([x[int(row)] for row in rows])
    except (SafetensorError, OSError) as error:
        raise FedblendError(f"{path}: is not a checkpoint of fedblend or is damaged: {error}") from None
    stored = images.dtype == torch.uint8
    unit = images / 255 if stored else _to_unit(images, outcome)
    if unit is None:
        return None
    made = _made(outcome.config)
    chosen = {name: tensor[torch.from_numpy(rows)] for name, tensor in labels.items()}
    classes = data.get("classes", [])
    words = labels_of(made, chosen, classes) or [mixture(y, classes) for y in chosen["y"]]
    shown = zip(unit.numpy(), rows, words, strict=True)
    pictures = [Picture(as_png(image), int(owner[row]), told) for image, row, told in shown]
    raw = stored and covers_of(made) is None
    covers = covers_of(made) or _covers(outcome.config, held[np.unique(owner)], raw)
    strips = strips_of(outcome.path, made, spread(owner, STRIPS), classes)
    return Gallery((method,), outcome.seed, raw, covers, len(rows), len(owner), pictures, strips)


def _made(config: Mapping[str, Any]) -> object:
    """A run's sharing, or ``None`` where it cannot be made here."""
    try:
        return registry.build("sharing", config["method"]["sharing"])
    except FedblendError:
        return None


def spread(owner: np.ndarray, most: int) -> np.ndarray:
    """Up to ``most`` rows, in order: the first of every client before any client's second."""
    order = np.argsort(owner, kind="stable")
    turn = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])
    return np.sort(order[np.argsort(turn, kind="stable")][:most])


def _to_unit(images: torch.Tensor, outcome: Outcome) -> torch.Tensor | None:
    """Scaled images as [0, 1] with ink as 1; ``None`` where the scale does not say how to undo it."""
    if outcome.config["method"]["sharing"].get("scale") == "unit":
        return images.clamp(0, 1)
    facts = outcome.facts.get("scale", {})
    if "factor" not in facts or "offset" not in facts:
        return None
    shape = (-1, *[1] * (images.dim() - 2))
    factor, offset = (torch.tensor(facts[name]).reshape(shape) for name in ("factor", "offset"))
    # Images are stored as bytes, so the way to the unit scale is pixels / 255, turned over where white is paper.
    inverted = bool(facts.get("inverted", False))
    unit_factor = torch.full_like(factor, -1 / 255 if inverted else 1 / 255)
    scaler = Scaler(str(facts.get("name")), inverted, factor, offset, unit_factor, torch.full_like(factor, inverted))
    return scaler.to_unit(images)


def _covers(config: Mapping[str, Any], held: np.ndarray, raw: bool) -> str:
    """How many samples each image stands for, and what else was done to it, in a sentence or two."""
    if raw:
        return "Each image is one raw sample."
    sharing = config["method"]["sharing"]
    size = sharing.get("samples_per_mean")
    low, high = (int(held.min()), int(held.max())) if len(held) else (0, 0)
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    text = f"Each image is the mean of all samples that its client held when it shared: {span}."
    if isinstance(size, int):
        kind = " of one class" if sharing.get("split") == "class" else ""
        text = f"Each image is the mean of {size} samples{kind} (a client's last group may be smaller)."
        if size == 1:
            text = "Each image is a 'mean' of one sample: a raw sample."
    if sharing.get("noise"):
        text += f" Gaussian noise of standard deviation {sharing['noise']:g} (on the model's input scale) was added."
    if sharing.get("server_average", 1) > 1:
        text += f" Before the server gives them out, it averages {sharing['server_average']} at a time."
    return text
