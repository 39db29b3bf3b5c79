"""Metrics of torchmetrics, beside our own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import setup
from test_metrics import TARGETS, THREE, logits, metric

from fedblend.core.context import Task
from fedblend.core.errors import FedblendError
from fedblend.core.recorder import criteria

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torchmetrics")]


@pytest.fixture(scope="module")
def torchmetrics() -> None:
    """A second's import."""
    pytest.importorskip("torchmetrics")


@pytest.mark.parametrize(
    ("path", "options", "own"),
    [
        ("torchmetrics.classification:MulticlassF1Score", {}, "f1"),
        ("torchmetrics:F1Score", {"average": "macro"}, "f1"),
        ("torchmetrics.functional.classification:multiclass_f1_score", {}, "f1"),
        ("torchmetrics.classification:MulticlassAUROC", {}, "auc"),
        ("torchmetrics.classification:MulticlassCalibrationError", {}, "ece"),
    ],
)
def test_metrics_of_torchmetrics_equal_ours(path: str, options: dict[str, Any], own: str) -> None:
    made = metric("torchmetrics", path=path, options=options)
    made.require_possible(Task("classification", 3))
    for outputs in (THREE, BOUNDED):
        assert made.overall(outputs, TARGETS) == pytest.approx(metric(own).overall(outputs, TARGETS), rel=1e-5)
    assert made.larger_is_better == metric(own).larger_is_better


def test_torchmetrics_gives_numbers_by_class_and_errors_of_regression() -> None:
    by_class = metric("torchmetrics", path="torchmetrics:F1Score", options={"average": "none"})
    assert by_class.by_class(THREE, TARGETS) == pytest.approx([2 / 4, 4 / 5, 2 / 3])
    assert math.isnan(by_class.overall(THREE, TARGETS))
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [3.0]])
    error = metric("torchmetrics", path="torchmetrics.regression:MeanAbsoluteError")
    error.require_possible(Task("regression", 1))
    assert error.overall(outputs, targets) == pytest.approx(0.5)
    assert not error.larger_is_better


PATH = "torchmetrics.classification:"
BOUNDED = THREE.sigmoid()
"""Logits that torchmetrics alone would take for probabilities."""


@pytest.mark.parametrize(("name", "options"), [("BinaryAUROC", {}), ("AUROC", {"task": "binary"})])
def test_a_binary_metric_receives_the_probability_of_the_second_class(name: str, options: dict[str, Any]) -> None:
    outputs, targets = BOUNDED[:, :2], (TARGETS > 0).long()
    theirs = metric("torchmetrics", path=PATH + name, options=options)
    theirs.require_possible(Task("classification", 2))

    assert theirs.overall(outputs, targets) == pytest.approx(metric("auc").overall(outputs, targets))
    with pytest.raises(ValueError, match="does not take the outputs of classification"):
        theirs.require_possible(Task("classification", 3))


LACKS_2 = torch.tensor([0, 1, 1, 1, 0, 0])
"""Targets without class 2, which is predicted once."""
FIRST = torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize("targets", [LACKS_2, FIRST, TARGETS], ids=["lacks one", "has one", "has all"])
@pytest.mark.parametrize(
    ("name", "options", "own"),
    [
        ("AUROC", {}, "auc"),
        ("AUROC", {"thresholds": [i / 1000 for i in range(1001)]}, "auc"),
        ("Recall", {}, "balanced-accuracy"),
        ("Accuracy", {}, "balanced-accuracy"),
    ],
)
def test_classes_whose_value_is_not_defined_are_left_out_of_torchmetrics_means(
    name: str, options: dict[str, Any], own: str, targets: torch.Tensor
) -> None:
    theirs = metric("torchmetrics", path=f"{PATH}Multiclass{name}", options=options)
    wanted = metric(own).overall(THREE, targets)
    assert theirs.overall(THREE, targets) == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert math.isnan(wanted) == (targets is FIRST and own == "auc")


