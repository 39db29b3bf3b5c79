"""Texts as ids of tokens, by a tokenizer that an experiment names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedblend.core.errors import FedblendError, brief, legible, missing_package, or_valid
from fedblend.core.registry import import_path, require_trusted
from fedblend.data.backbones import MINILM, minilm_folder

PANGRAM = "The quick brown fox jumps over the lazy dog: 0123456789 times, isn't it? Ærøskøbing."
"""A text whose tokens tell tokenizers apart."""


def known_tokenizer(name: str) -> str:
    """Return the name of a tokenizer. Raises :class:`ValueError` for another one, and for code that is not trusted."""
    if name == MINILM or name.endswith(".json"):
        return name
    if ":" not in name:
        valid = (MINILM, "transformers:NAME", "module:function", "a file tokenizer.json")
        raise ValueError(f"unknown tokenizer{or_valid(name, valid)}")
    return require_trusted(name, "data.tokenizer")


def tokens_of(texts: Sequence[str], tokenizer: str, length: int) -> np.ndarray:
    """Return ids of tokens and their mask, int64 [n, 2, length]: cut to ``length``, or padded with zeros at the end."""
    rows = list(_tokenizer(tokenizer, length)(list(texts)))
    made = np.zeros((len(texts), 2, length), np.int64)
    valid = f"valid: for each text a list of 1 to {length} whole numbers from 0"
    if len(rows) != len(texts):
        raise FedblendError(f"data.tokenizer: '{tokenizer}' returns {len(rows)} lists for {len(texts)} texts; {valid}")
    for place, text, row in zip(made, texts, rows, strict=True):
        ids = np.asarray(row)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 1 <= len(ids) <= length or ids.min() < 0:
            told = f"'{tokenizer}' returns {brief(row)} for the text {brief(text)}"
            raise FedblendError(f"data.tokenizer: {told}; {valid}")
        place[0, : len(ids)], place[1, : len(ids)] = ids, 1
    return made


def _tokenizer(name: str, length: int) -> Callable[[list[str]], Sequence[Any]]:
    """Return what makes lists of at most ``length`` ids of texts; special tokens, such as the last one, are kept."""
    library, _, of = name.partition(":")
    if library != "transformers" and name != MINILM and not name.endswith(".json"):
        function = import_path(name, "data.tokenizer")
        return lambda texts: function(texts, length)
    needed = "transformers" if library == "transformers" else "tokenizers"
    try:
        if library == "transformers":
            from transformers import AutoTokenizer

            pretrained = AutoTokenizer.from_pretrained(of, trust_remote_code=False)
            return lambda texts: pretrained(texts, truncation=True, max_length=length)["input_ids"]
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(f"{minilm_folder()}/tokenizer.json" if name == MINILM else name)
        fast.no_padding()
        fast.enable_truncation(length)
    except ImportError:
        raise missing_package(f"data.tokenizer '{name}'", needed, "pretrained") from None
    except FedblendError:
        raise
    except Exception as error:  # tokenizers raises no narrower kind
        raise FedblendError(f"data.tokenizer: '{name}' is no tokenizer to load: {legible(error)}") from None
    # One by one: the package's own threads do not survive a fork.
    return lambda texts: [fast.encode(text).ids for text in texts]
