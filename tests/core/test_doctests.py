"""The examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

from helpers import each

import fedblend

PACKAGE = Path(fedblend.__file__).parent
MODULES = [
    ".".join(("fedblend", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@each("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    assert not doctest.testmod(importlib.import_module(name)).failed
