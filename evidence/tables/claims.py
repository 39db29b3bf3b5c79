"""Every claim of the papers beside ours: margin, interval, scale and a verdict that takes noise into account."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter, defaultdict
from typing import NamedTuple

from fedblend.papers.claims import judge_claim, parse_claim
from fedblend.papers.result import paper_numbers
from fedblend.papers.verdicts import FAILS, HOLDS, NOISE, ONE_SEED, PART, UNDECIDED, ClaimVerdict, judge_result
from tables.common import ROOT, Row, all_items, table
from tables.items import data_of, item_results, link, scale_of

FULL, OWN, OTHER = "the paper's settings and data", "smaller, the paper's data", "smaller, other data"
OUTDATED = "settings that were corrected since"
SETTINGS = (FULL, OWN, OTHER, OUTDATED)


class JudgedClaim(NamedTuple):
    """A claim of a committed result."""

    result: Row
    claim: Row
    verdict: ClaimVerdict

    @property
    def setting(self) -> str:
        """How near the result is to the paper's."""
        if "outdated" in self.result:
            return OUTDATED
        return OTHER if self.result["other_data"] else OWN if self.result["smaller"] else FULL

    @property
    def word(self) -> str:
        """The verdict; of one seed also where it points, in the places that it decided."""
        if self.verdict.word != ONE_SEED:
            return self.verdict.word
        held = {held for line in self.verdict.lines.values() for held in line.held}
        return f"{ONE_SEED}: {'both ways' if len(held) > 1 else 'for' if True in held else 'against'}"


def judged_claims() -> list[JudgedClaim]:
    """The claims of all committed results, choices among them."""
    return [
        JudgedClaim(result, claim, judge_result(result, claim))
        for result in item_results()
        for claim in result["claims"]
    ]


def claim_counts() -> str:
    """Verdicts counted by scale and data."""
    found = [one for one in judged_claims() if not one.claim.get("choice")]
    words = [HOLDS, PART, NOISE, FAILS, *(f"{ONE_SEED}: {way}" for way in ("for", "both ways", "against")), UNDECIDED]
    counts = {setting: Counter(one.word for one in found if one.setting == setting) for setting in SETTINGS}
    total = sum(counts.values(), Counter[str]())
    rows = [
        [setting, *(str(count[word]) for word in words), str(count.total())]
        for setting, count in [*counts.items(), ("all", total)]
    ]
    decided = total.total() - total[UNDECIDED]
    single = sum(number for word, number in total.items() if word.startswith(ONE_SEED))
    text = (
        f"Of {total.total()} claims {decided} were measured: {decided - single} with several seeds, {single} with one, "
        "which decides nothing."
    )
    return table(["scale and data", *words, "claims"], rows, text)


def claim_table() -> str:
    """A row for each claim of each committed result."""
    rows = [
        [
            link(one.result["item"], ""),
            one.claim["says"].replace("|", "\\|"),
            _paper_text(one),
            *_ours_and_interval(one.verdict),
            f"{scale_of(one.result)}, {data_of(one.result)}".rstrip(", "),
            one.word,
        ]
        for one in judged_claims()
        if not one.claim.get("choice")
    ]
    return table(["item", "claim", "paper", "ours", "95 % interval", "scale, data", "verdict"], rows)


def _paper_text(one: JudgedClaim) -> str:
    """The paper's smallest margin in the places of our result; empty where it has no numbers."""
    item, quantity = all_items()[one.result["item"]], one.claim["of"]
    if quantity not in item.quantities:
        return ""
    comparison = parse_claim(one.claim["holds"], list(item.rows), list(item.all_columns))
    lines = judge_claim(comparison, paper_numbers(item, quantity), {}, list(one.verdict.lines)).lines
    margins = [check.margin for check in lines.values() if not math.isnan(check.margin)]
    return _margin_text(min(margins)) if margins else ""


def _ours_and_interval(verdict: ClaimVerdict) -> tuple[str, str]:
    """Our smallest mean margin over columns (or rows), with its place where there are several; and its interval."""
    weakest = verdict.weakest
    if weakest is None:
        return "", ""
    place = next(name for name, line in verdict.lines.items() if line is weakest)
    where = f" ({place})" if len(verdict.lines) > 1 else ""
    interval = weakest.interval
    between = f"{interval[0]:+.3g} to {interval[1]:+.3g}" if interval else ""
    return _margin_text(weakest.mean) + where, between


def _margin_text(margin: float) -> str:
    if math.isfinite(margin):
        return re.sub(r"^\+0$", "0", f"{margin:+.3g}")
    return "never reached" if margin < 0 else "the other never"


def choice_table() -> str:
    """A row for each result of a choice that can flip a verdict: whose it is, and the verdict that it gives."""
    judged: dict[tuple[str, ...], list[JudgedClaim]] = defaultdict(list)
    for one in judged_claims():
        if one.claim.get("choice") and one.claim["verdict"] != "not measured":
            judged[one.result["item"], one.claim["says"], one.claim["choice"]].append(one)
    rows = []
    for name, item in all_items().items():
        for claim in item.claims:
            found = judged[name, claim.says, claim.choice]
            stated = [claim.says, claim.choice, claim.source]
            for one in found:
                measured = [*_ours_and_interval(one.verdict), scale_of(one.result), one.word]
                rows.append([link(name), *stated, *measured])
            if claim.choice and not found:
                rows.append([name, *stated, "", "", "", "not run"])
    head = ["item", "claim", "choice", "whose, and how known", "margin", "95 % interval", "scale", "verdict"]
    return table(head, rows)


def deciding_table() -> str:
    """The runs of evidence/deciding.toml, the cheapest first."""
    runs = tomllib.loads((ROOT / "evidence" / "deciding.toml").read_text(encoding="utf-8"))
    rows = [
        [
            f"`{name}`",
            f"{run['item']}, {run['scale']} scale" + (f", {', '.join(run['only'])}" if "only" in run else ""),
            str(len(run["seeds"])),
            f"{run['hours']:g}" + (" (GPU)" if run.get("gpu") else ""),
            run["decides"],
        ]
        for name, run in sorted(runs.items(), key=lambda one: one[1]["hours"])
    ]
    return table(["name", "runs", "seeds", "hours", "decides"], rows)
