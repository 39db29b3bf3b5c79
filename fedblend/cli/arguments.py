"""Parsers of option values that several commands take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fedblend.core.errors import FedblendError, brief
from fedblend.data.loaders.files import set_data_folder as set_data_folder
from fedblend.experiment.toml_tables import parse_value

N = TypeVar("N", int, float)

Change = tuple[str, Any]
"""A field's path and its new value, as ``--set`` gives them; ``None`` removes an optional field."""


def parse_changes(texts: Sequence[str] | None) -> list[Change]:
    """Parse every ``--set FIELD=VALUE``."""
    return [parse_change(text) for text in texts or []]


def parse_change(text: str) -> Change:
    """Parse ``train.lr=0.05`` as (field, value). The value of a bare ``none`` is ``None``: TOML has no null."""
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise FedblendError(f"--set {brief(text)} is not valid: write FIELD=VALUE, such as --set train.lr=0.05")
    return field.strip(), None if value.strip() == "none" else parse_value(value.strip())


def parse_seeds(text: str) -> list[int]:
    """Parse ``0,1,2`` as a list of seeds."""
    return _numbers("--seeds", text, int, lambda seed: seed >= 0, "whole numbers from 0 with commas, such as 0,1,2")


def parse_counts(text: str, option: str) -> list[int]:
    """Parse ``10,50`` as a list of counts."""
    return _numbers(option, text, int, lambda count: count >= 1, "whole numbers from 1 with commas, such as 10,50")


def parse_lambdas(text: str) -> list[float]:
    """Parse ``0.1,0.4`` as a list of mixing ratios."""
    valid = "numbers above 0 and below 1 with commas, such as 0.1,0.4"
    return _numbers("--lambdas", text, float, lambda lam: 0 < lam < 1, valid)


def _numbers(option: str, text: str, kind: Callable[[str], N], holds: Callable[[N], bool], valid: str) -> list[N]:
    try:
        # int("1_0") is 10
        numbers = [] if "_" in text else [kind(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(map(holds, numbers)):
        raise FedblendError(f"{option} {brief(text)} is not valid: write {valid}")
    return numbers
