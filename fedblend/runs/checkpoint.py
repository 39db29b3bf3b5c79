"""Checkpoints: one safetensors file with the scalars as JSON in its header. No pickle.

PyTorch is imported by the functions that use tensors, because :func:`round_of` reads the header only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fedblend.core.errors import FedblendError, legible
from fedblend.core.files import REPEAT, write_atomically

if TYPE_CHECKING:
    import torch

    from fedblend.core.state import RunState

NAME = "checkpoint.safetensors"
FROZEN = "frozen.safetensors"  # Tensors of the model that nobody trains, written once; checkpoints leave them out
BEST = "best.safetensors"

DAMAGED = (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError)
"""Errors of reading a file that is no checkpoint, or truncated."""

VERSION = 2  # Version of the tensor names in the file
CHECKSUM = "sha256"  # Field of the header with the checksum of its integers and of all tensors

SCALARS = {"round": 0, "shared_round": -1, "clients": 0, "version": VERSION}
"""Integers of the header and their least values."""


def write_frozen(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the folder's frozen tensors, at the start of a run. Without any there is no file."""
    if tensors:
        write_table(folder / FROZEN, {}, tensors)
    else:
        (folder / FROZEN).unlink(missing_ok=True)


def write(folder: Path, state: RunState) -> None:
    """Replace the folder's checkpoint. On a failure, such as a full disk, the previous checkpoint stays.

    Frozen tensors in a file of their own (:func:`write_frozen`) are left out, and fixed by its checksum. A million
    clients that share nothing take 0.125 MB: one bit for each client, and no sizes while no client has shared.
    """
    import torch

    from fedblend.core.state import to_tensors
    from fedblend.core.trees import add_prefix, without

    frozen, checksum = _frozen_of(folder)
    tensors = add_prefix("weights/", without(state.weights, frozen))
    tensors |= add_prefix("entries/", state.entries.tensors)
    tensors |= add_prefix("server/", state.server_state)
    tensors |= add_prefix("outputs/", state.global_outputs)
    tensors |= to_tensors(state.client_states)
    tensors["owner"] = torch.from_numpy(state.entries.owner.astype(np.int64))
    tensors["holders"] = torch.from_numpy(np.packbits(state.has_pool))
    if state.shared_round >= 0:
        tensors["shared_sizes"] = torch.from_numpy(state.shared_sizes)
    scalars = {"version": VERSION, "round": state.round, "shared_round": state.shared_round}
    texts = {name: text for name, text in (("ended_by", state.ended_by), ("frozen", checksum)) if text}
    write_table(folder / NAME, scalars | {"clients": len(state.has_pool)} | texts, tensors)


def _frozen_of(folder: Path) -> tuple[list[str], str]:
    """Return the names of the folder's frozen tensors and their checksum; none and no text without such a file."""
    if not (folder / FROZEN).exists():
        return [], ""
    with _open(folder / FROZEN, "np") as file:
        return list(file.keys()), _read_fields(file, folder / FROZEN)[CHECKSUM]


def write_table(
    path: Path, scalars: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], remedy: str = REPEAT
) -> None:
    """Replace a file by tensors, with JSON values and a checksum of all in its header, as :func:`write_atomically`."""
    from safetensors.torch import save

    from fedblend.core.trees import for_file

    # A part may keep a tensor that it also returns.
    tensors = for_file(tensors)
    # One entry only: safetensors writes several in random order, and equal states make equal files.
    header = {"state": json.dumps({**scalars, CHECKSUM: _checksum(scalars, tensors)})}
    write_atomically(path, save(tensors, header), remedy)


