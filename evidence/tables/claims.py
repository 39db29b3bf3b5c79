"""Every claim of the papers beside ours: margin, interval, scale and a verdict that takes noise into account."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fedblend.papers.claims import judge_claim, parse_claim
from fedblend.papers.result import paper_numbers
from fedblend.papers.verdicts import FAILS, HOLDS, NO_VERDICT, NOT_COMPARABLE, ONE_SEED, ClaimVerdict, judge_result
from fedblend.runs.differences import certain_together
from tables.common import RESULTS, ROOT, Row, all_items, table
from tables.items import item_results, link

FULL, OWN, OTHER = "the paper's settings and data", "smaller, the paper's data", "smaller, other data"
OUTDATED = "settings that were corrected since"


class JudgedClaim(NamedTuple):
    """A claim of a committed result."""

    result: Row
    claim: Row
    verdict: ClaimVerdict
    certain: bool
    """Whether the claim holds, or does not, for certain among all claims (Holm's correction)."""

    @property
    def setting(self) -> str:
        """How near the result is to the paper's."""
        if "outdated" in self.result:
            return OUTDATED
        return OTHER if self.result["other_data"] else OWN if self.result["smaller"] else FULL

    @property
    def word(self) -> str:
        """The verdict; without a number why, and of one seed where it points in the places that it decided."""
        if self.verdict.word == NO_VERDICT:
            claims = all_items()[self.result["item"]].claims
            why = next((one.missing for one in claims if one.says == self.claim["says"]), "")
            return f"{NO_VERDICT}: {why or 'no run'}"
        if self.verdict.word != ONE_SEED:
            return self.verdict.word
        held = {held for line in self.verdict.lines.values() for held in line.held}
        return f"{ONE_SEED}: {'both ways' if len(held) > 1 else 'for' if True in held else 'against'}"

    @property
    def says(self) -> str:
        """The claim's words, and the choice that it is judged with if there is one."""
        choice = self.claim.get("choice")
        return self.claim["says"] + (f"; {choice}" if choice else "")

    @property
    def marked(self) -> str:
        """The verdict, with a dagger if it is certain, and the places that a smaller run cannot judge."""
        apart = ", ".join(self.claim.get("not_comparable", ())) if self.verdict.lines else ""
        return self.word + " †" * self.certain + (f" ({apart} {NOT_COMPARABLE})" if apart else "")


def judged_claims() -> list[JudgedClaim]:
    """The claims of all committed results, choices among them.

    A result may have a part of its rows and columns. Claims on the others are left out if another result has them, and
    stand once if none has.
    """
    every = [(result, claim) for result in item_results() for claim in result["claims"]]
    measured = {(result["item"], claim["says"]) for result, claim in every if claim["places"]}
    first = {(result["item"], claim["says"]): result["scale"] for result, claim in reversed(every)}
    found = [
        (result, claim, judge_result(result, claim))
        for result, claim in every
        if claim["places"]
        or claim.get("not_comparable")
        or ((result["item"], claim["says"]) not in measured and result["scale"] == first[result["item"], claim["says"]])
    ]
    p_values = {place: p for place, (*_, verdict) in enumerate(found) if (p := verdict.p_value) is not None}
    certain = certain_together(p_values)
    return [JudgedClaim(*one, place in certain and one[2].word in (HOLDS, FAILS)) for place, one in enumerate(found)]


def claims_of_0_1() -> list[tuple[Row, JudgedClaim | None]]:
    """The claims of version 0.1, each beside today's of the same scale if there is one, or else of another."""
    file = json.loads((RESULTS / "version-0.1.json").read_text())
    today: dict[tuple[str, str], list[JudgedClaim]] = defaultdict(list)
    for one in judged_claims():
        if not one.claim.get("choice"):
            today[one.result["item"], one.claim["says"]].append(one)
    pairs = []
    for line in file["claims"]:
        old = dict(zip(file["head"], line, strict=True))
        found = today[old["item"], old["says"]]
        pairs.append((old, max(found, key=lambda one: one.result["scale"] == old["scale"], default=None)))
    return pairs


def certain_claims() -> str:
    """How many verdicts are certain among all claims that have an interval, choices among them; and which."""
    tested = [one for one in judged_claims() if one.verdict.p_value is not None]
    rows = []
    for word in (HOLDS, FAILS):
        found = [one for one in tested if one.word == word]
        certain = [link(one.result) for one in found if one.certain]
        rows.append([word, str(len(found)), str(len(certain)), ", ".join(dict.fromkeys(certain))])
    return table(["verdict", f"of {len(tested)} claims with an interval", "certain among all", "items"], rows)


def paper_margin(one: JudgedClaim) -> str:
    """The paper's smallest margin in the places of our result, of "up to" its largest; empty without numbers."""
    item, quantity = all_items()[one.result["item"]], one.claim["of"]
    if quantity not in item.quantities:
        return ""
    comparison = parse_claim(one.claim["holds"], list(item.rows), list(item.all_columns))
    numbers, best = paper_numbers(item, quantity), one.claim.get("up_to")
    lines = judge_claim(comparison, numbers, {}, None if best else list(one.verdict.lines), paper=numbers).lines
    margins = [check.margin for check in lines.values() if not math.isnan(check.margin)]
    return _margin_text(((max if best else min)(margins),)) if margins else ""


def our_margin(verdict: ClaimVerdict) -> tuple[str, str]:
    """Our smallest mean margin over columns (or rows), with its place where there are several; interval and seeds."""
    weakest = verdict.weakest
    if weakest is None:
        return "", ""
    place = next(name for name, line in verdict.lines.items() if line is weakest)
    where = f" ({place})" if len(verdict.lines) > 1 else ""
    interval, seeds = weakest.interval, len(weakest.margins)
    told = [f"{interval[0]:+.3g} to {interval[1]:+.3g}"] if interval else []
    told += [f"{seeds} seeds"] if seeds > 1 else []
    return _margin_text(weakest.margins) + where, ", ".join(told)


def _margin_text(margins: Sequence[float]) -> str:
    """The mean margin, or which side never reached its target, in how many seeds unless in all."""
    never = [margin for margin in margins if math.isinf(margin)]
    if not never:
        return re.sub(r"^\+0$", "0", f"{sum(margins) / len(margins):+.3g}")
    if len(set(never)) > 1:
        return "either never"
    share = "" if len(never) == len(margins) else f" in {len(never)} of {len(margins)}"
    return ("never reached" if never[0] < 0 else "the other never") + share


def sensitivity(paper: str) -> str:
    """The claims of a paper that a choice can flip: a row for each choice, with its verdicts at both scales."""
    judged: dict[tuple[str, str, str], list[JudgedClaim]] = defaultdict(list)
    for one in judged_claims():
        if one.claim["verdict"] != "not measured":
            judged[one.result["item"], one.claim["says"], one.claim.get("choice") or ""].append(one)
    measured = {name for name, *_ in judged}
    rows = []
    for name, item in all_items().items():
        if not name.startswith(f"{paper}/"):
            continue
        short = item.title.removeprefix("Choice: ").partition(", ")[0]
        shown = f"[{short}](reproductions/{paper}.md#{name.partition('/')[2]})" if name in measured else short
        lead, told = f"{shown}; ", set[str]()
        claims = [claim for claim in item.claims if claim.choice]
        for says in dict.fromkeys(claim.says for claim in claims):
            about = lead + says
            for choice, source in {str(one.choice): one.source for one in claims if one.says == says}.items():
                found = judged[name, says, choice]
                full, small = (
                    "; ".join(_verdict(one) for one in found if (one.setting == FULL) == at) for at in (1, 0)
                )
                source = "" if choice in told else source
                rows.append([about, choice, source, full, small if found else "not run"])
                told.add(choice)
                lead = about = ""
    return table(["setting; claim", "choice", "whose", "the paper's scale", "smaller"], rows)


def _verdict(one: JudgedClaim) -> str:
    """The verdict of a claim, and in brackets its margin and interval."""
    told = ", ".join(filter(None, our_margin(one.verdict)))
    return one.marked + (f" ({told})" if told else "")


def deciding_runs() -> dict[str, Row]:
    """The runs of evidence/deciding.toml, the cheapest first."""
    runs = tomllib.loads((ROOT / "evidence" / "deciding.toml").read_text(encoding="utf-8"))
    return dict(sorted(runs.items(), key=lambda one: float(one[1]["hours"])))


def _on_gpu(run: Row) -> str:
    return f" ({run['gpu']:g} on a GPU)" if "gpu" in run else ""


def deciding_table() -> str:
    """The runs of evidence/deciding.toml, the cheapest first."""
    rows = [
        [f"`{name}`", str(len(run["seeds"])), f"{run['hours']:g}{_on_gpu(run)}", run["decides"]]
        for name, run in deciding_runs().items()
    ]
    return table(["name", "seeds", "hours", "decides"], rows)
