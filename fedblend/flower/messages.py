"""Words and tensors as the records of a Flower message, and back. No pickle in either direction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedblend.core.errors import FedblendError
from fedblend.core.trees import Tensors

WORDS = "words"
"""The record, and the field in it, that holds the words as JSON."""
Spoken = tuple[dict[str, Any], dict[str, torch.Tensor]]


def arrays(tensors: Tensors) -> ArrayRecord:
    """Tensors as a record; several messages may hold the same one."""
    return ArrayRecord({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def pack(words: Mapping[str, Any], *tables: ArrayRecord) -> RecordDict:
    """The content of a message: words as JSON in a ConfigRecord, tensors in ArrayRecords."""
    content = RecordDict({WORDS: ConfigRecord({WORDS: json.dumps(words)})})
    for place, table in enumerate(tables):
        if len(table):
            content[f"tensors{place}"] = table
    return content


def unpack(content: RecordDict) -> Spoken:
    """The words and tensors of a message. Raises :class:`FedblendError` on anything that :func:`pack` did not make."""
    try:
        words = json.loads(str(content.config_records[WORDS][WORDS]))
        tensors = {
            name: torch.from_numpy(array.numpy())
            for table in content.array_records.values()
            for name, array in table.items()
        }
    except Exception as error:
        # Whoever sends it chooses what goes wrong: a header of a terabyte, brackets nested a hundred thousand deep.
        raise FedblendError(f"a message that is none of fedblend's: {type(error).__name__}: {error}") from None
    if not isinstance(words, dict):
        raise FedblendError("a message that is none of fedblend's: its words are no table")
    return words, tensors