def read_table(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read what :func:`write_table` wrote. Raises one of :data:`DAMAGED`, also where the checksum is another."""
    with _open(path, "pt") as file:
        scalars = _read_fields(file, path)
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if scalars.pop(CHECKSUM) != _checksum(scalars, tensors):
        raise ValueError("its content does not have the checksum that it was written with")
    return scalars, tensors


@contextmanager
def opened(folder: Path) -> Iterator[Any]:
    """The folder's checkpoint as an open file of safetensors, to read single tensors of; ``None`` if it has none.

    Raises :class:`FedblendError` for a damaged file.
    """
    path = folder / NAME
    if not path.is_file():
        yield None
        return
    try:
        with safe_open(path, "pt") as file:
            try:
                _read_fields(file, path)
            except DAMAGED as error:
                raise SafetensorError(legible(error)) from None
            yield file
    except (SafetensorError, OSError) as error:
        raise FedblendError(f"{path}: is not a checkpoint of fedblend or is damaged: {error}") from None


def read(folder: Path) -> RunState | None:
    """Read the folder's checkpoint; ``None`` if it has none. Raises :class:`FedblendError` for a damaged file."""
    from fedblend.core.trees import add_prefix

    path = folder / NAME
    if not path.exists():
        return None
    try:
        fields, tensors = read_table(path)
        scalars = _scalars_of(fields)
        if not isinstance(ended_by := fields.get("ended_by", ""), str):
            raise ValueError(f"ended_by: {ended_by!r:.40} in its header is no text")
        if "frozen" in fields:
            if _frozen_of(folder)[1] != fields["frozen"]:
                raise ValueError(f"{FROZEN} beside it is missing, or of another run")
            tensors |= add_prefix("weights/", read_table(folder / FROZEN)[1])
        return replace(_make_state(scalars, tensors), ended_by=ended_by)
    except DAMAGED as error:
        told = f"is not a checkpoint of fedblend or is damaged: {legible(error)}; the run cannot resume from it"
        raise FedblendError(f"{path}: {told}: restore the file, or begin again in another folder") from None


def write_best(folder: Path, state: RunState, why: Mapping[str, Any]) -> None:
    """Replace the folder's best model: the weights of a state; ``why`` says what it is the best in."""
    from safetensors.torch import save

    from fedblend.core.trees import for_file

    write_atomically(folder / BEST, save(for_file(state.weights), {"best": json.dumps({"round": state.round, **why})}))


def read_best(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the round and the weights of the folder's best model."""
    path = folder / BEST
    if not path.exists():
        raise FedblendError(f"{folder}: keeps no best model; add the callback keep-best to the experiment")
    try:
        with _open(path, "pt") as file:
            round = json.loads(file.metadata()["best"])["round"]
            return int(round), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except DAMAGED as error:
        raise FedblendError(f"{path}: is no best model of fedblend or is damaged: {legible(error)}") from None


def round_of_best(folder: Path, why: Mapping[str, Any]) -> int | None:
    """Return the round of the folder's best model; ``None`` if the folder keeps none that is the best in ``why``."""
    try:
        with _open(folder / BEST, "pt") as file:
            told = json.loads(file.metadata()["best"])
            return int(told["round"]) if all(told[field] == value for field, value in why.items()) else None
    except DAMAGED:
        return None


def _open(path: Path, framework: str) -> Any:
    """Open a checkpoint. Raises :class:`OSError` for a pipe or a device, which may have no end."""
    if not path.is_file():
        raise OSError("it is no regular file")
    return safe_open(path, framework)


def _checksum(scalars: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    from fedblend.core.trees import digest_of

    return hashlib.sha256(f"{json.dumps(scalars, sort_keys=True)}\0{digest_of(tensors)}".encode()).hexdigest()


def match_model(state: RunState, model: Mapping[str, torch.Tensor], clients: int, folder: Path) -> RunState:
    """Return a checkpoint's state, which must be of ``model``, with all weights in the model's order."""
    from fedblend.core.trees import differing, in_order

    frozen = {name: model[name] for name in _frozen_of(folder)[0]}
    path, advice = folder / NAME, "restore the run's own file, or begin again in another folder"
    if len(state.has_pool) != clients:
        raise FedblendError(f"{path}: is of {len(state.has_pool)} clients, but the run has {clients}; {advice}")
    models = [kept.model for kept in state.client_states.values()]
    # In a real federation, weights that stay at a site are replaced by a marker here.
    for table in (state.weights, *(own for own in models if own.keys() & model.keys())):
        if different := differing(model, {**frozen, **table}):
            raise FedblendError(f"{path}: is of another model than the run's ('{different[0]}' differs); {advice}")
    states = {client: kept.ordered(model) for client, kept in state.client_states.items()}
    return replace(state, weights=in_order(state.weights, model), client_states=states)


def round_of(folder: Path) -> int | None:
    """Return the round of the folder's checkpoint, or ``None`` if it is missing or damaged. Reads no tensors."""
    try:
        with _open(folder / NAME, "np") as file:
            return _scalars_of(_read_fields(file, folder / NAME))["round"]
    except (*DAMAGED, FedblendError):
        return None


def _read_fields(file: Any, path: Path) -> dict[str, Any]:
    """Return the JSON values of the header. Raises :class:`ValueError` for a header that is no table."""
    header = json.loads((file.metadata() or {})["state"])
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, not a table")
    if CHECKSUM not in header:
        told = "has no checksum, as no file of fedblend 0.1 has; read the run with fedblend 0.2, or begin again"
        raise FedblendError(f"{path}: {told} in another folder")
    return header


def _scalars_of(header: Mapping[str, Any]) -> dict[str, int]:
    scalars = {name: header[name] for name in SCALARS}
    for name, value in scalars.items():
        # A bool is an int in Python.
        if type(value) is not int or value < SCALARS[name]:
            raise ValueError(f"{name}: {value!r:.40} in its header is not an integer of at least {SCALARS[name]}")
    return scalars


def _make_state(scalars: dict[str, int], tensors: dict[str, torch.Tensor]) -> RunState:
    """Build the state from a file's integers and tensors. Raises :class:`ValueError` if they contradict each other."""
    import torch

    from fedblend.core.sharing import Pool
    from fedblend.core.state import RunState, from_tensors
    from fedblend.core.trees import strip_prefix

    holders, clients = _vector(tensors, "holders", torch.uint8), scalars["clients"]
    if len(holders) != (clients + 7) // 8:
        raise ValueError(f"'holders' has {len(holders)} bytes for {clients} clients, one bit each")
    sizes = _vector(tensors, "shared_sizes", torch.int64) if "shared_sizes" in tensors else np.zeros(clients, np.int64)
    if len(sizes) != clients:
        raise ValueError(f"'shared_sizes' has {len(sizes)} numbers for {clients} clients")
    entries, owner = strip_prefix("entries/", tensors), _vector(tensors, "owner", torch.int64)
    states = from_tensors(tensors)
    if any(t.shape[:1] != owner.shape for t in entries.values()):
        raise ValueError(f"'entries' has not the {len(owner)} rows of 'owner'")
    for client in (int(owner.min(initial=0)), int(owner.max(initial=0)), *states):
        if not 0 <= client < max(1, clients):
            raise ValueError(f"client {client} is not valid; valid: 0 to {clients - 1}")
    return RunState(
        round=scalars["round"],
        weights=strip_prefix("weights/", tensors),
        has_pool=np.unpackbits(holders, count=clients).view(bool),
        shared_sizes=sizes,
        entries=Pool(entries, owner),
        shared_round=scalars["shared_round"],
        global_outputs=strip_prefix("outputs/", tensors),
        server_state=strip_prefix("server/", tensors),
        client_states=states,
    )


def _vector(tensors: dict[str, torch.Tensor], name: str, kind: torch.dtype) -> np.ndarray:
    tensor = tensors[name]
    if tensor.dtype != kind or tensor.dim() != 1:
        raise ValueError(f"'{name}' is {tensor.dtype} of shape {list(tensor.shape)}, not {kind} [n]")
    array: np.ndarray = tensor.numpy()
    return array
