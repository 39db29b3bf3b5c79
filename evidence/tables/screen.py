"""The results in one screen: verdicts counted, the headline claim of each paper, and what helps instead."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from fedblend.analysis.plotting import COLOURS, INK, MUTED, blank_figure
from fedblend.papers.verdicts import FAILS, HOLDS, NOISE, NOT_COMPARABLE, PART, UNDECIDED
from tables.blends import blend_table
from tables.claims import FULL, OTHER, OWN, JudgedClaim, judged_claims, our_margin, paper_margin
from tables.common import save_svg
from tables.items import PAPER_NAMES
from tables.summary import best_result

COLOUR = {
    HOLDS: COLOURS[0],
    PART: (COLOURS[0], 0.35),
    NOISE: (MUTED, 0.3),
    UNDECIDED: (MUTED, 0.12),
    NOT_COMPARABLE: (MUTED, 0.0),
    FAILS: COLOURS[1],
}
"""Verdicts in the order of a bar, and their colours and opacity; claims of one seed or without a run are undecided."""

ON_COLOUR = "#fefefe"
"""White on a full colour, also in a figure's dark form."""

PANELS = {True: "the paper's settings and data", False: "smaller runs or other data"}
"""The panels of verdicts, by whether a result is at the paper's settings; a claim judged at both is in both."""

ACCURACY = ("points", "is more accurate than", "is less accurate than", "is not clearly more accurate than")
ROUNDS = (
    "rounds saved",
    "saves rounds beside",
    "costs rounds beside",
    "does not clearly save rounds beside",
)
"""A unit, and what a method does if the claim holds, if it does not, and if neither is certain."""


class Headline(NamedTuple):
    """The claim that a paper is about, and a second one."""

    item: str
    begins: str
    """How the claim begins, with the choice that it is judged with."""
    quantity: tuple[str, str, str, str]
    versus: str
    where: str
    second: tuple[str, str, str]
    """The item of the second claim, how it begins, and its name."""

    @property
    def paper(self) -> str:
        """The paper's short name."""
        return self.item.partition("/")[0]


HEADLINES = (
    Headline(
        "fedmix/choice-taylor",
        "FedMix above FedAvg in final accuracy (section 4.2); the term divided by the batch size twice",
        ACCURACY,
        "FedAvg",
        "",
        (
            "fedmix/choice-taylor",
            "FedMix above FedAvg in final accuracy (section 4.2); the term averaged over the batch once",
            "With its formula as printed",
        ),
    ),
    Headline(
        "aggenhance/choice-scale",
        "Enhanced FedAvg needs fewer rounds than FedAvg",
        ROUNDS,
        "FedAvg",
        "",
        ("aggenhance/figure-8", "A model can be trained on the points alone", "A model trained on its points alone"),
    ),
    Headline(
        "mix2fld/choice-t-max",
        "Asymmetric channels: Mix2FLD above FL (section IV); T_max = 104 ms",
        ACCURACY,
        "FL",
        " where few of FL's models arrive",
        (
            "mix2fld/table-3",
            "Mix2up preserves more than Mixup",
            "Its samples hide more than Mixup's",
        ),
    ),
    Headline(
        "xormixfl/choice-network",
        "XorMixFL above standalone learning (section 4.1), target label 9; the authors' network, [0, 1]; n = 2",
        ACCURACY,
        "a device alone",
        "",
        (
            "xormixfl/choice-network",
            "XorMixFL above standalone learning (section 4.1), target label 9; the authors' network, [0, 1]; n = 10",
            "With ten target samples for that device, as in the paper's text",
        ),
    ),
    Headline(
        "fed-augmix/choice-split",
        "Fed-AugMix improves FedAvg (section V-B); Dirichlet by class",
        ACCURACY,
        "FedAvg",
        "",
        ("fed-augmix/table-2", "The error rises with severity", "An attacker rebuilds images less exactly"),
    ),
)
"""The headline of each paper, read as its authors' or other public code does where that is known."""


