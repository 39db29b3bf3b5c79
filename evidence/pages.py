"""Rewrite the tables of results in docs/ from the committed results; nothing is run.

    python evidence/pages.py

Each table replaces the text between its two marks on a page. Figures that need the results alone are drawn too. Pages
and figures are committed: whoever reads docs/ in the repository, or in the sdist, which has no results, finds the
numbers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tables.augmix import (
    augmix_accuracy,
    augmix_attacks,
    draw_augmix,
    invgrad_table,
)
from tables.blends import blend_table, draw_blends
from tables.claims import certain_claims, deciding_table, sensitivity
from tables.comparisons import (
    baseline_table,
    combined_table,
    draw_maps,
    long_table,
    map_attack_table,
    map_costs,
    map_table,
    personal_table,
    rate_table,
)
from tables.front import draw_front
from tables.growth import draw_growth
from tables.item_pages import item_pages
from tables.items import fedmix_in_small, overview
from tables.mix2fld import (
    closest_pairs,
    draw_mix2fld_figure_2,
    draw_mix2fld_figure_3,
    draw_mix2fld_t_max,
    mix2fld_claims,
    mix2fld_figure_3,
    mix2fld_outage,
    mix2fld_t_max,
    sample_privacy,
)
from tables.screen import (
    draw_headlines,
    draw_verdicts,
    forest_figure,
    headline_sentences,
    tally,
    verdict_figure,
    what_helps,
)
from tables.studies import (
    adversary_table,
    alignment_table,
    curve_table,
    draw_study,
    epsilon_table,
    method_table,
    share_table,
    site_table,
)
from tables.summary import (
    before_and_after,
    changed_readings,
    changed_since_0_1,
    counts_by_paper,
    main_claims,
    runs_made,
)
from tables.xor_distance import xor_distance_claims, xor_leaks
from tables.xormixfl import (
    draw_xor_figure_3,
    warm_start,
    xor_offset,
    xor_offset_leaks,
    xor_table_2,
    xor_target_claims,
)

from fedblend.papers.items import all_papers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "site"))
from reference import fill

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (
    *(DOCS / name for name in ("results.md", "privacy.md", "which-blend.md")),
    *sorted(DOCS.glob("results/*.md")),
    *sorted(DOCS.glob("reproductions/*.md")),
)

TABLES: dict[str, Callable[[], str]] = {
    "heart": lambda: site_table("heart"),
    "har": lambda: site_table("har", each=False),
    "fashion-mnist": lambda: method_table("fashion-mnist"),
    "femnist": lambda: method_table("femnist"),
    "shakespeare curve": lambda: curve_table("shakespeare", 1),
    "fedmix-search": lambda: method_table(
        "fedmix-search", "fedmix-scale", "fedmix-lr", fashion_methods=("fedavg", "fedmix 0.1")
    ),
    "femnist-checked": lambda: method_table("femnist-checked"),
    "femnist-settings": lambda: method_table("femnist-settings"),
    "femnist-momentum curve": lambda: curve_table("femnist-momentum", 10),
    "femnist-momentum shares": lambda: share_table("femnist-momentum", 10),
    "femnist-second curve": lambda: curve_table("femnist-second", 20),
    "fedmix-cifar10": lambda: method_table("fedmix-cifar10"),
    "fedmix in small": fedmix_in_small,
    "alignment": alignment_table,
    "aggenhance-mnist5k": lambda: method_table("aggenhance-mnist5k"),
    "aggenhance-fashion": lambda: method_table("aggenhance-fashion"),
    "robustness": lambda: adversary_table("robustness", "accuracy % after 20 rounds"),
    "mix2fld-literal": mix2fld_t_max,
    "mix2fld outage": mix2fld_outage,
    "mix2fld-claims": mix2fld_claims,
    "mix2fld-figure-3": mix2fld_figure_3,
    "mix2fld-privacy": sample_privacy,
    "mix2fld closest pairs": closest_pairs,
    "private": lambda: epsilon_table("private", "weights"),
    "private-means": lambda: epsilon_table("private-means", "means", "private-base"),
    "deciding": deciding_table,
    "tally": tally,
    "headlines": headline_sentences,
    "verdict figure": verdict_figure,
    "forest figure": forest_figure,
    "what helps": what_helps,
    "counts by paper": counts_by_paper,
    "runs made": runs_made,
    "before and after": before_and_after,
    "changed since 0.1": changed_since_0_1,
    "changed readings": changed_readings,
    "certain claims": certain_claims,
    "augmix-mnist accuracy": augmix_accuracy,
    "augmix-mnist attacks": augmix_attacks,
    "invgrad": invgrad_table,
    "xormixfl table 2": xor_table_2,
    "xormixfl claims": xor_target_claims,
    "xormixfl table 3 claims": xor_distance_claims,
    "xormixfl leaks": xor_leaks,
    "xormixfl offset": xor_offset,
    "xormixfl offset leaks": xor_offset_leaks,
    "warm-start": warm_start,
    "baselines": baseline_table,
    "personal models": personal_table,
    "blends": blend_table,
    "map": map_table,
    "map costs": map_costs,
    "map attacks": map_attack_table,
    "combined": combined_table,
    "long": long_table,
    "rates": rate_table,
    "relatives": lambda: map_table("relatives"),
    "relatives costs": lambda: map_costs("relatives"),
    **{f"main claims: {paper}": partial(main_claims, paper) for paper in all_papers()},
    **{f"choices: {paper}": partial(sensitivity, paper) for paper in all_papers()},
    **{f"items: {paper}": partial(overview, paper) for paper in all_papers()},
    **{f"results: {paper}": partial(item_pages, paper) for paper in all_papers()},
}
"""The functions that make the tables, by the marks on the pages."""

DRAWINGS: tuple[Callable[[], None], ...] = (
    draw_mix2fld_figure_2,
    draw_mix2fld_figure_3,
    draw_mix2fld_t_max,
    draw_xor_figure_3,
    draw_augmix,
    lambda: draw_study(
        "fashion-mnist",
        "Fashion-MNIST: only raw samples help; FedMix with lambda 0.2 falls back",
        ("global-mixup", "fedmix 0.2", "localmix"),
    ),
    lambda: draw_study("femnist", "FEMNIST: FedMix as written collapses", ("fedmix",)),
    lambda: draw_study("fedmix-cifar10", "CIFAR10: only raw samples help", ("global-mixup", "fedavg")),
    draw_growth,
    draw_blends,
    draw_maps,
    draw_front,
    draw_verdicts,
    draw_headlines,
)
"""The functions that draw figures from results alone; others need the runs (run.py, inversion.py)."""


LINK = re.compile(r"(?<=\]\()(?![#/]|\w+:)(?=[^)\s]+\))")
"""Where the path of a relative link or image begins."""


def filled(page: Path) -> str:
    """A page with its tables made anew; their links are relative to docs/, and begin with ``../`` on pages below it."""
    up = "../" * len(page.relative_to(DOCS).parents[:-1])
    return fill(page.read_text(), {name: lambda make=make: LINK.sub(up, make()) for name, make in TABLES.items()})


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
    for draw in DRAWINGS:
        draw()
