"""Flower messages: JSON fields and tensors as records, and checks of the payloads that sites send.

No pickle in either direction. A message of fedblend's own app has the record ``fields`` and one record for each table
of tensors. A message of another Flower app keeps its own records; :func:`attach` adds two records of fedblend's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

import fedblend
from fedblend.core.errors import FedblendError, by_reason, legible, listed
from fedblend.core.trees import Tensors
from fedblend.core.upload import is_finite

VERSION = f"fedblend {fedblend.__version__} with Flower {flwr.__version__}"
"""What server and sites compare before anything else."""

FIELDS = "fields"  # Name of the record that holds a message's fields, and of the entry that holds them as JSON

APP_FIELDS, APP_TENSORS = "fedblend", "fedblend-tensors"
"""Names of the two records that fedblend adds to a message of another Flower app."""

SHARE_QUERY = "fedblend_share"
"""The query with which a :class:`~fedblend.flower.Strategy` requests shared data from clients."""

LABEL_TENSORS = ("y", "dummies")  # Names of shared tensors that hold class labels where their type is an integer type

TYPES = (
    *(torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""Types of a message's tensors. PyTorch lacks operations, such as a minimum, for other types of Flower's arrays."""

MOST_ROUNDS = 2**31  # Bound of the rounds of a message

MessageContent = tuple[dict[str, Any], dict[str, torch.Tensor]]  # Fields and tensors


def to_record(tensors: Tensors) -> ArrayRecord:
    """Return tensors as a record; several messages may hold the same record."""
    return ArrayRecord({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def from_record(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """Return the tensors of a record. Raises :class:`ValueError` on invalid arrays."""
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}


def pack(fields: Mapping[str, Any], *records: ArrayRecord) -> RecordDict:
    """Return the content of a message: fields as JSON in a ConfigRecord, tensors in ArrayRecords."""
    content = RecordDict({FIELDS: ConfigRecord({FIELDS: json.dumps(fields)})})
    for i, record in enumerate(records):
        if len(record):
            content[f"tensors{i}"] = record
    return content


def unpack(content: RecordDict) -> MessageContent:
    """Return the fields and tensors of a message. Raises :class:`FedblendError` on content not made by :func:`pack`."""
    fields, tensors = _read(content, FIELDS, list(content.array_records.values()), "a message that is not fedblend's")
    if odd := [tensor.dtype for tensor in tensors.values() if tensor.dtype not in TYPES]:
        raise FedblendError(f"a tensor of type {odd[0]}; valid: {', '.join(map(str, TYPES))}")
    return fields, tensors


def attach(content: RecordDict, fields: Mapping[str, Any], tensors: ArrayRecord | None = None) -> RecordDict:
    """Return a copy of another app's message content with fedblend's fields and tensors added."""
    extended = RecordDict(dict(content.items()))
    extended[APP_FIELDS] = ConfigRecord({APP_FIELDS: json.dumps(fields)})
    if tensors is not None:
        extended[APP_TENSORS] = tensors
    return extended


def detach(content: RecordDict) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
    """Remove fedblend's fields and tensors from another app's message, in place, and return them.

    The fields are ``None`` where the message has none. Raises :class:`FedblendError` on fields not made by
    :func:`attach`.
    """
    if APP_FIELDS not in content:
        return None, {}
    records = [record for name, record in content.array_records.items() if name == APP_TENSORS]
    read = _read(content, APP_FIELDS, records, "a message whose fields are not fedblend's")
    for name in {APP_FIELDS, APP_TENSORS} & set(content):
        del content[name]
    return read


def _read(content: RecordDict, name: str, records: list[ArrayRecord], what: str) -> MessageContent:
    try:
        fields = json.loads(str(content.config_records[name][name]))
        tensors = {name: tensor for record in records for name, tensor in from_record(record).items()}
    except Exception as error:
        # The sender chooses which error is raised: a header of a terabyte, brackets nested a hundred thousand deep.
        raise FedblendError(f"{what}: {type(error).__name__}: {legible(error)}") from None
    if not isinstance(fields, dict):
        raise FedblendError(f"{what}: its fields are no JSON object")
    return fields, tensors


def find_mismatched(payloads: Mapping[int, Tensors], rows: bool) -> dict[int, str]:
    """Return the clients whose payload has other names, types or shapes than the majority's, with the reason.

    With ``rows`` all tensors of a payload must have the same number of rows, and shapes leave out the first axis.
    Raises :class:`FedblendError`, with the clients of each form, where two forms are equally frequent: then no form is
    the valid one.
    """
    forms: dict[int, str] = {}
    faults: dict[int, str] = {}
    for client, payload in payloads.items():
        lengths = {len(tensor) for tensor in payload.values() if tensor.dim()} if rows else set()
        if rows and any(tensor.dim() == 0 for tensor in payload.values()):
            faults[client] = "it sent a tensor without rows"
        elif len(lengths) > 1:
            faults[client] = legible(f"it sent tensors of {sorted(lengths)} rows; all must have as many")
        else:
            forms[client] = str(sorted((n, str(t.dtype), tuple(t.shape[int(rows) :])) for n, t in payload.items()))
    frequent = Counter(forms.values()).most_common(2)
    if len(frequent) == 2 and frequent[0][1] == frequent[1][1]:
        told = "; ".join(f"clients {listed(who)}: {legible(form)}" for form, who in by_reason(forms.items()).items())
        raise FedblendError(
            f"sites disagree on the form of what they send, and no form is that of most: {told}. Mend the data or the "
            "version of fedblend at the wrong sites, or end their SuperNodes, and run the same command again"
        )
    for client, form in forms.items():
        if form != frequent[0][0]:
            faults[client] = legible(f"it sent tensors of another form than most: {form}, not {frequent[0][0]}")
    return faults


def fault_of_shared(payload: Tensors, classes: int) -> str | None:
    """Return why shared tensors cannot be used: numbers that are not finite, or labels outside 0 to ``classes`` - 1."""
    for name, tensor in payload.items():
        if tensor.is_floating_point():
            if not is_finite(tensor):
                return legible(f"'{name}' holds NaN or infinity")
        elif name in LABEL_TENSORS and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < classes:
            return f"'{name}' holds labels from {int(tensor.min())} to {int(tensor.max())}; valid: 0 to {classes - 1}"
    return None


def mark_text(mark: torch.Tensor) -> str:
    """Return the mark of what a client keeps, int64 [2], as messages have it: ``ROUND-DIGEST``."""
    return "-".join(map(str, mark.flatten().tolist()))


def round_of_mark(mark: str) -> int:
    """Return the round in which a client began to keep what has this mark, counted from 0."""
    return int(mark.partition("-")[0])


def fault_of_number(payload: Tensors, samples: int, most: int) -> str | None:
    """Return why a site with so many samples cannot share so many entries, or ``None``; ``most`` it can."""
    entries = max((len(tensor) for tensor in payload.values() if tensor.dim()), default=0)
    if entries <= most:
        return None
    return f"it sent {entries:,} entries, and its {samples:,} samples make {most:,} at most"
