"""Checkpoints: one safetensors file whose header carries the scalars as JSON. No pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedblend.errors import FedblendError
from fedblend.federation import State
from fedblend.prefixes import by_client, for_clients, under
from fedblend.runs.files import write_atomically
from fedblend.sharing.base import Pool

NAME = "checkpoint.safetensors"

DAMAGED = (SafetensorError, KeyError, ValueError)
"""What reading raises where a file is no checkpoint, or cut short."""


def write(folder: Path, state: State) -> None:
    """Replace the folder's checkpoint; a failure (a full disk, say) leaves the one before in place.

    Raises :class:`FedblendError` that says what failed and how far the run is kept. Of a million clients that share
    nothing it takes an eighth of a megabyte: a bit each, and no sizes where nobody has shared.
    """
    tensors = {f"weights/{name}": t.contiguous() for name, t in state.weights.items()}
    tensors |= {f"entries/{name}": t.contiguous() for name, t in state.entries.tensors.items()}
    tensors |= {f"server/{name}": t.contiguous() for name, t in state.server.items()}
    tensors |= {f"said/{name}": t.contiguous() for name, t in state.said.items()}
    tensors |= {name: t.contiguous() for name, t in for_clients("own/", state.own).items()}
    tensors["owner"] = torch.from_numpy(state.entries.owner.astype(np.int64))
    tensors["holders"] = torch.from_numpy(np.packbits(state.holders))
    if state.shared_round >= 0:
        tensors["shared_sizes"] = torch.from_numpy(state.shared_sizes)
    scalars = {"round": state.round, "shared_round": state.shared_round, "clients": len(state.holders)}
    write_atomically(folder / NAME, save(tensors, {"state": json.dumps(scalars)}))


def read(folder: Path) -> State | None:
    """The state of the folder's checkpoint, or ``None`` if it has none. Raises on a damaged file."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            scalars = _scalars(file)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        holders = tensors["holders"].numpy()
        if "clients" in scalars:
            holders = np.unpackbits(holders, count=scalars["clients"]).view(bool)
        nothing = np.zeros(len(holders), np.int64)
        return State(
            round=scalars["round"],
            weights=under("weights/", tensors),
            holders=holders,
            shared_sizes=tensors["shared_sizes"].numpy() if "shared_sizes" in tensors else nothing,
            entries=Pool(under("entries/", tensors), tensors["owner"].numpy()),
            shared_round=scalars["shared_round"],
            server=under("server/", tensors),
            said=under("said/", tensors),
            own=by_client("own/", tensors),
        )
    except DAMAGED as error:
        raise FedblendError(
            f"{path}: is not a checkpoint of fedblend or is damaged: {error}; the run cannot go on from it: "
            "put it back, or begin again in another folder"
        ) from None


def round_of(folder: Path) -> int | None:
    """The round of the folder's checkpoint, or ``None`` if it has none or it is damaged; tensors are not read."""
    try:
        with safe_open(folder / NAME, "pt") as file:
            return int(_scalars(file)["round"])
    except (*DAMAGED, OSError):
        return None


def _scalars(file: Any) -> dict[str, Any]:
    scalars: dict[str, Any] = json.loads((file.metadata() or {})["state"])
    return scalars
