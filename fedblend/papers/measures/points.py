"""What class interior points are worth."""

from __future__ import annotations

from typing import Any, Literal

from fedblend.core.registry import Count, part
from fedblend.papers.measures.base import CellRun, Measure


@part("measure", "points")
class PointsFigure(Measure):
    """Of the points that a run's server made (AggEnhance, Figure 8; :func:`fedblend.analysis.points.look`)."""

    figure: Literal["accuracy", "first", "last", "noise", "test", "train"] = "accuracy"
    """Test accuracy in per cent of a new model trained on the points alone; or mean cosine distance to the training
    samples in an autoencoder's features: of the first or the last round's points, of noise, of the test samples, of
    the training samples among themselves."""
    epochs: Count = 100
    """Epochs of the new model."""
    vae_epochs: Count = 10
    """Epochs of the autoencoder."""

    def measured(self, seen: CellRun) -> float:
        """In per cent, or a cosine distance from 0 to 2."""
        settings = {"epochs": self.epochs, "vae_epochs": self.vae_epochs}
        return float(seen.once("points", settings, lambda place: self._look(seen))[self.figure])

    def _look(self, seen: CellRun) -> dict[str, Any]:
        from fedblend.analysis import points
        from fedblend.runs.runner import one_thread

        assert seen.run is not None
        with one_thread():
            subject = points.read(seen.run)
            chosen = points.TrainingSettings.of(subject, self.epochs)
            seen.tick("autoencoder", 0, self.vae_epochs)
            far = points.distances(subject, points.train_vae(subject.setup, self.vae_epochs))
            seen.tick("new model", 0, 1)
            accuracy = points.fresh_accuracy(subject, chosen)
        rounds = sorted(far.by_round)
        return {
            "accuracy": 100 * accuracy,
            "first": far.by_round[rounds[0]],
            "last": far.by_round[rounds[-1]],
            **{name: getattr(far, name) for name in ("noise", "test", "train")},
        }

    def steps(self, experiment: Any) -> float:
        """The autoencoder sees all samples; the new model all points, of ten classes, say."""
        return 500.0 * self.vae_epochs + self.epochs * experiment.rounds * 10 / 32