def tally() -> str:
    """How many claims have each verdict, and which headlines are not among them."""
    counts = {full: sum((c for (_, at), c in _counts().items() if at == full), Counter[str]()) for full in PANELS}
    shown = {
        full: f"of {one.total()} claims {one[HOLDS]} hold, {one[PART]} hold in part, {one[NOISE]} are within noise, "
        f"{one[FAILS]} do not hold, and {one[UNDECIDED]} have one seed, no run or are undecided"
        for full, one in counts.items()
    }
    chosen = [PAPER_NAMES[one.paper] for one in HEADLINES if best_result(one.item, one.begins).claim.get("choice")]
    return (
        f"At the papers' settings and data, {shown[True]}. In smaller runs or on other data, {shown[False]}; "
        f"{counts[False][NOT_COMPARABLE]} are not comparable, since their upper bound contradicts the large run. The "
        "headline and a second claim of each paper follow, with the 95 % interval over seeds in brackets. Claims "
        "under settings that a paper leaves open are not in the counts; the headlines of "
        f"{', '.join(chosen)} are such claims."
    )


def headline_sentences() -> str:
    """A line for each paper: what the method does, by how much, and the verdicts on two claims."""
    lines = []
    for headline in HEADLINES:
        item, begins, words = headline.second
        name = f"[{PAPER_NAMES[headline.paper]}](results/{headline.paper}.md)"
        second = best_result(item, begins)
        lines.append(f"- {name} {_sentence(headline)} {words}: *{second.word}*{_unlike(second)}.")
    return "\n".join(lines)


def verdict_figure() -> str:
    """The figure of verdicts by paper, with its counts as the text in its place."""
    counts = _counts()
    shown = [
        f"{panel}: " + "; ".join(f"{PAPER_NAMES[paper]}: {_in_words(counts[paper, full])}" for paper in _papers())
        for full, panel in PANELS.items()
    ]
    return f"![Verdicts on the claims of each paper. At {'. In '.join(shown)}](figures/verdicts.svg)"


def forest_figure() -> str:
    """The forest plot of the headline claims, with its sentences as the text in its place."""
    shown = " ".join(f"{PAPER_NAMES[one.paper]} {_sentence(one)}" for one in HEADLINES)
    return f"![Headline claims. {shown.replace('*', '')}](figures/headlines.svg)"


def what_helps() -> str:
    """The first row of each kind of split in the table of blends."""
    return "\n".join(line for line in blend_table().splitlines() if not line.startswith("|  |"))


