"""The papers' items, for tests of reproductions."""

from __future__ import annotations

from fedblend.papers.items import all_papers

ITEMS = [(paper, name) for paper, file in all_papers().items() for name in file.items]
"""(paper, item) of every item."""

RUNNABLE = [f"{paper}/{name}" for paper, name in ITEMS if not all_papers()[paper].items[name].missing]
"""Full names of the items that fedblend can run."""
