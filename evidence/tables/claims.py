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
from tables.items import PAPER_NAMES, data_of, item_results, link, scale_of

FULL, OWN, OTHER = "the paper's settings and data", "smaller, the paper's data", "smaller, other data"
OUTDATED = "settings that were corrected since"
SETTINGS = (FULL, OWN, OTHER, OUTDATED)


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
        which = [f"`{one.result['item']}`: {one.says}" for one in found if one.certain]
        rows.append([word, str(len(found)), str(len(which)), "<br>".join(which).replace("|", "\\|")])
    return table(["verdict", f"of {len(tested)} claims with an interval", "certain among all", "which"], rows)


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


def sensitivity() -> str:
    """For each claim that a choice can flip, a table of its verdicts by choice; and the run that would decide it."""
    judged: dict[tuple[str, ...], list[JudgedClaim]] = defaultdict(list)
    for one in judged_claims():
        if one.claim["verdict"] != "not measured":
            judged[one.result["item"], one.claim["says"], one.claim.get("choice") or ""].append(one)
    deciding = {run["item"]: (name, run) for name, run in deciding_runs().items()}
    lines: list[str] = []
    for item_name, item in all_items().items():
        claims = [claim for claim in item.claims if claim.choice]
        if claims:
            paper = PAPER_NAMES[item_name.partition("/")[0]]
            choice = item.title.removeprefix("Choice: ")
            short = choice.partition(", ")[0]
            lines += [f"### {paper}: {short}", ""]
            lines += [f"The choice: {choice}.", ""] if short != choice else []
        for says in dict.fromkeys(claim.says for claim in claims):
            rows = []
            for claim in (one for one in claims if one.says == says):
                found = judged[item_name, says, claim.choice or ""]
                cells = [_choice_cells(one) for one in found] or [["not run", "", "", ""]]
                rows += [[str(claim.choice), claim.source, *one] for one in cells]
            head = ["choice", "whose, and how known", "verdict", "margin", "95 % interval, seeds", "scale, data"]
            lines += [table(head, rows, f"{says}:"), ""]
        if claims and item_name in deciding:
            name, run = deciding[item_name]
            cost = f"about {run['hours']:g} hours on two cores{_on_gpu(run)}"
            seeds = f"{len(run['seeds'])} seeds"
            scale = "the paper's" if run["scale"] == "paper" else run["scale"]
            lines += [f"Open at {scale} scale: `python evidence/run.py --deciding {name}`, {cost}, {seeds}.", ""]
    return "\n".join(lines).rstrip()


def _choice_cells(one: JudgedClaim) -> list[str]:
    return [one.marked, *our_margin(one.verdict), f"{scale_of(one.result)}, {data_of(one.result)}".rstrip(", ")]


def deciding_runs() -> dict[str, Row]:
    """The runs of evidence/deciding.toml, the cheapest first."""
    runs = tomllib.loads((ROOT / "evidence" / "deciding.toml").read_text(encoding="utf-8"))
    return dict(sorted(runs.items(), key=lambda one: float(one[1]["hours"])))


def _on_gpu(run: Row) -> str:
    return f", or {run['gpu']:g} on an H100" if "gpu" in run else ""


def deciding_table() -> str:
    """The runs of evidence/deciding.toml, the cheapest first."""
    rows = [
        [
            f"`{name}`",
            f"{run['item']}, {run['scale']} scale" + (f", {', '.join(run['only'])}" if "only" in run else ""),
            str(len(run["seeds"])),
            f"{run['hours']:g}{_on_gpu(run)}",
            run["decides"],
        ]
        for name, run in deciding_runs().items()
    ]
    return table(["name", "runs", "seeds", "hours", "decides"], rows)
