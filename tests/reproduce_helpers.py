"""What several tests of reproduce take."""

from __future__ import annotations

from fedblend.papers.items import all_papers

ITEMS = [(paper, name) for paper, made in all_papers().items() for name in made.items]


RUN = [f"{paper}/{name}" for paper, name in ITEMS if not all_papers()[paper].items[name].missing]
