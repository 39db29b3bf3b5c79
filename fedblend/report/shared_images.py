"""Images that left each client, read from a run's checkpoint and converted back to pixels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.analysis.plotting import ClientImage, label_text, png_data_url
from fedblend.analysis.privacy.seed_trace import SeedTrace, seed_traces
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.data.scale import Scaler
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.sharing.synthetic import MatchedSamples
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, Outcome

IMAGE_ENTRIES = ("x", "seeds")  # Names of the checkpoint's entries that are images
MAX_IMAGES = 24  # Largest number of images shown of one run
MAX_STRIPS = 6  # Largest number of seeds shown step by step
GAP, ZOOM = 3, 3  # Pixels between two images of a strip, and the factor by which it is enlarged


@dataclass(frozen=True)
class Gallery:
    """Images that left the clients of one run."""

    methods: tuple[str, ...]
    """The methods that share exactly these images."""
    seed: int
    raw: bool
    caption: str
    shown: int
    entries: int
    """How many images left the clients."""
    images: list[ClientImage]
    strips: list[ClientImage]
    """Single seeds step by step, where the run's data are available."""

    @property
    def size(self) -> int:
        """Bytes of the images on a page."""
        return sum(len(image.url) for image in (*self.images, *self.strips))


def galleries(groups: Sequence[Group]) -> list[Gallery]:
    """A gallery for each way of sharing that sends images, of the first seed whose run has any.

    Methods with the same sharing, split and seed have one gallery. Runs whose images cannot be shown (no checkpoint,
    hidden states, text) are left out.
    """
    found: dict[str, Gallery] = {}
    for g in groups:
        for outcome in g.outcomes:
            key = _sharing_key(outcome)
            known = found.get(key)
            gallery = replace(known, methods=(*known.methods, g.name)) if known else _gallery(outcome, g.name)
            if gallery is not None:
                found[key] = gallery
                break
    return list(found.values())


def _sharing_key(outcome: Outcome) -> str:
    fields = ("data", "scale", "partition", "fraction", "holdout", "arrival", "policy", "seed", "protection")
    values = {field: outcome.config.get(field) for field in fields}
    return json.dumps(values | {"sharing": outcome.config["method"].get("sharing")}, sort_keys=True, default=str)


def _gallery(outcome: Outcome, method: str) -> Gallery | None:
    """The gallery of a run; ``None`` if it shared no images. Raises :class:`FedblendError` for a damaged checkpoint."""
    data = outcome.facts.get("data", {})
    sharing_class = _sharing_class(outcome.config)
    leaves = sharing_class is not None and getattr(getattr(sharing_class, "plan", None), "leaves", True)
    if data.get("kind") != "image" or not leaves:
        return None
    with checkpoint.opened(outcome.path) as file:
        keys = [] if file is None else list(file.keys())
        names = [name.removeprefix("entries/") for name in keys if name.startswith("entries/")]
        entry = next((name for name in IMAGE_ENTRIES if name in names), None)
        if entry is None or "y" not in names:
            return None
        x = file.get_slice(f"entries/{entry}")
        labels = {name: file.get_tensor(f"entries/{name}") for name in names if name != entry}
        owner, sizes = file.get_tensor("owner").numpy(), file.get_tensor("shared_sizes").numpy()
        if list(x.get_shape()[1:]) != list(data["shape"]) or not len(owner):
            return None
        if not _are_owners(owner, x.get_shape()[:1], sizes):
            path = outcome.path / checkpoint.NAME
            raise FedblendError(f"{path}: is damaged: its 'owner' does not name the client of each shared entry")
        rows = rows_across_clients(owner, MAX_IMAGES)
        stored = torch.stack([x[int(row)] for row in rows])
    is_bytes = stored.dtype == torch.uint8
    unit = stored / 255 if is_bytes else _to_unit(stored, outcome)
    if unit is None:
        return None
    try:
        sharing = registry.build("sharing", outcome.config["method"]["sharing"])
    except FedblendError:
        sharing = None
    classes = data.get("classes", [])
    chosen = {name: tensor[torch.from_numpy(rows)] for name, tensor in labels.items()}
    texts = _seed_labels(sharing, chosen, classes) or [label_text(y, classes) for y in chosen["y"]]
    images = [
        ClientImage(png_data_url(image), int(owner[row]), text)
        for image, row, text in zip(unit.numpy(), rows, texts, strict=True)
    ]
    caption = _seed_caption(sharing)
    raw = is_bytes and caption is None
    if isinstance(sharing, MatchedSamples):
        caption = "Each image is a synthetic sample, which its client learned from noise by distribution matching."
    caption = caption or _means_caption(outcome.config, sizes[np.unique(owner)], raw)
    strips = _seed_strips(outcome.path, sharing, rows_across_clients(owner, MAX_STRIPS), classes)
    return Gallery((method,), outcome.seed, raw, caption, len(rows), len(owner), images, strips)


def _are_owners(owner: np.ndarray, entries: list[int], sizes: np.ndarray) -> bool:
    """Whether ``owner`` is the client of each of so many entries, and ``sizes`` has a number for each client."""
    if owner.dtype != np.int64 or sizes.dtype != np.int64 or list(owner.shape) != entries or sizes.ndim != 1:
        return False
    return bool(0 <= owner.min() <= owner.max() < len(sizes))


def _sharing_class(config: Mapping[str, Any]) -> type | None:
    try:
        return registry.find("sharing", config["method"]["sharing"]["name"])
    except (FedblendError, KeyError, TypeError):
        return None