def test_classes_by_number_and_weighted_means_leave_undefined_values_out() -> None:
    path = f"{PATH}MulticlassAUROC"
    one, two, _ = by_class = metric("auc").by_class(THREE, LACKS_2)

    each = metric("torchmetrics", path=path, options={"average": "none"}).by_class(THREE, LACKS_2)
    weighted = metric("torchmetrics", path=path, options={"average": "weighted"}).overall(THREE, LACKS_2)

    assert each == pytest.approx(by_class, nan_ok=True)
    assert weighted == pytest.approx((3 * one + 3 * two) / 6)


@pytest.mark.parametrize(
    ("name", "without_first", "without_second"),
    [
        ("BinaryAUROC", math.nan, math.nan),
        ("BinaryRecall", 4 / 6, math.nan),
        ("BinaryF1Score", 8 / 10, math.nan),
        ("BinarySpecificity", math.nan, 2 / 6),
        ("BinaryAccuracy", 4 / 6, 2 / 6),
        ("BinaryCohenKappa", math.nan, math.nan),
    ],
)
def test_which_binary_metrics_one_class_leaves_undefined(
    name: str, without_first: float, without_second: float
) -> None:
    made = metric("torchmetrics", path=PATH + name)
    outputs = logits([[0.2, 0.8]] * 4 + [[0.9, 0.1]] * 2)
    found = [made.overall(outputs, FIRST + 1), made.overall(outputs, FIRST)]
    assert found == pytest.approx([without_first, without_second], nan_ok=True)


def test_a_label_that_all_samples_have_or_none_is_left_out_as_in_our_auc() -> None:
    labels = torch.tensor([[1.0, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 0]])
    made = metric("torchmetrics", path=f"{PATH}MultilabelAUROC")
    assert made.overall(THREE, labels) == pytest.approx(metric("auc").overall(THREE, labels))
    assert math.isnan(made.overall(THREE[:1], labels[:1]))


@pytest.mark.parametrize("constant", [1.0, 0.7, 0.1])
@pytest.mark.parametrize("name", ["R2Score", "ExplainedVariance", "SpearmanCorrCoef", "PearsonCorrCoef"])
def test_equal_targets_and_a_single_sample_leave_scores_of_regression_undefined(name: str, constant: float) -> None:
    """Also of numbers that are not exact."""
    made = metric("torchmetrics", path=f"torchmetrics.regression:{name}")
    outputs = torch.tensor([[1.0], [2.0], [4.0]])

    for values in (outputs, outputs[:1]):
        assert math.isnan(made.overall(values, torch.full_like(values, constant)))
    error = metric("torchmetrics", path="torchmetrics.regression:MeanAbsoluteError")
    assert error.overall(outputs, torch.ones_like(outputs)) == pytest.approx(4 / 3)


def test_a_metric_that_takes_no_wrong_outputs_keeps_its_value() -> None:
    made = metric("torchmetrics", path="torchmetrics.regression:TweedieDevianceScore", options={"power": 1.5})
    assert made.overall(torch.tensor([[1.0], [4.0]]), torch.ones(2, 1)) > 0


def test_an_output_of_equal_targets_is_left_out_of_r2_of_torchmetrics() -> None:
    outputs = torch.tensor([[1.0, 2.0], [2.0, 5.0], [4.0, 6.0]])
    targets = torch.tensor([[1.0, 2.0], [1.0, 4.0], [1.0, 9.0]])
    made = metric("torchmetrics", path="torchmetrics.regression:R2Score")
    assert made.overall(outputs, targets) == pytest.approx(metric("r2").overall(outputs, targets))


@pytest.mark.filterwarnings("error")
def test_undefined_values_of_torchmetrics_come_without_its_warnings() -> None:
    assert math.isnan(metric("torchmetrics", path=f"{PATH}MulticlassAUROC").overall(THREE, FIRST))


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("torchmetrics:Metric2", {}, "cannot import"),
        ("torchmetrics.utilities.data:dim_zero_cat", {}, "is no metric; valid: a subclass of torchmetrics.Metric"),
        ("torchmetrics.classification:MulticlassF1Score", {"top": 2}, r"metrics\[0\]: .*does not take the outputs"),
        ("torchmetrics.classification:MulticlassConfusionMatrix", {}, "its result is no number, and not one a class"),
    ],
)
def test_what_is_no_metric_of_torchmetrics_is_refused(path: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(FedblendError, match=words):
        criteria(setup(metrics=[{"name": path, **options}]))
