"""The papers in one screen: their main claims with our verdicts, and all claims counted by paper."""

from __future__ import annotations

import re
from collections import Counter

from fedblend.papers.items import all_papers
from fedblend.papers.verdicts import HOLDS, UNDECIDED, WORDS
from tables.claims import OUTDATED, JudgedClaim, judged_claims, our_margin, paper_margin
from tables.common import all_items, table
from tables.items import linked_items

MAIN_CLAIMS = (
    ("fedmix/choice-taylor", "FedMix above FedAvg in final accuracy"),
    ("fedmix/table-6", "FedMix suffers less from heterogeneity than FedAvg"),
    ("aggenhance/table-1", "Enhanced FedAvg needs no more rounds than FedAvg"),
    ("aggenhance/figure-8", "A model can be trained on the points alone"),
    ("fed-augmix/table-2", "The error rises with severity"),
    ("fed-augmix/choice-split", "Fed-AugMix improves FedAvg (section V-B)"),
    ("mix2fld/choice-t-max", "Asymmetric channels: Mix2FLD above FL"),
    ("mix2fld/table-3", "Mix2up preserves more than Mixup"),
    ("xormixfl/choice-network", "XorMixFL above standalone learning"),
    ("xormixfl/table-3", "The distance grows with p"),
)
"""What each paper is about: an item, and how one of its claims begins."""


def main_claims() -> str:
    """A row for each main claim: the paper's margin, ours with its interval, and the verdict of its best result."""
    judged = judged_claims()
    rows = []
    for item, begins in MAIN_CLAIMS:
        found = [one for one in judged if one.result["item"] == item and one.claim["says"].startswith(begins)]
        # Corrected settings come first, then many seeds; of equals the first, since the paper's scale comes first.
        best = max(found, key=lambda one: (one.setting != OUTDATED, _seeds(one)))
        paper = item.partition("/")[0]
        word = best.marked.replace(HOLDS, f"**{HOLDS}**") if best.word == HOLDS else best.marked
        verdict = f"{word}, {_seeds(best)} seeds" if _seeds(best) > 1 else word
        name = f"[{_short(paper)}]({_page(paper)})"
        margins = (_quantity(best), paper_margin(best), *our_margin(best.verdict))
        rows.append([name, best.says, *margins, verdict, best.setting])
    return table(["paper", "claim", "of", "the paper's margin", "ours", "95 % interval", "verdict", "with"], rows)


def counts_by_paper() -> str:
    """The items of each paper that have a result, and the verdicts on its claims, counted."""
    found = [one for one in judged_claims() if not one.claim.get("choice")]
    words = [word for word in WORDS if word in {one.verdict.word for one in found} and "seed" not in word]
    ways = [f"one seed: {way}" for way in ("for", "both ways", "against")]
    columns = [*(word for word in words if word != UNDECIDED), *ways, UNDECIDED]
    counts = {
        paper: Counter(one.word for one in found if one.result["item"].startswith(f"{paper}/"))
        for paper in all_papers()
    }
    total = sum(counts.values(), Counter[str]())
    named = [(f"[{_short(p)}](reproductions/{p}.md)", ", ".join(linked_items()[p]), c) for p, c in counts.items()]
    rows = [
        [name, items, *(str(count[word]) for word in columns), str(count.total())]
        for name, items, count in [*named, ("all", "", total)]
    ]
    return table(["paper", "items with a result", *columns, "claims"], rows)


def means_and_noise() -> str:
    """The claims by the verdict on their means alone, as version 0.1 had it, and by that with intervals."""
    found: dict[str, Counter[str]] = {}
    for one in judged_claims():
        if not one.claim.get("choice"):
            found.setdefault(one.claim["verdict"], Counter())[one.word] += 1
    rows = [
        [word, str(counts.total()), "; ".join(f"{count} {now}" for now, count in counts.most_common())]
        for word, counts in sorted(found.items(), key=lambda pair: -pair[1].total())
    ]
    return table(["on means alone", "claims", "with intervals over seeds"], rows)


def _quantity(one: JudgedClaim) -> str:
    """What the margins of a claim are of, up to the first comma or colon."""
    quantity = all_items()[one.result["item"]].quantities[one.claim["of"]]
    name = re.split("[,:]", quantity.label)[0].lower()
    return f"{name} ({quantity.unit})" if quantity.unit else name


def _seeds(one: JudgedClaim) -> int:
    """The fewest seeds behind a verdict that has any."""
    return min((len(line.margins) for line in one.verdict.lines.values() if line.margins), default=0)


def _short(paper: str) -> str:
    return all_papers()[paper].title.partition(" (")[0]


def _page(paper: str) -> str:
    return f"results/{paper}.md"
