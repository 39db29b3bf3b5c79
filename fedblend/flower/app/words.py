"""What travels beside a user's own records: one table of words, one of tensors, under names of fedblend's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedblend.core.errors import FedblendError
from fedblend.flower.messages import arrays

WORDS, TENSORS = "fedblend", "fedblend-tensors"
"""Names of the two records."""

SHARE = "fedblend_share"
"""The action of the query by which a strategy asks clients to share."""


def put(content: RecordDict, words: Mapping[str, Any], tensors: ArrayRecord | None = None) -> RecordDict:
    """A copy of a message's content, with words and tensors beside what is there."""
    made = RecordDict(dict(content.items()))
    made[WORDS] = ConfigRecord({WORDS: json.dumps(words)})
    if tensors is not None:
        made[TENSORS] = tensors
    return made


def take(content: RecordDict) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
    """Take words and tensors out of a message's content, which is changed; no words where there are none.

    Raises :class:`FedblendError` on words that :func:`put` did not write.
    """
    if WORDS not in content:
        return None, {}
    try:
        words = json.loads(str(content.config_records[WORDS][WORDS]))
        tensors = tensors_of(content.array_records[TENSORS]) if TENSORS in content else {}
    except (KeyError, ValueError, TypeError, EOFError) as error:
        raise FedblendError(f"a message with words that are none of fedblend's: {error}") from None
    if not isinstance(words, dict):
        raise FedblendError(f"a message with words that are none of fedblend's: {words!r}")
    for name in (WORDS, TENSORS):
        if name in content:
            del content[name]
    return words, tensors


def tensors_of(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """The tensors of a record. Raises :class:`ValueError` on arrays that are none."""
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}


__all__ = ["SHARE", "TENSORS", "WORDS", "arrays", "put", "take", "tensors_of"]
