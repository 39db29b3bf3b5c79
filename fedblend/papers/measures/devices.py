"""Accuracy of devices that keep models of their own."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedblend.core.errors import FedblendError
from fedblend.core.registry import part
from fedblend.experiment.setup import make_setup
from fedblend.papers.measures.base import CellRun, Measure


@part("measure", "devices")
class Devices(Measure):
    """Test accuracy over all devices, each with its weights after the last round (Mix2FLD, Figure 3)."""

    figure: Literal["mean", "variance"] = "mean"
    """Mean in per cent, or variance in per cent squared."""

    def measured(self, cell: CellRun) -> float:
        """In per cent, or per cent squared."""
        found = cell.cached("devices", {}, lambda folder: self._score(cell))
        values = 100 * np.array(found["accuracy"])
        return float(values.mean() if self.figure == "mean" else values.var())

    def _score(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.core.trees import strip_prefix
        from fedblend.engines.loop import LoopEngine
        from fedblend.runs import checkpoint
        from fedblend.runs.runner import one_thread

        assert cell.run is not None
        state = checkpoint.read(cell.run)
        if state is None or not state.own:
            raise FedblendError(
                'devices keep no weights of their own in this run; give the experiment evaluate_model = "device"'
            )
        with one_thread():
            engine = LoopEngine(make_setup(cell.experiment), "cpu")
            found = []
            for number, (_, table) in enumerate(sorted(state.own.items())):
                cell.on_step("devices tested", number, len(state.own))
                right = engine.score(strip_prefix("weights/", table)).right
                assert right is not None
                found.append(float(right.mean()))
        return {"accuracy": found}
