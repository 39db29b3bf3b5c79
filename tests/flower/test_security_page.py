"""Each statement of the pages on security names a test that exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from fedblend.core.payload import PAYLOAD_KINDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@functools.cache
def defined_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def table_rows() -> list[list[str]]:
    """The rows of the tables of statements, without their heads."""
    text = text_of("security.md").partition("## What a site promises")[2]
    tables = re.findall(r"^\|.*\|\n\|[-| ]+\|\n((?:\|.*\|\n)+)", text, re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


@pytest.mark.parametrize("page", ["security.md", "secure-sums.md"])
def test_each_named_test_exists(page: str) -> None:
    named = NAMED.findall(text_of(page))
    assert len(named) > 10
    missing = [f"{path}::{name}" for path, name in named if name not in defined_tests(path)]
    assert not missing


def test_each_statement_names_a_test() -> None:
    statements = table_rows()
    assert len(statements) > 30
    assert [row for row in statements if not NAMED.fullmatch(row[-1])] == []


def test_what_holds_a_statement_is_defined_in_fedblend() -> None:
    folders = (ROOT / "fedblend" / name for name in ("core", "flower", "runs"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    defined = {path.parent.name if path.stem == "__init__" else path.stem for path in files}
    for path in files:
        defined |= set(re.findall(r"^ *(?:def|class) (\w+)", path.read_text(encoding="utf-8"), re.M))
    named = [name for row in table_rows() if len(row) == 4 for name in re.findall(r"`([\w.]+)`", row[1])]
    named = [name for name in named if name not in {"allow", "rounds"}]  # fields of the site file
    assert len(named) > 50
    assert [name for name in named if not set(name.split(".")) <= defined] == []


def test_the_table_of_kinds_is_that_of_the_code() -> None:
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (yes|no) \| ([^|]+) \|",
        (ROOT / "docs" / "security.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    told = {kind: (leaves, "sharing" in noise, "protection" in noise) for kind, leaves, noise in rows}
    assert told == {
        kind.name: (
            "yes" if kind.by_default else "no",
            kind.is_shared or kind.name == "masked",
            kind.noise == "protection",
        )
        for kind in PAYLOAD_KINDS.values()
    }
