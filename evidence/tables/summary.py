"""The papers in one screen: their main claims with our verdicts, and all claims counted by paper."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict

from fedblend.papers.items import all_papers
from fedblend.papers.plan import plan_item
from fedblend.papers.verdicts import FAILS, HOLDS, NO_VERDICT, NOISE, NOT_COMPARABLE, ONE_SEED, PART, UNDECIDED
from tables.claims import (
    FULL,
    OTHER,
    OUTDATED,
    OWN,
    JudgedClaim,
    claims_of_0_1,
    judged_claims,
    our_margin,
    paper_margin,
)
from tables.common import RESULTS, Row, all_items, table
from tables.items import data_of, item_results, link

MAIN_CLAIMS = {
    "fedmix": (
        (
            "choice-taylor",
            "FedMix above FedAvg in final accuracy (section 4.2); the term divided",
            "FEMNIST, the term divided twice, as in public code: FedMix above FedAvg",
        ),
        (
            "choice-taylor",
            "FedMix above FedAvg in final accuracy (section 4.2); the term averaged",
            "FEMNIST, the formula as printed: FedMix above FedAvg",
        ),
        (
            "table-1",
            "FedProx with FedMix above FedProx",
            "FEMNIST, the formula as printed: FedProx with FedMix above FedProx",
        ),
        ("choice-vgg", "FedMix above FedAvg", "CIFAR10, the paper's VGG, 100 of 500 rounds: FedMix above FedAvg"),
        ("choice-vgg", "FedMix above NaiveMix", "The same: FedMix above NaiveMix"),
        ("table-3", "FedMix above the other", "CIFAR10, LeNet-5, 20 to 60 clients: FedMix above FedAvg"),
        ("table-3", "The same: LocalMix", "The same: FedMix above LocalMix"),
        (
            "table-6",
            "FedMix suffers less",
            "CIFAR10, LeNet-5: from ten classes a client to two FedMix loses less than FedAvg",
        ),
    ),
    "aggenhance": (
        (
            "choice-scale",
            "Enhanced FedAvg needs fewer rounds than FedAvg (section 5.1); inputs in [0, 1]; as",
            "CIFAR10, inputs in [0, 1]: points save rounds",
        ),
        ("table-1", "Enhanced FedAvg needs no more", "CIFAR10, standardised inputs: points cost no rounds"),
        ("choice-mu", "Enhanced FedProx needs no more", "MNIST, FedProx with mu doubled: points cost no rounds"),
        ("figure-2", "Accuracy increases", "Two classes in a plane: points raise accuracy"),
        ("figure-3", "The mean number", "Clients hold more classes as gamma grows"),
        ("figure-8", "A model can be trained", "5,000 digits: a model trained on the points alone reaches 70 %"),
        (
            "figure-9",
            "The same: with augmentation",
            "CIFAR10 in small: points are better than one real sample a class, augmented",
        ),
        ("figure-6", "The enhanced needs fewer", "CIFAR10 in small: points save rounds at every gamma"),
    ),
    "mix2fld": (
        (
            "choice-t-max",
            "Asymmetric channels: Mix2FLD above FL (section IV); T_max = 104",
            "Asymmetric channel, even labels: Mix2FLD above FL",
        ),
        (
            "choice-t-max",
            "Symmetric channels: FL not below Mix2FLD (section IV); T_max = 104",
            "Symmetric channel, even labels: FL above Mix2FLD",
        ),
        (
            "figure-2",
            "Asymmetric channels: Mix2FLD up to 16.7 % above",
            "Asymmetric channel: Mix2FLD up to 16.7 % above FL, relative",
        ),
        ("figure-2", "The same in points: up to 16.7", "The same, in points of accuracy"),
        ("table-2", "Privacy grows", "Distance to raw samples grows with lambda"),
        (
            "table-3",
            "Mix2up preserves more",
            "MNIST: Mix2up's samples are farther from raw ones than Mixup's, at every lambda",
        ),
        ("figure-2", "Mix2FLD above FD (section", "Mix2FLD above FD"),
        ("figure-3", "From 10 to 50 devices", "From 10 to 50 devices the mean accuracy rises"),
    ),
    "xormixfl": (
        (
            "choice-network",
            "XorMixFL above standalone learning (section 4.1), target label 9; the authors' network, [0, 1]; n = 2",
            "Target label 9: above a device alone with two target samples",
        ),
        (
            "choice-network",
            "XorMixFL above standalone learning (section 4.1), target label 9; the authors' network, [0, 1]; n = 10",
            "The same: with ten target samples, as in the paper's text",
        ),
        (
            "table-2",
            "XorMixFL above standalone",
            "Four choices of labels: above a device alone, its samples nearest to the paper's number",
        ),
        ("table-2", "XorMixFL above vanilla", "Four choices of labels: above vanilla FL"),
        ("table-2", "XorMixFL up to 17.6 %", "Up to 17.6 % above vanilla FL, read as 1.1 times"),
        ("table-2", "MixFL, which hides", "Four choices of labels: MixFL, which hides less, is the highest"),
        ("table-3", "The distance grows with p", "Distance to raw samples grows with p"),
        ("table-3", "The lowest mean", "XorMixFL's lowest distance is above MixFL's highest"),
    ),
    "fed-augmix": (
        (
            "choice-split",
            "Fed-AugMix improves FedAvg (section V-B); Dirichlet by class",
            "MNIST, 100 rounds: Fed-AugMix above FedAvg on clients' own tests",
        ),
        (
            "choice-split",
            "Fed-AugMix improves FedAvg (section V-B), measured after local training; Dirichlet by class",
            "The same, after local training",
        ),
        ("table-2", "The error rises", "The attacker's error rises from none to severity 10"),
        ("figure-6", "Without loss scaling it", "Without loss scaling the attacker's error is lower"),
        ("figure-4", "Low severity", "Severity 2 raises accuracy"),
        ("figure-4", "Accuracy declines", "Accuracy falls from severity 2 to 10"),
    ),
}
"""What each paper is about, in the order of its page: an item, how one of its claims begins, and the claim in short."""

COUNTED = (HOLDS, PART, NOISE, FAILS, ONE_SEED, "not judged")
"""Columns of the counted verdicts."""

COLUMN = dict.fromkeys((UNDECIDED, NOT_COMPARABLE, NO_VERDICT), "not judged")

SETTING = {FULL: "the paper's", OWN: "smaller", OTHER: "smaller, other data"}


def main_claims(paper: str) -> str:
    """A row for each main claim of a paper, those at its settings first: margins, interval and verdict."""
    rows = []
    for item, begins, words in MAIN_CLAIMS[paper]:
        best = best_result(f"{paper}/{item}", begins)
        margin, interval = our_margin(best.verdict)
        ours = margin.partition(" (")[0] + _unit(best) + (f" ({interval})" if interval else "")
        rows.append([words, best.marked, ours, any_paper_margin(best), SETTING[best.setting], link(best.result)])
    rows.sort(key=lambda row: row[4] != SETTING[FULL])
    return table(["claim", "verdict", "ours (95 % interval)", "the paper", "settings", "item"], rows)


def _unit(one: JudgedClaim) -> str:
    """Points of accuracy, rounds, or nothing."""
    quantity = all_items()[one.result["item"]].quantities[one.claim["of"]]
    weakest = one.verdict.weakest
    if weakest is None or not math.isfinite(weakest.mean) or "/" in one.claim["holds"]:  # a ratio has no unit
        return ""
    return " points" if quantity.unit == "%" else " rounds" if quantity.label.startswith("Rounds") else ""


def any_paper_margin(one: JudgedClaim) -> str:
    """The paper's margin of a claim, whatever the choice that it is judged with; empty without one."""
    same = (other for other in judged_claims() if other.claim["says"] == one.claim["says"])
    found = [paper_margin(other) for other in same if other.result["item"] == one.result["item"]]
    return paper_margin(one) or next(filter(None, found), "")


