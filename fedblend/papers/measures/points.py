"""The use of class interior points."""

from __future__ import annotations

from typing import Any, Literal

from fedblend.core.registry import Count, part
from fedblend.papers.measures.base import CellRun, Measure


@part("measure", "points")
class PointsFigure(Measure):
    """A figure of the points that a run's server made (AggEnhance, Figure 8; :mod:`fedblend.analysis.points`)."""

    figure: Literal["accuracy", "first", "last", "noise", "test", "train"] = "accuracy"
    """Test accuracy in per cent of a new model trained on the points alone; or mean cosine distance to the training
    samples in an autoencoder's features: of the first or the last round's points, of noise, of the test samples, of
    the training samples among themselves."""
    epochs: Count = 100
    """Epochs of the new model."""
    vae_epochs: Count = 10
    """Epochs of the autoencoder."""

    def measured(self, cell: CellRun) -> float:
        """In per cent, or a cosine distance from 0 to 2."""
        settings = {"epochs": self.epochs, "vae_epochs": self.vae_epochs}
        return float(cell.cached("points", settings, lambda folder: self._measure(cell))[self.figure])

    def _measure(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.analysis import points
        from fedblend.runs.runner import one_thread

        assert cell.run is not None
        with one_thread():
            loaded = points.read(cell.run)
            chosen = points.TrainingSettings.of(loaded, self.epochs)
            cell.on_step("autoencoder", 0, self.vae_epochs)
            far = points.distances(loaded, points.train_vae(loaded.setup, self.vae_epochs))
            cell.on_step("new model", 0, 1)
            accuracy = points.fresh_accuracy(loaded, chosen)
        rounds = sorted(far.by_round)
        return {
            "accuracy": 100 * accuracy,
            "first": far.by_round[rounds[0]],
            "last": far.by_round[rounds[-1]],
            **{name: getattr(far, name) for name in ("noise", "test", "train")},
        }
