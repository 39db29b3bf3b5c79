"""Figures of a run's log."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, ClassVar, Literal

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.papers.measures.base import CellRun, Measure
from fedblend.runs.groups import Outcome
from fedblend.runs.summary import costs


def _smoothed(outcome: Outcome, last: int) -> list[tuple[int, float]]:
    """(round, mean accuracy of the ``last`` evaluations up to it), without the untrained model's."""
    with_accuracy = [(r.round, r.accuracy) for r in outcome.evaluated if r.accuracy is not None]
    evaluated = [(round, accuracy) for round, accuracy in with_accuracy if round] or with_accuracy
    values = [accuracy for _, accuracy in evaluated]
    windows = [values[max(0, i + 1 - last) : i + 1] for i in range(len(values))]
    return [(round, math.fsum(w) / len(w)) for (round, _), w in zip(evaluated, windows, strict=True)]


def _target(cell: CellRun) -> float:
    if cell.experiment.target is None:
        raise FedblendError("target: is missing; give the experiment the accuracy that counts")
    return cell.experiment.target


@part("measure", "accuracy")
class Accuracy(Measure):
    """Test accuracy in per cent: the final one, the mean of the last evaluations, or the best."""

    last: Count = 1
    """The number of last evaluations whose mean is taken."""
    best: bool = False
    """Return the best such mean of the run, not the last."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent."""
        values = [value for _, value in _smoothed(cell.outcome, self.last)]
        return 100 * (max(values) if self.best else values[-1]) if values else None


@part("measure", "accuracy-at")
class AccuracyAt(Measure):
    """Test accuracy in per cent at a round, as on a curve; of a shorter run the final one."""

    round: Count = 1
    """The round; if it was not evaluated, the last evaluated round before it."""
    last: Count = 1
    """The number of evaluations up to that round whose mean is taken."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent."""
        values = [value for round, value in _smoothed(cell.outcome, self.last) if round <= self.round]
        return 100 * values[-1] if values else None

    def is_settled(self, cell: CellRun) -> bool:
        return cell.outcome.round >= self.round


@part("measure", "rounds-to")
class RoundsTo(Measure):
    """Rounds until the test accuracy first reached the experiment's ``target``; ``inf`` where it never did."""

    infinite: ClassVar[str] = "never"
    last: Count = 1
    """The number of evaluations whose mean must reach the target; in the first rounds all there are."""

    def measured(self, cell: CellRun) -> float:
        target = _target(cell)
        reached = (round for round, value in _smoothed(cell.outcome, self.last) if value >= target)
        return float(next(reached, math.inf))

    def is_settled(self, cell: CellRun) -> bool:
        return math.isfinite(self.measured(cell))


@part("measure", "share")
class Share(Measure):
    """A share that a part of the method measures in each round (:attr:`fedblend.core.record.RoundRecord.measured`)."""

    figure: str = "interior_own"
    """Its name."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent, the mean over rounds; ``None`` where nothing was measured."""
        found = (record.measured or {} for record in cell.outcome.records)
        shares = [one[self.figure] for one in found if self.figure in one]
        return 100 * math.fsum(shares) / len(shares) if shares else None


@part("measure", "label-accuracy")
class LabelAccuracy(Measure):
    """Final test accuracy on samples of some labels, in per cent: the mean over these labels."""

    labels: tuple[int, ...] | Literal["targets"] = "targets"
    """The labels, or the labels that the split makes scarce (its ``targets``)."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent; ``None`` where a label has no test samples."""
        labels = cell.experiment.partition.targets if self.labels == "targets" else self.labels
        by_label: Any = cell.outcome.evaluated[-1].per_class
        found = [by_label[label] for label in labels]
        return None if None in found else 100 * math.fsum(found) / len(found)


@part("measure", "clients")
class Clients(Measure):
    """Final accuracy of the global model on clients' own tests, in per cent (FedMix, Table 13)."""

    figure: Literal["mean", "std", "p10"] = "mean"
    """Mean, standard deviation or 10th percentile over clients."""
    size: Literal["all", "<100", "100-199", ">199"] = "all"
    """Clients by the number of samples that they hold."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent; ``None`` where there are no such clients."""
        found = cell.outcome.evaluated[-1].clients
        if found is None:
            raise FedblendError("clients hold no tests of their own; give the experiment a holdout")
        group = found if self.size == "all" else found["by_size"].get(self.size)
        return None if group is None or self.figure not in group else 100 * group[self.figure]


@part("measure", "costs")
class Costs(Measure):
    """The costs of a run, in total or until its test accuracy first reached the experiment's ``target``."""

    infinite: ClassVar[str] = "never"
    figure: str = "seconds"
    """``seconds`` of computing, ``clock`` (the federation's simulated time), ``bytes_up``, ``bytes_down``,
    ``peak_memory``, or one kind of them, such as ``bytes_up.weights``."""
    until_target: bool = False
    """Count up to the round that reaches the target; otherwise count the whole run."""
    scale: float = 1.0
    """The factor that converts the number to its unit."""

    def measured(self, cell: CellRun) -> float:
        """In the figure's unit; ``inf`` where the target was never reached."""
        total: dict[str, float] = defaultdict(float)
        target = _target(cell) if self.until_target else None
        reached = target is None
        for record in cell.outcome.records:
            for name, number in costs(record).items():
                total[name] += number
            total["peak_memory"] = max(total["peak_memory"], record.machine.get("peak_memory", 0))
            if target is not None and record.round and record.accuracy is not None and record.accuracy >= target:
                reached = True
                break
        if not reached:
            return math.inf
        if self.figure not in total and not self.figure.startswith(("bytes_", "seconds.")):
            raise FedblendError(f"figure: '{self.figure}' is not valid; valid: {', '.join(total)}")
        return self.scale * total[self.figure]

    def is_settled(self, cell: CellRun) -> bool:
        return self.until_target and math.isfinite(self.measured(cell))


@part("measure", "split")
class Split(Measure):
    """The heterogeneity of clients' data, by a measure of the split (AggEnhance, section 4.3)."""

    figure: str = "divergence"
    """``classes_mean``, ``classes_deviation``, ``divergence``, ``distance``, or of sizes (``size_mean``, ...)."""
    trains = False

    def measured(self, cell: CellRun) -> float:
        from fedblend.data.measures import class_counts, noniid_measures

        data, population = cell.data()
        found = noniid_measures(class_counts(population, data.train.y.numpy(), len(data.classes)))
        if self.figure not in found:
            raise FedblendError(f"figure: '{self.figure}' is not valid; valid: {', '.join(found)}")
        return found[self.figure]
