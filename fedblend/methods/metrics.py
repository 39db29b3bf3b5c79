"""Metrics: what is computed from a model's outputs, beside loss and accuracy."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field

from fedblend.core.errors import FedblendError, brief, missing_package
from fedblend.core.metric import Metric
from fedblend.core.objective import Task
from fedblend.core.registry import Count, import_path, part, require_trusted


def _counts(predicted: np.ndarray, targets: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By class: samples that are right, samples of the class, samples predicted as the class; int64 [C]."""
    right = np.bincount(targets[predicted == targets], minlength=classes)
    return right, np.bincount(targets, minlength=classes), np.bincount(predicted, minlength=classes)


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Quotients, float64 [C]; NaN where the divisor is 0."""
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


def _mean(values: np.ndarray) -> float:
    """The mean of the values that are defined; NaN where none is."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan


@part("metric", "balanced-accuracy")
class BalancedAccuracy(Metric):
    """The mean over classes of the accuracy on the class's samples (recall). Classes without samples are left out."""

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The mean recall."""
        right, of_class, _ = _counts(outputs.argmax(1).numpy(), targets.numpy(), outputs.shape[1])
        return _mean(_divided(right, of_class))


@part("metric", "f1")
class F1(Metric):
    """F1 = 2 TP / (2 TP + FP + FN) of each class, and its mean over classes (macro).

    A class that no sample has and that is never predicted is left out of the mean.
    """

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The mean over classes."""
        return _mean(np.array(self.by_class(outputs, targets)))

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
        """F1 of each class."""
        right, of_class, guessed = _counts(outputs.argmax(1).numpy(), targets.numpy(), outputs.shape[1])
        return [float(v) for v in _divided(2.0 * right, of_class + guessed)]


@part("metric", "auc")
class AUC(Metric):
    """Area under the ROC curve of each class against all others, and its mean over classes (macro, one-vs-rest).

    It is the probability that a sample of the class has a higher softmax output for the class than another sample; a
    tie counts half (Mann and Whitney 1947). A class that all samples have, or none, is left out of the mean. With two
    classes both have the same AUC.
    """

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The mean over classes."""
        return _mean(np.array(self.by_class(outputs, targets)))

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
        """The AUC of each class."""
        scores, labels = outputs.double().softmax(1).numpy(), targets.numpy()
        return [_area(scores[:, c], labels == c) for c in range(outputs.shape[1])]


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs of a positive and a negative sample that the scores rank rightly; ties count half."""
    a, b = int(positive.sum()), int((~positive).sum())
    if not a or not b:
        return math.nan
    values, place = np.unique(scores, return_inverse=True)
    ties = np.bincount(place, minlength=len(values))
    ranks = np.cumsum(ties) - (ties - 1) / 2  # the mean rank of equal scores, from 1
    return float((ranks[place][positive].sum() - a * (a + 1) / 2) / (a * b))


