"""A result as a page (Markdown) and as rows for the terminal: our numbers, the paper's, differences and verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedblend.papers.verdicts import NOT_COMPARABLE, ONE_SEED, ClaimVerdict, judge_result

NEVER = "never"
INFINITE = "∞"
NOTHING = "—"

SCALES = {
    "paper": "the paper's settings",
    "laptop": "smaller than the paper's",
    "smoke": "a test run, whose numbers cannot be compared with the paper's",
}


MORE_CELLS = {
    "paper": "all rows and columns, without --only",
    "laptop": "--scale paper",
    "smoke": "--scale laptop or --scale paper",
}
"""How a result gets the rows and columns that a scale leaves out."""


def heading(result: Mapping[str, Any]) -> list[str]:
    """Lines on the scale, the seeds, the differences from the paper's scale, and what is missing."""
    whole, paper = not (result["smaller"] or result["other_data"]), result["scale"] == "paper"
    scale = SCALES["paper"] if whole else SCALES["laptop" if paper else result["scale"]]
    lines = [f"Scale {result['scale']}: {scale}. Seeds: {', '.join(map(str, result['seeds'])) or 'none'}."]
    lines += [f"Made with settings that were corrected since: {result['outdated']}."] if "outdated" in result else []
    lines += [f"On other data: {', '.join(result['other_data'])}."] if result["other_data"] else []
    lines += [f"Scaled down: {'; '.join(result['smaller'])}."] if result["smaller"] else []
    lines += [f"Data not at hand: {', '.join(result['absent'])}."] if result["absent"] else []
    lines += [f"Failed: {what}: {why}." for what, why in result["faults"].items()]
    lines += ["Stopped early: some values are missing."] if result.get("stopped") else []
    lines += [result["note"]] if result["note"] else []
    return lines


def absences(result: Mapping[str, Any]) -> list[str]:
    """A sentence each on why a result has no differences, no verdicts, or claims that are not measured."""
    cells = [cell for quantity in result["quantities"].values() for cell in quantity["cells"]]
    claims = result["claims"]
    lines = []
    if all(cell["paper"] is None for cell in cells):
        lines.append("No differences: the paper states no number for these values.")
    if not claims:
        lines.append("No verdicts: this item has no claim that numbers decide.")
    if missing := sum(claim["verdict"] == "not measured" for claim in claims):
        why = f"they compare rows or columns that have no value here; to have them: {MORE_CELLS[result['scale']]}"
        lines.append(f"{missing} of {len(claims)} claims not measured: {why}.")
    return lines


