"""Every result of a paper's items: its settings, our numbers beside the paper's, and a verdict on each claim."""

from __future__ import annotations

import re

from fedblend.papers import formatting
from tables.claims import JudgedClaim, judged_claims, our_margin, paper_margin
from tables.common import Row, table
from tables.items import PAPER_NAMES, heading_of, is_choice, item_results

IMMATERIAL = ("eval_every", "rows", "columns")
"""What a smaller scale changes that a reader of the tables need not know, or sees there."""

NOT = re.compile("([^:]+): (.*), not (.*)")
"""A setting of a smaller scale, and the paper's, which is shown in brackets."""

FAULT = re.compile(r" \(.*", re.DOTALL)
"""The details of why a run failed."""


def item_pages(paper: str) -> str:
    """Every result of a paper's items below a short heading; title and note stand above the first one of an item.

    Of results at the paper's settings the first one of an item is shown.
    """
    judged = judged_claims()
    pages, seen, whole = [], "", False
    for result in item_results():
        if not result["item"].startswith(f"{paper}/"):
            continue
        first = result["item"] != seen
        if first or result["smaller"] or result["other_data"] or not whole:
            claims = [one for one in judged if _same(one.result, result)]
            pages.append(_page(result, claims, first))
        seen, whole = result["item"], not (result["smaller"] or result["other_data"])
    return "\n\n".join(pages)


def _same(one: Row, other: Row) -> bool:
    return (one["item"], one["scale"]) == (other["item"], other["scale"])


def _page(result: Row, claims: list[JudgedClaim], first: bool) -> str:
    lines = [f"## {heading_of(result)}", ""]
    if first:
        lines += [f"{result['title']}.", "", *([result["note"], ""] if result["note"] else [])]
    shown, other = result["quantities"], list[str]()
    if not is_choice(result["item"]):
        shown = {key: one for key, one in shown.items() if _is_compared(result, key)}
        other = [one["label"] for key, one in result["quantities"].items() if key not in shown]
    lines += [f"`{result['command']}`", "", *_settings(result), ""]
    lines += formatting.quantity_tables(result | {"quantities": shown})
    lines += [f"Measured too, in the raw results: {'; '.join(other)}.", ""] if other else []
    if is_choice(result["item"]):
        where = f"[choices](results/choices.md#{PAPER_NAMES[result['item'].partition('/')[0]].lower()})"
        return "\n".join([*lines, f"The verdicts are among the {where}."])
    return "\n".join([*lines, claim_table(claims)]).rstrip()


def _is_compared(result: Row, key: str) -> bool:
    """Whether the paper has numbers of a quantity, a claim is about it, or it is of pictures."""
    cells = result["quantities"][key]["cells"]
    pictures = any(str(value).endswith(".png") for cell in cells for value in cell["ours"].values())
    return pictures or any(cell["paper"] is not None for cell in cells) or key in {c["of"] for c in result["claims"]}


def _settings(result: Row) -> list[str]:
    """Lines on the scale, the seeds, what is smaller than the paper's, and what is missing."""
    seeds = f"{len(result['seeds'])} seed{'s' if len(result['seeds']) > 1 else ''}"
    smaller = [NOT.sub(r"\1 \2 (\3)", one) for one in result["smaller"] if not one.startswith(IMMATERIAL)]
    if result["smaller"] or result["other_data"]:
        lines = [f"Smaller; {seeds}" + (f": `{'; '.join(smaller)}`." if smaller else ".")]
    else:
        lines = [f"The paper's settings; {seeds}."]
    lines += [f"Made with settings that were corrected since: {result['outdated']}."] if "outdated" in result else []
    lines += [f"Failed: `{what}: {FAULT.sub('', why)}`." for what, why in result["faults"].items()]
    return lines + (["Stopped early."] if result.get("stopped") else [])


def claim_table(claims: list[JudgedClaim]) -> str:
    """A row for each claim of a result; the paper's margin where the paper has numbers of any of them."""
    if not claims:
        return ""
    head = ["claim", "the paper", "ours, 95 % interval", "verdict"]
    rows = [[one.claim["says"].replace("|", "\\|"), paper_margin(one), _ours(one), one.marked] for one in claims]
    kept = [place for place in range(len(head)) if place != 1 or any(row[1] for row in rows)]
    return table([head[place] for place in kept], [[row[place] for place in kept] for row in rows])


def _ours(one: JudgedClaim) -> str:
    """Our margin and its interval; the number of seeds where it is not the result's."""
    told = ", ".join(filter(None, our_margin(one.verdict)))
    return told.removesuffix(f", {len(one.result['seeds'])} seeds")