def best_result(item: str, begins: str) -> JudgedClaim:
    """The best result of an item's claim, by how the claim begins (its choice may follow its words).

    Corrected settings come first, then the paper's with several seeds, then many seeds; of equals the first.
    """
    found = [one for one in judged_claims() if one.result["item"] == item and one.says.startswith(begins)]
    return max(found, key=lambda one: (one.setting != OUTDATED, one.setting == FULL and _seeds(one) > 1, _seeds(one)))


def counts_by_paper() -> str:
    """The verdicts on the claims of each paper, counted: first at the paper's settings, then in smaller runs."""
    found = [one for one in judged_claims() if not one.claim.get("choice")]
    rows = []
    for full, name in ((True, "the paper's"), (False, "smaller")):
        counts = {paper: Counter[str]() for paper in all_papers()}
        for one in (one for one in found if (one.setting == FULL) == full):
            counts[one.result["item"].partition("/")[0]][COLUMN.get(one.verdict.word, one.verdict.word)] += 1
        named = {f"[{_short(paper)}](reproductions/{paper}.md)": count for paper, count in counts.items()}
        for paper, count in {**named, "all": sum(counts.values(), Counter[str]())}.items():
            rows.append([name, paper, *(str(count[word]) for word in COUNTED), str(count.total())])
    return table(["settings", "paper", *COUNTED, "claims"], rows)