def rows_across_clients(owner: np.ndarray, most: int) -> np.ndarray:
    """Up to ``most`` row indices, in order: the first row of every client before any client's second.

    ``owner`` [n] is the client of each row.
    """
    order = np.argsort(owner, kind="stable")
    turn = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])
    return np.sort(order[np.argsort(turn, kind="stable")][:most])


def _to_unit(images: torch.Tensor, outcome: Outcome) -> torch.Tensor | None:
    """Scaled images as [0, 1] with ink as 1; ``None`` if the run's record of its scale cannot be inverted."""
    if outcome.config["method"]["sharing"].get("scale") == "unit":
        return images.clamp(0, 1)
    facts = outcome.facts.get("scale", {})
    if "factor" not in facts or "offset" not in facts:
        return None
    shape = (-1, *[1] * (images.dim() - 2))
    factor, offset = (torch.tensor(facts[name]).reshape(shape) for name in ("factor", "offset"))
    # Images are stored as bytes, so the unit scale is pixels / 255, inverted where white is paper.
    inverted = bool(facts.get("inverted", False))
    unit_factor = torch.full_like(factor, -1 / 255 if inverted else 1 / 255)
    scaler = Scaler(str(facts.get("name")), inverted, factor, offset, unit_factor, torch.full_like(factor, inverted))
    return scaler.to_unit(images)


def _means_caption(config: Mapping[str, Any], sizes: np.ndarray, raw: bool) -> str:
    """How many samples each image is the mean of, and what else was done; ``sizes``: clients' samples at sharing."""
    if raw:
        return "Each image is one raw sample."
    sharing = config["method"]["sharing"]
    size = sharing.get("samples_per_mean")
    low, high = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
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
        text += f" The server averages {sharing['server_average']} at a time before it sends them to clients."
    return text


# Seeds -----------------------------------------------------------------------------------------------------------


def _seed_labels(sharing: object, entries: Mapping[str, torch.Tensor], classes: Sequence[str]) -> list[str] | None:
    """The labels of each seed in ``entries`` (y, dummies) as text; ``None`` unless seeds are mixed or encoded."""
    names = list(classes)
    if isinstance(sharing, XorSeeds):
        pairs = zip(entries["y"].tolist(), entries["dummies"][:, 0].tolist(), strict=True)
        return [f"{names[target]} XOR {names[dummy]}" for target, dummy in pairs]
    if isinstance(sharing, MixedTargetSeeds):
        dummies = entries["dummies"].long()
        shares = torch.tensor(sharing.shares(dummies.shape[1]))
        return _mixed_labels(torch.cat([entries["y"].long()[:, None], dummies], dim=1), shares, names)
    if isinstance(sharing, MixedSeeds):
        return _mixed_labels(entries["y"].long(), torch.tensor([sharing.lam, 1 - sharing.lam]), names)
    return None


def _mixed_labels(labels: torch.Tensor, shares: torch.Tensor, names: Sequence[str]) -> list[str]:
    """The mixture of labels of each row as text: ``labels`` [n, k], ``shares`` [k]."""
    soft = (F.one_hot(labels, len(names)) * shares[:, None]).sum(1)
    return [label_text(row, names) for row in soft]


def _seed_caption(sharing: object) -> str | None:
    """What each image is; ``None`` unless ``sharing`` shares mixed or encoded seeds."""
    if isinstance(sharing, XorSeeds):
        text = f"Each image is a sample of one label{_blend(sharing)}, encoded by XOR with a sample of another label."
        if sharing.offset:
            return f"{text} The other sample was raised by random grey levels from 0 to {sharing.offset}."
        return f"{text} Where the other sample is black, the first one is visible unchanged."
    if isinstance(sharing, MixedTargetSeeds):
        return f"Each image is a sample of one label{_blend(sharing)}, mixed up with samples of others."
    if isinstance(sharing, MixedSeeds):
        inverse = ", which the server mixes inversely with that of another device" * sharing.inverse
        return f"Each image is the mixture of two samples of different labels{inverse}."
    return None


def _blend(sharing: Any) -> str:
    return f", a blend of up to {sharing.p}," if sharing.p > 1 else ""


def _seed_strips(run: Path, sharing: object, rows: np.ndarray, classes: Sequence[str]) -> list[ClientImage]:
    """Some of a run's seeds step by step, an image each; empty where the run's data are not available.

    From the left: the raw target and dummy, the sent seed, the server's own sample, and the decoded sample; in MixFL
    the first three (XorMixFL, Figure 2).
    """
    if not isinstance(sharing, XorSeeds | MixedTargetSeeds):
        return []
    try:
        state, directory = checkpoint.read(run), RunDirectory(run)
        directory.require_samples_here()
        traces = seed_traces(directory.load_setup(), state, rows) if state is not None else []
    except (FedblendError, OSError):
        return []
    return [ClientImage(png_data_url(_strip(trace)), trace.client, _strip_caption(trace, classes)) for trace in traces]


def _strip(trace: SeedTrace) -> np.ndarray:
    steps = [
        image
        for image in (trace.target, trace.dummy, trace.sent, trace.server_dummy, trace.decoded)
        if image is not None
    ]
    white = np.full((*steps[0].shape[:2], GAP), 255, np.uint8)
    parts = [part for image in steps for part in (image.numpy(), white)][:-1]
    return np.concatenate(parts, axis=2).repeat(ZOOM, 1).repeat(ZOOM, 2) / 255


def _strip_caption(trace: SeedTrace, classes: Sequence[str]) -> str:
    target, dummy = (classes[label] for label in trace.labels)
    caption = f"{target}, {dummy}, the sent seed"
    return f"{caption}, the server's {dummy}, the decoded sample" if trace.decoded is not None else caption