def mean_over_seeds(ours: Mapping[str, Any]) -> float | None:
    """The mean over seeds: infinite if a seed never reached its target or is infinite, ``None`` without any number."""
    numbers = [math.inf if value in (NEVER, INFINITE) else value for value in ours.values()]
    numbers = [number for number in numbers if not isinstance(number, str)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def ours_text(ours: Mapping[str, Any], digits: int, seeds: Sequence[int] = ()) -> str:
    """Our number over seeds, or the path of a picture; names the seeds if they are fewer than the table's ``seeds``."""
    if not ours:
        return NOTHING
    if len(ours) < len(seeds):
        return f"{ours_text(ours, digits)} [seed{'s' if len(ours) > 1 else ''} {', '.join(ours)}]"
    if INFINITE in ours.values():
        return INFINITE
    pictures = [value for value in ours.values() if isinstance(value, str) and value != NEVER]
    if pictures:
        return pictures[0]
    numbers = [float(value) for value in ours.values() if value != NEVER]
    if not numbers:
        return NEVER
    mean = f"{statistics.mean(numbers):,.{digits}f}"
    text = f"{mean} ± {statistics.stdev(numbers):,.{digits}f}" if len(numbers) > 1 else mean
    return text if len(numbers) == len(ours) else f"{text} ({len(numbers)} of {len(ours)})"


def paper_text(cell: Mapping[str, Any], digits: int) -> str:
    """The paper's number, with its standard deviation if the paper states one."""
    if cell["paper"] is None:
        return NOTHING
    if isinstance(cell["paper"], str):
        return str(cell["paper"])
    text = f"{cell['paper']:,.{digits}f}"
    return text if cell["paper_std"] is None else f"{text} ± {cell['paper_std']:,.{digits}f}"


def difference_text(cell: Mapping[str, Any], digits: int) -> str:
    """Our mean minus the paper's number."""
    ours = mean_over_seeds(cell["ours"])
    if ours is None or cell["paper"] in (None, NEVER, INFINITE) or math.isinf(ours):
        return NOTHING
    return f"{ours - cell['paper']:+,.{digits}f}"


def claim_text(claim: Mapping[str, Any]) -> str:
    """The claim in words, with the choice that it is judged under, if it is one of several."""
    return f"{claim['says']}; {claim['choice']}" if "choice" in claim else str(claim["says"])


def verdict_text(claim: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The verdict in words: in which columns or rows the claim holds, by how much, in how many seeds, on which data."""
    text: str = claim["verdict"]
    lines = claim["places"]
    if text == "holds in part":
        words = {True: "holds in", False: "not in", None: "undecided in"}
        groups = {word: [line for line, (holds, _) in lines.items() if holds is key] for key, word in words.items()}
        text = "; ".join(f"{word} {_first_names(group)}" for word, group in groups.items() if group)
    margins = [margin for _, margin in lines.values() if isinstance(margin, (int, float))]
    if margins and claim["verdict"] in ("holds", "does not hold"):
        least, most = f"{min(margins):+.3g}", f"{max(margins):+.3g}"
        if any(margins):
            text += f" (by {least})" if least == most else f" (by {least} to {most})"
        elif claim["verdict"] == "does not hold":
            text += " (level)"
    if claim["seeds"][1] > len(lines):
        text += f", {claim['seeds'][0]} of {claim['seeds'][1]} seeds and places"
    if "quantities" in result:
        text += _noise_text(judge_result(result, claim), claim["verdict"], text)
    if apart := claim.get("not_comparable"):
        why = f"{NOT_COMPARABLE} (the upper bound is the other way round at the paper's scale)"
        text = f"{text}; {_first_names(apart)} {why}" if lines else why
    if claim["verdict"] not in ("not measured", "undecided", NOT_COMPARABLE):
        text += ", on other data" if result["other_data"] else ""
        text += ", at smoke" if result["scale"] == "smoke" else ""
    if claim["paper"] not in ("holds", "not measured"):
        text += f" [the paper's own numbers: {claim['paper']}]"
    return text


def _noise_text(verdict: ClaimVerdict, on_means: str, text: str) -> str:
    """What the seeds tell of a verdict on means: one seed, the interval in the weakest place, or another verdict.

    The mean over seeds stands before its interval where ``text`` lacks it: of spreads it is not the margin of means.
    """
    weakest = verdict.weakest
    if verdict.word == ONE_SEED:
        return ", one seed"
    if weakest is None:
        return ""
    interval = weakest.interval
    mean = f"{weakest.mean:+.3g}"
    told = "" if mean in text else f", {mean} over seeds"
    between = f"{told}, 95 % interval {interval[0]:+.3g} to {interval[1]:+.3g}" if interval else ""
    return between if verdict.word == on_means else f"{between}: {verdict.word}"


def _first_names(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def terminal_tables(result: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """For each quantity its heading and rows: row, column, our number, the paper's, the difference."""
    tables: list[tuple[str, list[tuple[str, ...]]]] = []
    for quantity in result["quantities"].values():
        rows: list[tuple[str, ...]] = []
        for cell in quantity["cells"]:
            digits = quantity["digits"]
            labels = (result["rows"][cell["row"]], result["columns"][cell["column"]])
            ours = ours_text(cell["ours"], digits, result["seeds"])
            rows.append((*labels, ours, paper_text(cell, digits), difference_text(cell, digits)))
        tables.append((_label_and_unit(quantity), rows))
    return tables


def markdown(result: Mapping[str, Any], level: int = 2) -> str:
    """The result as Markdown: a table for each quantity with rows and columns as in the paper, and the claims."""
    mark = "#" * level
    lines = [f"{mark} {result['item']}: {result['title']}", "", f"`{result['command']}`", "", *heading(result), ""]
    lines += quantity_tables(result)
    if result["claims"]:
        lines += ["| claim | verdict |", "|---|---|"]
        lines += [f"| {claim_text(claim)} | {verdict_text(claim, result)} |" for claim in result["claims"]]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _label_and_unit(quantity: Mapping[str, Any]) -> str:
    return quantity["label"] + (f" ({quantity['unit']})" if quantity["unit"] else "")


def quantity_tables(result: Mapping[str, Any]) -> list[str]:
    """Lines of a table for each quantity that has a number of ours, each table with an empty line behind it."""
    tables = (_quantity_table(result, quantity) for quantity in result["quantities"].values())
    return [line for lines in tables if lines for line in (*lines, "")]


def _quantity_table(result: Mapping[str, Any], quantity: Mapping[str, Any]) -> list[str]:
    """Our numbers, the paper's in brackets; rows and columns without one of ours are left out.

    The heading names the usual number of seeds where it is not the result's; a cell of another number names its own.
    """
    cells = {(cell["row"], cell["column"]): cell for cell in quantity["cells"] if cell["ours"]}
    if not cells:
        return []
    columns = {name: label for name, label in result["columns"].items() if any(name == key[1] for key in cells)}
    usual = statistics.mode(len(cell["ours"]) for cell in cells.values())
    head = f"{_label_and_unit(quantity)}: ours"
    head += " (paper)" if any(cell["paper"] is not None for cell in cells.values()) else ""
    head += f", {_seeds(usual)}" if usual != len(result["seeds"]) else ""
    lines = [
        f"| {head} | " + " | ".join(label or "value" for label in columns.values()) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, label in result["rows"].items():
        texts = [_cell_text(cells.get((row, column)), quantity["digits"], label, usual) for column in columns]
        if any(texts):
            lines.append(f"| {label} | " + " | ".join(texts) + " |")
    return lines


def _seeds(number: int) -> str:
    return f"{number} seed{'s' if number > 1 else ''}"


def _cell_text(cell: Mapping[str, Any] | None, digits: int, label: str, usual: int) -> str:
    if cell is None:
        return ""
    ours = ours_text(cell["ours"], digits)
    if ours.endswith(".png"):
        return f"![{label}]({ours})"
    ours += f" [{_seeds(len(cell['ours']))}]" if len(cell["ours"]) != usual else ""
    return ours if cell["paper"] is None else f"{ours} ({paper_text(cell, digits)})"
