"""Results of ``fedblend reproduce``: every item's page, and the overview."""

from __future__ import annotations

import functools
import json
from collections import defaultdict

from fedblend.papers import formatting
from fedblend.papers.items import Item, all_papers
from fedblend.papers.plan import plan_item
from tables.common import (
    RESULTS,
    Row,
    all_items,
    table,
)

PAPER_NAMES = {paper: file.title.split(" (")[0] for paper, file in all_papers().items()}

COMPARED_WITH_FEDMIX = {
    "localmix": "LocalMix's",
    "naivemix": "NaiveMix's",
    "fedavg": "FedAvg's",
    "global": "Global Mixup's",
}
"""Rows that FedMix is compared with, and their names."""

ABSENT_DATA = {"fedmix/table-2": "LEAF's Shakespeare is not at hand"}
"""Items without a result because of their data."""


def item_results() -> list[Row]:
    """All committed results of items, in the order of papers and items, with the items' present titles and notes."""
    found = [json.loads(path.read_text()) for paper in all_papers() for path in (RESULTS / paper).glob("*.json")]
    items = all_items()
    found = [result | {"title": items[result["item"]].title, "note": items[result["item"]].note} for result in found]
    order = list(items)
    return sorted(found, key=lambda result: (order.index(result["item"]), result["scale"] != "paper"))


def overview(paper: str) -> str:
    """A row for each item of a paper: what is in it, and at which scales, on which data, it has results."""
    items = {name: item for name, item in all_items().items() if name.startswith(f"{paper}/") and not is_choice(name)}
    results = [result for result in item_results() if result["item"] in items]
    rows = [
        _overview_row(name, item, [result for result in results if result["item"] == name])
        for name, item in items.items()
    ]
    return table(["item", "what", "results"], rows)


def is_choice(name: str) -> bool:
    """Whether an item compares choices of a setting that its paper leaves open."""
    return "/choice-" in name


def _overview_row(name: str, item: Item, results: list[Row]) -> list[str]:
    if not results:
        return [name.partition("/")[2], item.title, ABSENT_DATA.get(name, "none yet")]
    found = (f"{scale_of(result)}: {data_of(result)}".removesuffix(": ") for result in results)
    return [link(results[0], here=True), item.title, "; ".join(dict.fromkeys(found))]


def heading_of(result: Row) -> str:
    """The heading of a result on its paper's page: the item, and the scale if the item has a result at the paper's."""
    paper, _, name = result["item"].partition("/")
    second = result["scale"] != "paper" and (RESULTS / paper / f"{name}-paper.json").exists()
    return f"{name}, {result['scale']}" if second else name


def link(result: Row, here: bool = False) -> str:
    """A link to a result on the page of its paper, from this page (``here``) or another one."""
    paper, _, name = result["item"].partition("/")
    page = "" if here else f"reproductions/{paper}.md"
    return f"[{name}]({page}#{heading_of(result).replace(', ', '-')})"


def scale_of(result: Row) -> str:
    """The scale of a result, in words."""
    if "outdated" in result:
        return "settings that were corrected since"
    return result["scale"] if result["smaller"] or result["other_data"] else "the paper's"


def data_of(result: Row) -> str:
    """The data sets of a result."""
    names = list(result["facts"].get("data", ())) or [text.split(" for ")[0] for text in result["other_data"]]
    # Where nothing is trained there are no facts.
    return ", ".join(names or _data_of_cells(result["item"], result["scale"]))


@functools.cache
def _data_of_cells(item: str, scale: str) -> list[str]:
    return list(dict.fromkeys(cell.experiment.data.name for cell in plan_item(item, scale).cells))


def fedmix_in_small() -> str:
    """In how many cells on CIFAR10 in small FedMix ends above other methods; equal pairs of accuracies count once."""
    pairs: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for result in item_results():
        is_table = result["item"].startswith("fedmix/") and "/choice-" not in result["item"]
        if not (is_table and result["scale"] == "laptop" and "cifar10" in result["facts"].get("data", ())):
            continue
        cells = {(c["row"], c["column"]): c["ours"] for c in result["quantities"].get("accuracy", {}).get("cells", [])}
        for row, column in cells:
            fedmix = cells.get(("fedmix", column))
            if row in COMPARED_WITH_FEDMIX and column != "femnist" and cells[row, column] and fedmix:
                mean, other = (formatting.mean_over_seeds(ours) or 0.0 for ours in (fedmix, cells[row, column]))
                pairs[row].add((mean, other))
    texts = []
    for row, name in COMPARED_WITH_FEDMIX.items():
        differences = sorted(mean - other for mean, other in pairs[row])
        above = f"{sum(d > 0 for d in differences)} of {len(differences)} places"
        texts.append(f"{name} in {above} ({differences[0]:+.1f} to {differences[-1]:+.1f} points)")
    return f"Final accuracies of FedMix, on CIFAR10 in small, are above {', '.join(texts)}."
