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
    """The rows of the tables whose last column has tests, without their heads."""
    tables = re.findall(r"^\|.*\| tests \|\n\|[-| ]+\|\n((?:\|.*\|\n)+)", text_of("security.md"), re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


@pytest.mark.parametrize("page", ["security.md", "secure-sums.md"])
def test_each_named_test_exists(page: str) -> None:
    named = NAMED.findall(text_of(page))
    assert len(named) > 10
    missing = [f"{path}::{name}" for path, name in named if name not in defined_tests(path)]
    assert not missing


def test_each_statement_names_a_test() -> None:
    statements = table_rows()
    assert len(statements) > 60
    assert [row for row in statements if not all(map(NAMED.fullmatch, row[-1].split(", ")))] == []


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