def draw_verdicts() -> None:
    """A bar for each paper, of its claims by verdict: those at the paper's settings, and those of smaller runs."""
    from matplotlib.patches import Patch

    counts = _counts()
    figure = blank_figure(5.2, 2.1)
    for axes, (full, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        axes.set_title(title, fontsize=8.5, color=INK, loc="left")
        for place, paper in enumerate(_papers()):
            here, left = counts[paper, full], 0.0
            for word, colour in COLOUR.items():
                share = here[word] / max(1, here.total())
                axes.barh(place, share, 0.8, left, color=colour, edgecolor="white", linewidth=0.8)
                ink = ON_COLOUR if word in (HOLDS, FAILS) else INK
                number = str(here[word] or "")
                axes.text(left + share / 2, place, number, ha="center", va="center_baseline", fontsize=8.5, color=ink)
                left += share
            if not here:
                axes.text(0.01, place, "only under open settings", va="center_baseline", fontsize=8.5, color=MUTED)
        axes.set_yticks(range(len(_papers())), [PAPER_NAMES[paper] for paper in _papers()], fontsize=8.5, color=INK)
        axes.set_xlim(0, 1)
        axes.set_ylim(len(_papers()) - 0.5, -0.5)
        _bare(axes)
    marks = [Patch(facecolor=colour, edgecolor=MUTED, linewidth=0.4) for colour in COLOUR.values()]
    figure.legend(
        marks, [*COLOUR], loc="outside lower center", ncols=3, frameon=False, fontsize=8, labelcolor=INK,
        handlelength=1, handletextpad=0.4, columnspacing=1, borderpad=0,
    )  # fmt: skip
    held, total = (sum(f(counts[paper, True]) for paper in _papers()) for f in (lambda one: one[HOLDS], Counter.total))
    save_svg(figure, "verdicts", f"At the papers' settings {held} of {total} claims hold")


def draw_headlines() -> None:
    """A row for each headline: the mean margin, its interval and the paper's margin, each row on a scale of its own."""
    figure = blank_figure(5.2, 2.9)
    axes = figure.subplots()
    for place, headline in enumerate(HEADLINES):
        one = best_result(headline.item, headline.begins)
        name = f"{PAPER_NAMES[headline.paper]}\nover {headline.versus}"
        axes.text(-1.06, place, name, ha="right", va="center", fontsize=8.5, color=INK)
        axes.text(1.06, place, "\n".join(_margin(one, headline)), va="center", fontsize=8.5, color=INK)
        weakest = one.verdict.weakest
        if weakest is None or weakest.interval is None:
            continue
        paper, colour = _paper_margin(one), COLOUR[one.word] if one.word in (HOLDS, FAILS) else MUTED
        scale = max(abs(value) for value in (*weakest.interval, paper or 0.0))
        axes.plot([bound / scale for bound in weakest.interval], [place] * 2, color=colour, linewidth=2.4)
        axes.plot(weakest.mean / scale, place, "o", color=colour, markersize=6)
        if paper is not None:
            axes.plot(paper / scale, place, "D", markerfacecolor="white", markeredgecolor=INK, markersize=5)
    axes.axvline(0, color=MUTED, linewidth=1, zorder=0)
    for x, text, side in ((-0.06, "\u2190 against the claim", "right"), (0.06, "for it \u2192", "left")):
        axes.text(x, -0.8, text, ha=side, va="center", fontsize=8.5, color=MUTED)
    axes.plot(1.12, -0.8, "D", markerfacecolor="white", markeredgecolor=INK, markersize=5, clip_on=False)
    axes.text(1.2, -0.8, "the paper's gain", va="center", fontsize=8.5, color=MUTED)
    axes.set_xlim(-1.04, 1.04)
    axes.set_ylim(len(HEADLINES) - 0.5, -1.1)
    axes.set_yticks([])
    _bare(axes)
    held = sum(best_result(one.item, one.begins).word == HOLDS for one in HEADLINES)
    save_svg(figure, "headlines", f"{held} of {len(HEADLINES)} headline claims hold (95 % intervals, own scales)")


def _bare(axes: Any) -> None:
    """Leave out frame and ticks of axes."""
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _papers() -> list[str]:
    return [headline.paper for headline in HEADLINES]


def _counts() -> dict[tuple[str, bool], Counter[str]]:
    """The verdicts by paper and by whether the result is at the paper's settings; choices are left out."""
    counts = {(paper, full): Counter[str]() for paper in _papers() for full in PANELS}
    for one in judged_claims():
        if not one.claim.get("choice"):
            word = one.verdict.word
            counts[one.result["item"].partition("/")[0], one.setting == FULL][
                word if word in COLOUR else UNDECIDED
            ] += 1
    return counts


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{word} {counts[word]}" for word in COLOUR if counts[word]) or "none"


def _sentence(headline: Headline) -> str:
    """What the method does, with the margin, its interval and the verdict."""
    one = best_result(headline.item, headline.begins)
    _, gains, loses, unclear = headline.quantity
    says = {HOLDS: gains, FAILS: loses}.get(one.word, unclear)
    what = f"{says} {headline.versus}{headline.where}{_unlike(one)}"
    return f"{what}: {' '.join(_margin(one, headline))}, verdict *{one.word}*."


def _unlike(one: JudgedClaim) -> str:
    """How a result differs from the paper's settings and data, in brackets."""
    short = {FULL: "", OWN: " (smaller run)", OTHER: " (other data)"}
    return short.get(one.setting, f" ({one.setting})")


def _margin(one: JudgedClaim, headline: Headline) -> tuple[str, ...]:
    """The mean margin with its unit, and its interval in brackets if there is one."""
    weakest = one.verdict.weakest
    if weakest is None or weakest.interval is None:
        return (our_margin(one.verdict)[0] or "no number",)
    low, high = weakest.interval
    return f"{weakest.mean:+.1f} {headline.quantity[0]}", f"({low:+.1f} to {high:+.1f})"


def _paper_margin(one: JudgedClaim) -> float | None:
    """The paper's margin of a claim, whatever the choice that it is judged with."""
    same = (other for other in judged_claims() if other.claim["says"] == one.claim["says"])
    found = [paper_margin(other) for other in same if other.result["item"] == one.result["item"]]
    return next((float(margin) for margin in found if margin), None)