def runs_made() -> str:
    """The training runs behind the committed results, by paper and scale, and those of our own studies.

    Runs that several items share count once. Hours are those that the results name.
    """
    runs: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    minutes: Counter[tuple[str, str]] = Counter()
    for result in item_results():
        place = (_short(result["item"].partition("/")[0]), f"{result['scale']} scale")
        plan = plan_item(result["item"], result["scale"], only=[*filter(None, (*result["rows"], *result["columns"]))])
        cells = {(cell.row, cell.column): cell for cell in plan.cells if plan.trains(cell)}
        values = [cell for quantity in result["quantities"].values() for cell in quantity["cells"]]
        measured = {(one["row"], one["column"], seed) for one in values for seed in one["ours"]}
        runs[place] |= {(cells[key[:2]].fingerprint, key[2]) for key in measured if key[:2] in cells}
        computing = sum(curve["seconds"] for curve in result.get("curves", ())) / 60
        minutes[place] += max(result.get("minutes", 0.0), computing)
    for path in sorted((RESULTS / "studies").glob("*.json")):
        study, place = json.loads(path.read_text()), ("our own", "studies")
        found = study["runs"] if isinstance(study.get("runs"), list) else []
        runs[place] |= {(f"{path.stem} {run['method']}", str(run["seed"])) for run in found}
        minutes[place] += sum(run["costs"]["seconds"] for run in found) / 60
    rows = [
        [*place, str(len(found)), str(len({seed for _, seed in found})), f"{minutes[place] / 60:.1f}"]
        for place, found in runs.items()
    ]
    rows.append(["all", "", str(sum(map(len, runs.values()))), "", f"{minutes.total() / 60:.0f}"])
    return table(["paper", "scale", "runs", "seeds, at most", "hours"], rows)


def before_and_after() -> str:
    """The claims by their verdict in version 0.1, on means alone, and by today's, with intervals over seeds."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for old, new in claims_of_0_1():
        found[old["verdict"]][new.word if new else "left out"] += 1
    rows = [
        [word, str(counts.total()), "; ".join(f"{count} {now}" for now, count in counts.most_common())]
        for word, counts in sorted(found.items(), key=lambda pair: -pair[1].total())
    ]
    return table(["in version 0.1", "claims", "now"], rows)


def changed_since_0_1() -> str:
    """The claims whose verdict, also on means alone, is another one than in version 0.1, by what changed."""
    changes = [
        (new, old["verdict"], new.word, _why(old, new))
        for old, new in claims_of_0_1()
        if new and old["verdict"] not in (new.claim["verdict"], new.word)
    ]
    return _changes(changes)


def changed_readings() -> str:
    """The claims that are new, or judged otherwise, since baselines are the nearest ones; by why."""
    before = {
        (item, scale, says): text.partition(",")[0].removesuffix(" †")
        for item, scale, says, text in json.loads((RESULTS / "before-nearest.json").read_text())["claims"]
    }
    changes = []
    for one in judged_claims():
        then = before.get((one.result["item"], one.result["scale"], one.says))
        if then is None or then != one.marked.removesuffix(" †"):
            now = NOT_COMPARABLE if one.claim.get("not_comparable") else one.word
            changes.append((one, then or "not judged", now, _reading(one, then is None)))
    return _changes(changes)


def _changes(changes: list[tuple[JudgedClaim, str, str, str]]) -> str:
    """A row for each reason of a change: in how many claims of which items the verdict was one, and is another."""
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one, then, now, why in changes:
        paper = one.result["item"].partition("/")[0]
        groups[why][f"{then} → {now}"].append(f"{_short(paper)} {link(one.result)}")
    rows = []
    for why, moves in groups.items():
        for move, links in moves.items():
            rows.append([why, move, str(len(links)), ", ".join(dict.fromkeys(links))])
            why = ""
    return table(["why", "before → now", "claims", "items"], rows)


def _reading(one: JudgedClaim, new: bool) -> str:
    """Why a claim is new, or has another verdict."""
    if one.claim.get("not_comparable"):
        return "the upper bound of the smaller run contradicts the large one"
    if new:
        return "a choice that was not judged" if one.claim.get("choice") else "the paper states it; it was missing"
    if one.verdict.word == NO_VERDICT:
        return "there is no number; it was called undecided"
    if one.claim.get("up_to"):
        return '"up to" is the best column, not labels 2 and 4'
    nearest = "nearest:" in one.claim["holds"]
    return "standalone learning with the samples nearest to the paper's number" if nearest else ""


CORRECTED = {
    "fed-augmix": "the split is by class",
    "mix2fld/figure-2": "T_max is 104 ms, not 110",
    "mix2fld/payload": "ten rounds, as the claim says, not six",
    "xormixfl": "the authors' network, and for standalone learning the target samples nearest to the paper's number",
}
"""What was corrected since version 0.1 in the settings of a paper, or of an item."""


def _why(old: Row, new: JudgedClaim) -> str:
    """What differs between a claim's settings in version 0.1 and today's."""
    item = new.result["item"]
    reasons = [CORRECTED[name] for name in (item, item.partition("/")[0]) if name in CORRECTED]
    data = data_of(new.result)
    reasons += (
        ["the upper bound of the smaller run contradicts the large one"] if new.claim.get("not_comparable") else []
    )
    reasons += [f"{data} instead of {old['data']}"] if set(data.split(", ")) != set(old["data"].split(", ")) else []
    reasons += ["more seeds"] if _seeds(new) > old["seeds"] else []
    return "; ".join(reasons)


def _seeds(one: JudgedClaim) -> int:
    """The fewest seeds behind a verdict that has any."""
    return min((len(line.margins) for line in one.verdict.lines.values() if line.margins), default=0)


def _short(paper: str) -> str:
    return all_papers()[paper].title.partition(" (")[0]
