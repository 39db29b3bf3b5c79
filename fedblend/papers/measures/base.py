"""The base of measures, and the cell that a measure gets."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedblend.core.dataset import Dataset, Population
from fedblend.core.files import write_json
from fedblend.experiment.config import Experiment
from fedblend.runs.directory import RunDirectory, read_json
from fedblend.runs.groups import Outcome, read

OnStep = Callable[[str, int, int], None]
"""Called with the name of a piece of work, the number of its steps that are done, and their total."""


@dataclass(frozen=True)
class CellRun:
    """A cell with one seed."""

    experiment: Experiment
    """The cell's experiment, with this seed."""
    run: Path | None
    """The run's folder; none where nothing is trained."""
    folder: Path
    """The folder in which measures keep their work."""
    on_step: OnStep
    """Shows the progress of a measure."""

    @functools.cached_property
    def outcome(self) -> Outcome:
        assert self.run is not None
        return read(RunDirectory(self.run))

    def data(self) -> tuple[Dataset, Population]:
        """The cell's data set, and its division among clients."""
        from fedblend.experiment.make_setup import split

        data = self.experiment.data.load()
        return data, split(self.experiment, data)

    def work_folder(self, what: str, settings: Mapping[str, Any]) -> Path:
        """The folder of a piece of work, which follows from its name and settings."""
        text = json.dumps(settings, sort_keys=True, default=str)
        return self.folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def cached(self, what: str, settings: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The table that ``make`` returns for a piece of work, given its folder; written there and made only once."""
        folder = self.work_folder(what, settings)
        table = folder / "work.json"
        if not table.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(table, make(folder))
        return read_json(table)


class Measure:
    """The base of measures. A subclass is a part and defines :meth:`measured`."""

    trains: ClassVar[bool] = True
    """Whether the cell's experiment is run first."""
    infinite: ClassVar[str] = "∞"
    """What an infinite value is in results and tables; "never" in a measure with a target."""

    def measured(self, cell: CellRun) -> float | str | None:
        """The number, the path of a picture relative to ``cell.folder``, or ``None`` where there is none.

        ``inf`` is a target that was never reached, or an infinite value; -inf and NaN are faults. Raises
        :class:`FedblendError` where the cell cannot be measured.
        """
        raise TypeError(f"{type(self).__name__} defines no measured()")

    def is_settled(self, cell: CellRun) -> bool:
        """Whether no later round of an interrupted run can change the number."""
        return False
