"""Where an item's runs, and what is measured of them, lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend.papers.plan import Cell, ItemPlan
from fedblend.runs.directory import RunDirectory, has_runs
from fedblend.runs.groups import read

RUNS = "runs"
WORK = "work"


@dataclass(frozen=True)
class OutputPaths:
    """Where an item's work at a scale lies: ``OUT/PAPER/ITEM/SCALE``."""

    out: Path
    plan: ItemPlan

    @property
    def folder(self) -> Path:
        """The folder."""
        return self.out / self.plan.paper / self.plan.name / self.plan.scale

    def finished(self, cell: Cell) -> dict[int, Path]:
        """Every finished run of a cell's experiment by its seed, also of other items and scales: they are the same."""
        return {seed: path for seed, path in self.begun(cell).items() if read(RunDirectory(path)).finished}

    def begun(self, cell: Cell) -> dict[int, Path]:
        """The same with runs that have not ended, where there is no other."""
        found: dict[int, Path] = {}
        ended: set[int] = set()
        here = f"{self.plan.paper}/{self.plan.name}/{self.plan.scale}/{RUNS}"
        for pattern in (here, f"*/*/*/{RUNS}"):
            for path in sorted(self.out.glob(f"{pattern}/*-{cell.fingerprint}-seed*")):
                seed = int(path.name.rpartition("-seed")[2])
                if seed in ended or not RunDirectory.is_run(path):
                    continue
                if read(RunDirectory(path)).finished:
                    ended.add(seed)
                    found[seed] = path
                found.setdefault(seed, path)
        return found

    def work(self, cell: Cell, seed: int) -> Path:
        """The folder for what measures keep of a cell; cells of one experiment share it, those of other items too."""
        return self.out / WORK / f"{cell.fingerprint}-seed{seed}"

    def told(self, value: Any, folder: Path) -> Any:
        """A measure's value as a result tells it: pictures, whose paths count from ``folder``, from the item's."""
        return Path(os.path.relpath(folder / value, self.folder)).as_posix() if isinstance(value, str) else value


def runs_of(plan: ItemPlan, out: Path) -> list[RunDirectory]:
    """All runs of an item with any record, those of other items that it shares among them."""
    place = OutputPaths(out, plan)
    paths = {path for cell in plan.cells for path in place.finished(cell).values()}
    folder = place.folder / RUNS
    if has_runs(folder):
        paths |= {path for path in folder.iterdir() if RunDirectory.is_run(path)}
    return [run for run in map(RunDirectory, sorted(paths)) if run.metrics()]
