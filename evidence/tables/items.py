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

STUDY_HEADINGS = {
    "aggenhance/table-1": "aggenhance-three-ways-to-aggregate-with-and-without-the-points",
    "fed-augmix/table-2": "on-mnist-itself",
    "fed-augmix/table-3": "on-mnist-itself",
    "fed-augmix/figure-3": "on-mnist-itself",
    "fed-augmix/figure-4": "on-mnist-itself",
    "fed-augmix/figure-6": "on-mnist-itself",
    "fedmix/table-1": "fashion-mnist-two-classes-a-client",
    "fedmix/table-2": "shakespeare-mixing-embeddings",
    "fedmix/table-11": "femnist-real-writers",
    "fedmix/table-13": "femnist-real-writers",
    "mix2fld/figure-2": "figure-2-at-the-papers-sizes-t_max-110-ms",
    "mix2fld/figure-3": "figure-3-ten-to-fifty-devices",
    "mix2fld/table-2": "tables-ii-and-iii-sample-privacy",
    "mix2fld/table-3": "tables-ii-and-iii-sample-privacy",
    "xormixfl/table-2": "table-2-accuracy-by-target-label",
    "xormixfl/table-3": "table-3-distance-to-raw-samples",
    "xormixfl/table-4": "table-4-dummy-labels-blending-and-alpha",
}
"""The heading of a study of the item, on the page of its paper in docs/results/."""

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
    """All committed results of items, in the order of papers and items, with the items' present notes."""
    found = [json.loads(path.read_text()) for paper in all_papers() for path in (RESULTS / paper).glob("*.json")]
    found = [result | {"note": all_items()[result["item"]].note} for result in found]
    order = list(all_items())
    return sorted(found, key=lambda result: (order.index(result["item"]), result["scale"] != "paper"))


def overview(paper: str) -> str:
    """A row for each item of a paper: scale, data, claims that point the paper's way, and a link to the study."""
    items = {name: item for name, item in all_items().items() if name.startswith(f"{paper}/") and not _is_choice(name)}
    results = [result for result in item_results() if result["item"] in items]
    text = f"{len({result['item'] for result in results})} of {len(items)} items have results, {len(results)} in all."
    rows = [
        _overview_row(name, item, [result for result in results if result["item"] == name])
        for name, item in items.items()
    ]
    return table(["item", "what", "scale", "data", "claims that our means bear out", "also"], rows, text)


def _is_choice(name: str) -> bool:
    return "/choice-" in name


def _overview_row(name: str, item: Item, results: list[Row]) -> list[str]:
    paper, _, short = name.partition("/")
    study = f"[a study](results/{paper}.md#{STUDY_HEADINGS[name]})" if name in STUDY_HEADINGS else ""
    if not results:
        return [short, item.title, ABSENT_DATA.get(name, "not yet"), "", "", study]
    columns = zip(*((scale_of(result), data_of(result), _borne_out(result)) for result in results), strict=True)
    cells = ("; ".join(dict.fromkeys(column)) for column in columns)
    return [link(results[0], here=True), item.title, *cells, study]


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


def _borne_out(result: Row) -> str:
    """How many of the claims hold on means over seeds."""
    verdicts = [claim["verdict"] for claim in result["claims"]]
    decided = [verdict for verdict in verdicts if verdict not in ("undecided", "not measured")]
    in_part = f", {verdicts.count('holds in part')} in part" if "holds in part" in verdicts else ""
    return f"{verdicts.count('holds')} of {len(decided)}{in_part}" if verdicts else ""


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


def item_pages(paper: str) -> str:
    """Every result of a paper's items, as its command printed it, below a short heading."""
    pages = []
    for result in item_results():
        if result["item"].startswith(f"{paper}/"):
            _, _, body = formatting.markdown(result).partition("\n\n")
            pages.append(f"## {heading_of(result)}\n\n{result['title']}.\n\n{body}")
    return "\n".join(pages).rstrip()
