"""The base of all parts, and where the parts of each kind are declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

MODULES: dict[str, str] = {}
"""The module or package that declares fedblend's parts of each kind that an experiment has. The package's ``__init__``,
which stands above all of them, fills it."""


class Part:
    """Base of all parts; :func:`part` sets the kind and the name that files use."""

    kind: ClassVar[str]
    name: ClassVar[str]
    to_define: ClassVar[tuple[str, ...]] = ()
    """Methods that the base of a kind leaves to its parts; of ``"a or b"`` a part defines one."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Attributes of earlier versions, each with what a part has in its place."""
    numeric_inputs: bool = False
    """Whether the part computes with samples as numbers: it mixes, averages, changes or makes them, or takes distances
    or gradients of them. Tokens, whose ids are names, are refused then.
    """
