"""Say in words what the runs of quickstart.toml show, and at which price. `make demo` ends with it.

python examples/quickstart.py runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from fedblend.analysis.privacy.leak_report import leak_report
from fedblend.report.columns import method_rows
from fedblend.report.verdict import verdict
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import group

NEXT = """
What to try next
  source .venv/bin/activate
  fedblend run examples/quickstart.toml --set partition.classes_per_client=10 --out runs/even   # clients alike
  fedblend new virtual-means fashion-mnist > my.toml                                            # other data, or yours
  docs/which-blend.md                                                                           # which blend, when?"""


def in_words(folder: Path) -> list[str]:
    """What the runs in a folder show: rounds and megabytes to the target, accuracy, and what the means reveal."""
    groups = group(find_runs([folder]))
    config, facts = groups[0].config, groups[0].outcomes[0].facts
    own, classes = config["partition"]["classes_per_client"], len(facts["data"]["classes"])
    shares_means = next(one for one in groups if one.name == "virtual-means").outcomes[0].path
    size = next(row for row in leak_report(RunDirectory(shares_means)).by_size if row["own"])
    return [
        f"Each client knows {own} of {classes} digits. fedavg averages their models; server-means and virtual-means "
        "also train on class means, which clients share once.",
        *verdict(method_rows(groups), "fedavg"),
        f"What the means reveal: for {100 * size['recognised']:.0f} % of them the nearest of all digits is one of the "
        f"{size['samples_per_mean']} or fewer that were averaged (guessing: {100 * size['by_chance']:.0f} %). Means "
        "are no proof of privacy; fedblend leaks and fedblend attack measure more.",
    ]


if __name__ == "__main__":
    console = Console(highlight=False)
    console.print("\nWhat these runs show", style="bold")
    for sentence in in_words(Path(sys.argv[1])):
        console.print(sentence, markup=False)
    print(NEXT)
