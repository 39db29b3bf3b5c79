"""What a measure sees of a cell."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedblend.experiment.config import Experiment
from fedblend.runs.directory import RunDirectory, read_json
from fedblend.runs.files import write_json
from fedblend.runs.groups import Outcome, read

Tick = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and of how many."""


@dataclass(frozen=True)
class CellRun:
    """A cell with one seed: its experiment, its run (none where nothing is trained), a folder for work."""

    experiment: Experiment
    run: Path | None
    folder: Path
    tick: Tick

    @functools.cached_property
    def outcome(self) -> Outcome:
        """The run as its folder tells it."""
        assert self.run is not None
        return read(RunDirectory(self.run))

    def place(self, what: str, settings: Mapping[str, Any]) -> Path:
        """The folder of a piece of work: the same settings give the same one."""
        text = json.dumps(settings, sort_keys=True, default=str)
        return self.folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def once(self, what: str, settings: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The table that ``make`` gives in the folder of such work, kept there so that it is made only once."""
        place = self.place(what, settings)
        kept = place / "work.json"
        if not kept.is_file():
            place.mkdir(parents=True, exist_ok=True)
            write_json(kept, make(place))
        return read_json(kept)


class Measure:
    """The base of measures. A subclass is a part and gives :meth:`measured`."""

    trains: ClassVar[bool] = True
    """Whether the cell's experiment is run first."""

    def measured(self, seen: CellRun) -> float | str | None:
        """The number, the path of a picture relative to ``seen.folder``, or ``None`` where there is none.

        ``inf`` is a target that was never reached. Raises :class:`FedblendError` where the cell cannot be measured.
        """
        raise TypeError(f"{type(self).__name__} defines no measured()")

    def is_settled(self, seen: CellRun) -> bool:
        """Whether a run that was interrupted has gone far enough for a number that no later round changes."""
        return False

    def steps(self, experiment: Experiment) -> float:
        """Work beside the run, in training steps of the experiment, for the estimate of time."""
        return 0.0
