"""The papers in one screen: their main claims with our verdicts, and all claims counted by paper."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict

from fedblend.papers.items import all_papers
from fedblend.papers.plan import plan_item
from fedblend.papers.verdicts import HOLDS, NO_VERDICT, ONE_SEED, WORDS
from tables.claims import (
    FULL,
    OUTDATED,
    SETTINGS,
    JudgedClaim,
    claims_of_0_1,
    judged_claims,
    our_margin,
    paper_margin,
)
from tables.common import RESULTS, Row, all_items, table
from tables.items import data_of, item_results, link, scale_of

MAIN_CLAIMS = (
    ("fedmix/choice-taylor", "FedMix above FedAvg in final accuracy"),
    ("fedmix/table-6", "FedMix suffers less from heterogeneity than FedAvg"),
    ("aggenhance/choice-scale", "Enhanced FedAvg needs fewer rounds than FedAvg"),
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
    rows = []
    for item, begins in MAIN_CLAIMS:
        best = best_result(item, begins)
        paper = item.partition("/")[0]
        verdict = best.marked.replace(HOLDS, f"**{HOLDS}**") if best.word == HOLDS else best.marked
        name = f"[{_short(paper)}]({_page(paper)})"
        margins = (_quantity(best), paper_margin(best), *our_margin(best.verdict))
        rows.append([name, best.says, *margins, verdict, best.setting])
    head = ["paper", "claim", "of", "the paper's margin", "ours", "95 % interval, seeds", "verdict", "with"]
    return table(head, rows)


def best_result(item: str, begins: str) -> JudgedClaim:
    """The best result of an item's claim, by how the claim begins (its choice may follow its words).

    Corrected settings come first, then the paper's with several seeds, then many seeds; of equals the first.
    """
    found = [one for one in judged_claims() if one.result["item"] == item and one.says.startswith(begins)]
    return max(found, key=lambda one: (one.setting != OUTDATED, one.setting == FULL and _seeds(one) > 1, _seeds(one)))


def counts_by_paper() -> str:
    """The verdicts on the claims of each paper, counted: first at the paper's settings, then in smaller runs."""
    found = [one for one in judged_claims() if not one.claim.get("choice")]
    words = [word for word in WORDS if word in {one.verdict.word for one in found} and word != ONE_SEED]
    columns = [*words, *(f"{ONE_SEED}: {way}" for way in ("for", "both ways", "against"))]
    rows = []
    for full, name in ((True, FULL), (False, "smaller runs or other data")):
        counts = {paper: Counter[str]() for paper in all_papers()}
        for one in (one for one in found if (one.setting == FULL) == full):
            word = one.verdict.word
            counts[one.result["item"].partition("/")[0]][one.word if word == ONE_SEED else word] += 1
        named = {f"[{_short(paper)}](reproductions/{paper}.md)": count for paper, count in counts.items()}
        for paper, count in {**named, "all": sum(counts.values(), Counter[str]())}.items():
            rows.append([name, paper, *(str(count[word]) for word in columns), str(count.total())])
    return table(["settings", "paper", *columns, "claims"], rows)


def counts_by_setting() -> str:
    """The verdicts on claims, counted by how near the result is to the paper's, and by data set."""
    found = [one for one in judged_claims() if not one.claim.get("choice")]
    words = [word for word in WORDS if word in {one.verdict.word for one in found}]
    rows = []
    for setting in SETTINGS:
        here = [one for one in found if one.setting == setting]
        for data in sorted({data_of(one.result) for one in here}):
            counts = Counter(one.verdict.word for one in here if data_of(one.result) == data)
            name = setting.removesuffix(" and data")
            rows.append([name, data, *(str(counts[word]) for word in words), str(counts.total())])
    return table(["settings", "data", *words, "claims"], rows)


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
    """The claims whose verdict on means alone is another one than in version 0.1, and why."""
    rows = []
    for old, new in claims_of_0_1():
        if new and new.claim["verdict"] != old["verdict"]:
            margin = "" if old["margin"] is None else f", {old['margin']:+.3g}"
            seeds = "one seed" if old["seeds"] == 1 else f"{old['seeds']} seeds"
            then = f"{old['verdict']}{margin}, {old['data']}, {seeds}"
            mean, interval = our_margin(new.verdict)
            numbers = f", {mean}" + (f" ({interval})" if interval else "") if mean else ""
            now = f"{new.marked}{numbers}, {data_of(new.result)}"
            rows.append([link(new.result), new.claim["says"], then, now, _why(old, new)])
    return table(["item", "claim", "in 0.1 (means alone)", "now", "what changed"], rows)


def changed_readings() -> str:
    """The claims that are new, or judged otherwise, since baselines are the nearest ones; and why."""
    before = {
        (item, scale, says): text
        for item, scale, says, text in json.loads((RESULTS / "before-nearest.json").read_text())["claims"]
    }
    rows = []
    for one in judged_claims():
        margin, interval = our_margin(one.verdict)
        now = ", ".join(filter(None, [one.marked, margin])) + (f" ({interval})" if interval else "")
        then = before.get((one.result["item"], one.result["scale"], one.says))
        if then is None or then.partition(",")[0].removesuffix(" †") != one.marked.removesuffix(" †"):
            name = f"{link(one.result)}, {scale_of(one.result)}"
            rows.append([name, one.says.replace("|", "\\|"), then or "not judged", now, _reading(one, then is None)])
    return table(["item, scale", "claim", "before", "now", "why"], rows)


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
