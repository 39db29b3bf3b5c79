"""Metrics: what is computed from a model's outputs, beside loss and accuracy."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch.nn import functional as F

from fedblend.core.context import Task
from fedblend.core.errors import FedblendError, brief, missing_package
from fedblend.core.metric import Metric
from fedblend.core.registry import Count, import_path, part, require_trusted


def _counts(predicted: np.ndarray, targets: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By class: samples that are right, samples of the class, samples predicted as the class; int64 [C]."""
    right = np.bincount(targets[predicted == targets], minlength=classes)
    return right, np.bincount(targets, minlength=classes), np.bincount(predicted, minlength=classes)


def _label_counts(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of labels, of which a sample may have several: a label is predicted if its logit is above 0."""
    predicted, present = outputs.numpy() > 0, targets.numpy() > 0.5
    return (predicted & present).sum(0), present.sum(0), predicted.sum(0)


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
        right, of_class, _ = _counts(outputs.argmax(1).numpy(), targets.numpy(), outputs.shape[1])
        return _mean(_divided(right, of_class))


@part("metric", "f1")
class F1(Metric):
    """F1 = 2 TP / (2 TP + FP + FN) of each class or label, and its mean over them (macro).

    A class that no sample has and that is never predicted is left out of the mean. In multi-label data a label is
    predicted if its probability is above 1/2.
    """

    tasks = ("classification", "multi-label")

    average: Literal["macro", "micro"] = "macro"
    """The mean over labels, or one F1 of the counts of all labels together (micro; in multi-label data only)."""

    @property
    def label(self) -> str:
        return "f1" if self.average == "macro" else "f1-micro"

    def require_possible(self, task: Task) -> None:
        super().require_possible(task)
        if self.average == "micro" and task.kind == "classification":
            raise ValueError("average: 'micro' is the accuracy where a sample has one class; valid: macro")

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return _mean(self._values(outputs, targets))

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        return self._values(outputs, targets).tolist() if self.average == "macro" else None

    def _values(self, outputs: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
        """F1 of each class or label, or one of all labels together, float64."""
        if targets.dim() == 2:
            right, present, guessed = _label_counts(outputs, targets)
        else:
            right, present, guessed = _counts(outputs.argmax(1).numpy(), targets.numpy(), outputs.shape[1])
        if self.average == "micro":
            right, present, guessed = (counts.sum(keepdims=True) for counts in (right, present, guessed))
        return _divided(2.0 * right, present + guessed)


@part("metric", "hamming-loss")
class HammingLoss(Metric):
    """The share of wrong labels, of all samples and of each label; a label is predicted above probability 1/2."""

    tasks = ("multi-label",)
    larger_is_better = False

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return _mean(np.array(self.by_class(outputs, targets)))

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
        wrong = (outputs > 0) != (targets > 0.5)
        return [float(v) for v in wrong.double().mean(0)]


@part("metric", "auc")
class AUC(Metric):
    """Area under the ROC curve of each class against all others, or of each label, and its mean over them (macro).

    It is the probability that a sample of the class has a higher softmax output for the class than another sample; a
    tie counts half (Mann and Whitney 1947). A class that all samples have, or none, is left out of the mean. With two
    classes both have the same AUC. In multi-label data the outputs of each label are compared as they are. Outputs
    that are not finite have none.
    """

    tasks = ("classification", "multi-label")

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return _mean(np.array(self.by_class(outputs, targets)))

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
        classes = range(outputs.shape[1])
        if not outputs.isfinite().all():
            return [math.nan for _ in classes]
        if targets.dim() == 2:
            return [_area(outputs[:, i].numpy(), targets[:, i].numpy() > 0.5) for i in classes]
        # Log-odds have the order of softmax outputs, and do not round to 0 or 1.
        scores, labels = outputs.double(), targets.numpy()
        others = [scores[:, [i for i in classes if i != c]].logsumexp(1) for c in classes]
        return [_area((scores[:, c] - others[c]).numpy(), labels == c) for c in classes]


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
        return f"top-{self.k}"

    def require_possible(self, task: Task) -> None:
        super().require_possible(task)
        if self.k >= task.outputs:
            raise ValueError(f"k: {self.k}: all samples are right with {task.outputs} classes; valid: 1 to below them")

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        found = self._found(outputs, targets)
        return float(found.mean()) if len(found) else math.nan

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
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
        confidence, predicted = (t.numpy() for t in outputs.double().softmax(1).max(1))
        place = np.clip(np.ceil(confidence * self.bins).astype(np.int64) - 1, 0, self.bins - 1)
        apart = np.bincount(place, (predicted == targets.numpy()) - confidence, minlength=self.bins)
        return float(np.abs(apart).sum() / len(place)) if len(place) else math.nan


class _Regression(Metric):
    tasks = ("regression",)
    larger_is_better = False


@part("metric", "mae")
class MeanAbsoluteError(_Regression):
    """Mean absolute error, over samples and outputs, in the units of the targets."""

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float((outputs.double() - targets.double()).abs().mean())


@part("metric", "rmse")
class RootMeanSquaredError(_Regression):
    """Square root of the mean squared error of each output over the samples, and its mean over outputs."""

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float((outputs.double() - targets.double()).square().mean(0).sqrt().mean())


@part("metric", "r2")
class R2(_Regression):
    """Coefficient of determination 1 - sum (y - f)^2 / sum (y - mean y)^2 of each output, and its mean over outputs.

    An output whose targets are all equal is left out of the mean.
    """

    larger_is_better = True

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
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
    receives probabilities (softmax outputs [n, C], float64) and class indices, in multi-label data probabilities
    (sigmoid outputs) and labels 0 and 1, in regression predictions and targets. A binary metric receives the
    probability of the second of two classes. The options ``task``, ``num_classes``, ``num_labels`` and ``num_outputs``
    are set unless they are given. A result with one number a class is recorded by class.

    torchmetrics gives many values that are not defined as 0. A value is taken for undefined where the targets alone fix
    it: it is the same for outputs that are all right and all wrong. Of that kind are the AUROC, the recall and the F1
    of a class that no sample has. Means over classes, labels or outputs leave such values out.
    """

    tasks = ("classification", "multi-label", "regression")

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
        return self.title or self.path.rpartition(":")[2]

    @property
    def larger_is_better(self) -> bool:  # type: ignore[override]
        if self.better is not None:
            return self.better == "larger"
        return getattr(self._made, "higher_is_better", None) is not False

    def require_possible(self, task: Task) -> None:
        """Refuse options, and metrics, that do not take this task's outputs: the metric is tried on two samples."""
        outputs = torch.zeros(2, task.outputs)
        targets = torch.zeros(2, dtype=torch.int64) if task.kind == "classification" else outputs
        try:
            if task.kind != "classification" and self._of_labels != (task.kind == "multi-label"):
                raise ValueError("it is for numbers" if task.kind == "multi-label" else "it is for classes or labels")
            self._computed(outputs, targets)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"'{self.path}' does not take the outputs of {task.kind}: {reason}") from None

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The metric; NaN where it gives one number a class, and where it is not defined."""
        computed = self._defined(outputs, targets)
        return float(computed) if computed.numel() == 1 else math.nan

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        computed = self._defined(outputs, targets)
        return computed.tolist() if computed.numel() > 1 else None

    @functools.cached_property
    def _takes(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._made).parameters

    @property
    def _of_labels(self) -> bool:
        """Whether the metric takes the number of labels: a metric of classes or labels, and not of numbers."""
        return "num_labels" in self._takes

    def _defined(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The metric's value, or one a class, with NaN where the targets alone fix it."""
        numbers, classes = targets.is_floating_point() and not self._of_labels, outputs.shape[1]
        present = targets if targets.is_floating_point() else F.one_hot(targets, classes)
        # Only where samples are alike: the other values are torchmetrics' own.
        if (present != present[:1]).any(0).all():
            return self._computed(outputs, targets)
        right, wrong = 200.0 * present - 100, 100 - 200.0 * present
        trial = targets
        if numbers:
            # Equal numbers as 1, which is exact. Errors of two sizes: by convention R2 is 1 where nothing differs.
            trial = targets.double().where((present != present[:1]).any(0), 1.0)
            ramp = torch.arange(1.0, len(targets) + 1)[:, None]
            right, wrong = trial + ramp, trial - 2 * ramp
        each: dict[str, str] = {}
        average = ""
        for option, mean_of in (("average", ("macro", "weighted")), ("multioutput", ("uniform_average",))):
            if option in self._takes and self._option(option) in mean_of:
                each, average = {option: "none" if option == "average" else "raw_values"}, self._option(option)
        try:
            values = self._computed(outputs, targets, **each)
        except (ValueError, IndexError):
            # Such as R2 of one sample; the trial before the run has refused what is never possible.
            return torch.tensor(math.nan)
        with contextlib.suppress(ValueError, IndexError):  # where the metric does not take such outputs
            best, worst = (self._computed(of, trial, **each) for of in (right, wrong))
            values = values.where((best - worst).abs() > 0, math.nan)
        if not each:
            return values
        weights = present.sum(0).double() if average == "weighted" else torch.ones_like(values)
        weights = weights.where(~values.isnan(), 0.0)
        return (values.nan_to_num() * weights).sum() / weights.sum()

    def _option(self, name: str) -> Any:
        return self.options.get(name, self._takes[name].default)

    def _computed(self, outputs: torch.Tensor, targets: torch.Tensor, **changed: Any) -> torch.Tensor:
        """What torchmetrics computes, with some options ``changed``; a number, or one a class."""
        number = outputs.shape[1]
        known: dict[str, Any] = {"num_outputs": number}
        # torchmetrics takes logits for probabilities where all of them lie in [0, 1].
        if not targets.is_floating_point():
            known, outputs = {"task": "multiclass", "num_classes": number}, outputs.double().softmax(1)
        elif self._of_labels:
            known, targets = {"task": "multilabel", "num_labels": number}, targets.long()
            outputs = outputs.double().sigmoid()
        options = {name: value for name, value in known.items() if name in self._takes} | self.options | changed
        of_classes = ".classification." in f"{self._made.__module__}." and "num_classes" not in self._takes
        is_binary = options["task"] == "binary" if "task" in options else of_classes
        if is_binary and known.get("num_classes") == 2:
            outputs = outputs[:, 1]
        if number == 1 and "num_classes" not in known:
            outputs, targets = outputs[:, 0], targets[:, 0]
        with warnings.catch_warnings():
            # Of values that are not defined, which are left out.
            warnings.simplefilter("ignore", UserWarning)
            call = functools.partial(self._made, **options) if inspect.isfunction(self._made) else self._made(**options)
            result = call(outputs, targets)
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else None
        if shape not in ((), (1,), (number,)):
            raise TypeError(f"its result is no number, and not one a class: {brief(result)}")
        return result.double()