@part("metric", "top-k")
class TopK(Metric):
    """The share of samples whose class is among the ``k`` largest outputs, of all samples and of each class.

    Of equal outputs, those of earlier classes count as larger.
    """

    k: Count = 5
    """Number of largest outputs."""

    @property
    def label(self) -> str:
        """``top-5``."""
        return f"top-{self.k}"

    def require_possible(self, task: Task) -> None:
        """Refuse a ``k`` for which every sample is right."""
        super().require_possible(task)
        if self.k >= task.outputs:
            raise ValueError(f"k: {self.k}: all samples are right with {task.outputs} classes; valid: 1 to below them")

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The share of all samples."""
        found = self._found(outputs, targets)
        return float(found.mean()) if len(found) else math.nan

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
        """The share of each class's samples."""
        found, labels, classes = self._found(outputs, targets), targets.numpy(), outputs.shape[1]
        of_class = np.bincount(labels, minlength=classes)
        return [float(v) for v in _divided(np.bincount(labels, found, minlength=classes), of_class)]

    def _found(self, outputs: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
        largest = outputs.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        found: np.ndarray = (largest == targets[:, None]).any(1).numpy()
        return found


@part("metric", "ece")
class CalibrationError(Metric):
    """Expected calibration error: sum over bins of n_b / n |accuracy_b - confidence_b| (Guo et al. 2017, equation 3).

    Samples are put into ``bins`` bins of equal width by their largest softmax output, the confidence.
    """

    larger_is_better = False

    bins: Count = 15
    """Number of bins; a bin is open at its lower edge."""

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The error of all samples."""
        confidence, predicted = (t.numpy() for t in outputs.double().softmax(1).max(1))
        place = np.clip(np.ceil(confidence * self.bins).astype(np.int64) - 1, 0, self.bins - 1)
        apart = np.bincount(place, (predicted == targets.numpy()) - confidence, minlength=self.bins)
        return float(np.abs(apart).sum() / len(place)) if len(place) else math.nan


class _Regression(Metric):
    """Base of the errors of regression."""

    task = "regression"
    larger_is_better = False


@part("metric", "mae")
class MeanAbsoluteError(_Regression):
    """Mean absolute error, over samples and outputs, in the units of the targets."""

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The mean of |output - target|."""
        return float((outputs.double() - targets.double()).abs().mean())


@part("metric", "rmse")
class RootMeanSquaredError(_Regression):
    """Square root of the mean squared error of each output over the samples, and its mean over outputs."""

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The mean over outputs."""
        return float((outputs.double() - targets.double()).square().mean(0).sqrt().mean())


@part("metric", "r2")
class R2(_Regression):
    """Coefficient of determination 1 - sum (y - f)^2 / sum (y - mean y)^2 of each output, and its mean over outputs.

    An output whose targets are all equal is left out of the mean.
    """

    larger_is_better = True

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The mean over outputs."""
        f, y = outputs.double(), targets.double()
        rest, spread = ((y - f).square().sum(0).numpy(), (y - y.mean(0)).square().sum(0).numpy())
        return _mean(1 - _divided(rest, spread))


def _of_torchmetrics(path: str) -> str:
    if not path.startswith(("torchmetrics.", "torchmetrics:")) or ":" not in path:
        raise ValueError("it is the path of a metric of torchmetrics, as torchmetrics.module:Name")
    return require_trusted(path, "metrics")


@part("metric", "torchmetrics")
class TorchMetric(Metric):
    """A metric of the package torchmetrics, by its path (the extra ``metrics`` installs it).

    In a file the path may be the name, and the options stand beside it:
    ``metrics = [{ name = "torchmetrics.classification:MulticlassCohenKappa", weights = "linear" }]``. The metric
    receives logits (torchmetrics makes probabilities of them) and class indices, or in regression predictions and
    targets. Its options ``task = "multiclass"``, ``num_classes`` and ``num_outputs`` are set unless they are given. A
    result with one number a class is recorded by class.
    """

    path: Annotated[str, AfterValidator(_of_torchmetrics)]
    """A class of metrics, or a function in `torchmetrics.functional`, as `torchmetrics.module:Name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options."""
    title: str = ""
    """The metric's name in records and tables (default: the last word of the path)."""
    better: Literal["larger", "smaller"] | None = None
    """Which values are better (default: what the class states, or larger)."""

    @functools.cached_property
    def _made(self) -> Any:
        try:
            import torchmetrics
        except ImportError:
            raise missing_package(f"metrics: '{self.path}'", "torchmetrics", "metrics") from None
        found = import_path(self.path, "metrics")
        # Accuracy and other classes of torchmetrics that choose a class by their option task are metrics, too.
        is_class = isinstance(found, type) and issubclass(found, torchmetrics.Metric)
        is_function = inspect.isfunction(found) and found.__module__.startswith("torchmetrics.functional")
        if not (is_class or is_function):
            raise FedblendError(
                f"metrics: '{self.path}' is no metric; valid: a subclass of torchmetrics.Metric, or a function in "
                "torchmetrics.functional"
            )
        return found

    @property
    def label(self) -> str:
        """The title, or the last word of the path."""
        return self.title or self.path.rpartition(":")[2]

    @property
    def larger_is_better(self) -> bool:  # type: ignore[override]
        """What ``better`` says, or the class."""
        if self.better is not None:
            return self.better == "larger"
        return getattr(self._made, "higher_is_better", None) is not False

    def require_possible(self, task: Task) -> None:
        """Refuse options, and metrics, that do not take this task's outputs: the metric is tried on two samples."""
        outputs = torch.zeros(2, task.outputs)
        targets = torch.zeros(2, dtype=torch.int64) if task.kind == "classification" else outputs
        try:
            self._computed(outputs, targets)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"'{self.path}' does not take the outputs of {task.kind}: {reason}") from None

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The metric; NaN where it gives one number a class."""
        computed = self._computed(outputs, targets)
        return float(computed) if computed.numel() == 1 else math.nan

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        """The metric of each class, where it gives one number a class."""
        computed = self._computed(outputs, targets)
        return computed.tolist() if computed.numel() > 1 else None

    def _computed(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        takes = inspect.signature(self._made).parameters
        classes = {"task": "multiclass", "num_classes": outputs.shape[1]}
        known = classes if not targets.is_floating_point() else {"num_outputs": outputs.shape[1]}
        options = {name: value for name, value in known.items() if name in takes} | dict(self.options)
        if outputs.shape[1] == 1 and targets.is_floating_point():
            outputs, targets = outputs[:, 0], targets[:, 0]
        call = functools.partial(self._made, **options) if inspect.isfunction(self._made) else self._made(**options)
        result = call(outputs, targets)
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else None
        if shape not in ((), (1,), (outputs.shape[-1],)):
            raise TypeError(f"its result is no number, and not one a class: {brief(result)}")
        return result.double()
