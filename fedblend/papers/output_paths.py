"""The folders of an item's runs and of what is measured on them."""

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
    """The paths of an item at a scale, below the folder ``out`` that all items share."""

    out: Path
    plan: ItemPlan

    @property
    def folder(self) -> Path:
        """The item's folder: ``OUT/PAPER/ITEM/SCALE``."""
        return self.out / self.plan.paper / self.plan.name / self.plan.scale

    def finished_runs(self, cell: Cell) -> dict[int, Path]:
        """Finished runs of a cell's experiment by seed, those of other items and scales included."""
        return {seed: path for seed, path in self.all_runs(cell).items() if read(RunDirectory(path)).finished}

    def all_runs(self, cell: Cell) -> dict[int, Path]:
        """Runs of a cell's experiment by seed: the finished one, or else one that has not ended."""
        found: dict[int, Path] = {}
        finished: set[int] = set()
        own = f"{self.plan.paper}/{self.plan.name}/{self.plan.scale}/{RUNS}"
        for pattern in (own, f"*/*/*/{RUNS}"):
            for path in sorted(self.out.glob(f"{pattern}/*-{cell.fingerprint}-seed*")):
                seed = int(path.name.rpartition("-seed")[2])
                if seed in finished or not RunDirectory.is_run(path):
                    continue
                if read(RunDirectory(path)).finished:
                    finished.add(seed)
                    found[seed] = path
                found.setdefault(seed, path)
        return found

    def work_folder(self, cell: Cell, seed: int) -> Path:
        """The folder in which measures keep their work on a cell; all cells with the same experiment share it."""
        return self.out / WORK / f"{cell.fingerprint}-seed{seed}"

    def relative_value(self, value: Any, folder: Path) -> Any:
        """A measured value for the result: a picture's path, relative to ``folder``, becomes relative to the item's."""
        return Path(os.path.relpath(folder / value, self.folder)).as_posix() if isinstance(value, str) else value


def runs_of(plan: ItemPlan, out: Path) -> list[RunDirectory]:
    """All runs of an item with any record, including those that it shares with other items."""
    output = OutputPaths(out, plan)
    paths = {path for cell in plan.cells for path in output.finished_runs(cell).values()}
    folder = output.folder / RUNS
    if has_runs(folder):
        paths |= {path for path in folder.iterdir() if RunDirectory.is_run(path)}
    return [run for run in map(RunDirectory, sorted(paths)) if run.metrics()]
