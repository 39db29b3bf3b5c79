"""The papers' items, for tests of reproductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedblend.papers.items import all_papers

ITEMS = [(paper, name) for paper, file in all_papers().items() for name in file.items]
"""(paper, item) of every item."""

RUNNABLE = [f"{paper}/{name}" for paper, name in ITEMS if not all_papers()[paper].items[name].missing]
"""Full names of the items that fedblend can run."""


def result_of(ours: Mapping[tuple[str, str], Sequence[object]], quantity: str = "q") -> dict[str, Any]:
    """A written result of one quantity, with these numbers by (row, column), one a seed."""
    cells = [
        {"row": row, "column": column, "ours": {str(seed): value for seed, value in enumerate(values)}}
        for (row, column), values in ours.items()
    ]
    columns = {column: column.upper() for _, column in ours}
    return {"columns": columns, "quantities": {quantity: {"cells": cells}}, "other_data": [], "scale": "paper"}
