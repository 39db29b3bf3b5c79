"""What `fedblend reproduce` made of each table and figure: an overview of all, and each result as it was printed."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mdtable import table

from fedblend.papers import pages
from fedblend.papers.items import Item, all_papers

KEPT = Path(__file__).resolve().parent / "reproductions"
PAGE = "reproductions.md"

STUDIES = {
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
    "mix2fld/figure-2": "figure-2-at-the-papers-sizes",
    "mix2fld/figure-3": "figure-3-ten-to-fifty-devices",
    "mix2fld/table-2": "tables-ii-and-iii-sample-privacy",
    "mix2fld/table-3": "tables-ii-and-iii-sample-privacy",
    "xormixfl/table-2": "table-2-accuracy-by-target-label",
    "xormixfl/table-3": "table-3-distance-to-raw-samples",
    "xormixfl/table-4": "table-4-dummy-labels-blending-and-alpha",
}
"""Items of which a study of its own is told in docs/results.md, by the heading there."""

BESIDE = {"localmix": "LocalMix's", "naivemix": "NaiveMix's", "fedavg": "FedAvg's", "global": "Global Mixup's"}
"""Methods that FedMix is held against, by their rows."""

ABSENT = {"fedmix/table-2": "LEAF's Shakespeare is not at hand"}
"""Items whose data nobody had."""


def results() -> list[dict[str, Any]]:
    """All that are kept, in the order of papers and items."""
    found = [json.loads(path.read_text()) for path in KEPT.glob("*.json")]
    places = {name: place for place, (name, _) in enumerate(items())}
    return sorted(found, key=lambda result: (places[result["item"]], result["scale"] != "paper"))


def items() -> Iterator[tuple[str, Item]]:
    """Every table and figure of every paper that is an item."""
    for paper, file in all_papers().items():
        for name, item in file.items.items():
            yield f"{paper}/{name}", item


def overview() -> str:
    """A row an item: at what scale, on which data, which claims hold, and where more of it is told."""
    kept = results()
    claims = Counter(claim["verdict"] for result in kept for claim in result["claims"])
    made = {result["item"] for result in kept}
    known = dict(items())
    told = (
        f"{len(made)} of {len(known)} items have results, {len(kept)} in all. Of their {claims.total()} claims, "
        f"{claims['holds']} hold, "
        f"{claims['holds in part']} in part, {claims['does not hold']} do not, and "
        f"{claims['undecided'] + claims['not measured']} were not decided."
    )
    rows = [_row(name, item, [result for result in kept if result["item"] == name]) for name, item in known.items()]
    return told + "\n\n" + table(["item", "what", "scale", "data", "claims that hold", "also"], rows)


def fedmix_in_small() -> str:
    """In how many places of its tables on Fashion-MNIST FedMix ends above other methods; a run counts once."""
    pairs: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for result in results():
        if not (result["item"].startswith("fedmix/") and "fashion-mnist for cifar10" in result["other_data"]):
            continue
        cells = {(c["row"], c["column"]): c["ours"] for c in result["quantities"].get("accuracy", {}).get("cells", [])}
        for row, column in cells:
            if row in BESIDE and column != "femnist" and cells[row, column] and cells.get(("fedmix", column)):
                mean, other = (pages.mean_of(cells[name, column]) for name in ("fedmix", row))
                pairs[row].add((mean or 0.0, other or 0.0))
    told = []
    for row, name in BESIDE.items():
        apart = sorted(mean - other for mean, other in pairs[row])
        above = f"{sum(a > 0 for a in apart)} of {len(apart)} places"
        told.append(f"{name} in {above} ({apart[0]:+.1f} to {apart[-1]:+.1f} points)")
    return f"Final accuracies of FedMix, on Fashion-MNIST in small, are above {', '.join(told)}."


def details() -> str:
    """Every result, as its command printed it."""
    return "\n".join(pages.markdown(result, level=2) for result in results()).rstrip()


def _row(name: str, item: Item, made: list[dict[str, Any]]) -> list[str]:
    study = f"[a study](#{STUDIES[name]})" if name in STUDIES else ""
    if not made:
        return [name, item.title, ABSENT.get(name, "not yet"), "", "", study]
    heading = re.sub(r"[^\w\- ]", "", f"{name}: {item.title}".lower()).replace(" ", "-")
    scales, data, holding = zip(*(_facts(result) for result in made), strict=True)
    return [f"[{name}]({PAGE}#{heading})", item.title, *("; ".join(dict.fromkeys(t)) for t in (scales, data, holding)),
            study]  # fmt: skip


def _facts(result: dict[str, Any]) -> tuple[str, str, str]:
    """The scale, the data, and how many of the claims hold."""
    full = not (result["smaller"] or result["other_data"])
    # Where nothing is trained there are no facts of it.
    data = ", ".join(result["facts"].get("data", {})) or ", ".join(t.split(" for ")[0] for t in result["other_data"])
    verdicts = [claim["verdict"] for claim in result["claims"]]
    decided = [verdict for verdict in verdicts if verdict not in ("undecided", "not measured")]
    in_part = f", {verdicts.count('holds in part')} in part" if "holds in part" in verdicts else ""
    holding = f"{verdicts.count('holds')} of {len(decided)}{in_part}" if verdicts else ""
    return "the paper's" if full else result["scale"], data, holding
