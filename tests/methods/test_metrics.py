"""Metrics: cases by hand, equality with scikit-learn, and what they refuse."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from helpers import metric, setup

from fedblend.core.errors import FedblendError
from fedblend.core.recorder import criteria
from fedblend.experiment.config import as_table, resolve


def logits(probabilities: list[list[float]]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


THREE = logits(
    [[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.8, 0.1], [0.3, 0.6, 0.1], [0.25, 0.15, 0.6], [0.4, 0.35, 0.25]]
)
"""Predicted: 0 0 1 1 2 0."""
TARGETS = torch.tensor([0, 1, 1, 1, 2, 2])


def test_auc_ranks_outputs_whose_softmax_rounds_to_1() -> None:
    gaps = torch.tensor([40.0, 50.0, 45.0, 60.0])
    outputs = torch.stack([torch.zeros(4), gaps], 1)
    assert metric("auc").by_class(outputs, torch.tensor([0, 1, 0, 1])) == [1.0, 1.0]
    outputs[0, 0] = math.nan
    assert all(math.isnan(one) for one in metric("auc").by_class(outputs, torch.tensor([0, 1, 0, 1])))


def test_auc_by_hand_with_a_tie() -> None:
    outputs = logits([[0.2, 0.8], [0.4, 0.6], [0.4, 0.6], [0.9, 0.1]])
    targets = torch.tensor([1, 1, 0, 0])
    # Pairs (positive, negative): 0.8 > 0.6, 0.8 > 0.1, 0.6 = 0.6, 0.6 > 0.1.
    assert metric("auc").by_class(outputs, targets) == pytest.approx([3.5 / 4] * 2)


def test_top_k_by_hand() -> None:
    assert metric("top-k", k=2).overall(THREE, TARGETS) == pytest.approx(5 / 6)
    assert metric("top-k", k=2).by_class(THREE, TARGETS) == pytest.approx([1, 1, 1 / 2])
    assert metric("top-k", k=2).label == "top-2"


def test_calibration_error_by_hand() -> None:
    outputs = logits([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
    # Two bins: all confidences are in (0.5, 1]: mean 0.75, accuracy 1/2. Four bins: (0.5, 0.75] and (0.75, 1].
    targets = torch.tensor([0, 1, 1, 0])
    assert metric("ece", bins=2).overall(outputs, targets) == pytest.approx(0.25)
    assert metric("ece", bins=4).overall(outputs, targets) == pytest.approx(
        0.5 * abs(0.5 - 0.85) + 0.5 * abs(0.5 - 0.65)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_of_classification_equal_those_of_scikit_learn(classes: int, seed: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(seed)
    # Few different numbers: ties.
    outputs = torch.from_numpy(rng.integers(-4, 5, (200, classes)).astype(np.float32) / 4)
    outputs += torch.arange(classes) * 1e-3
    targets = torch.from_numpy(rng.integers(classes, size=200))
    predicted, labels = outputs.argmax(1).numpy(), targets.numpy()
    shares = outputs.double().softmax(1).numpy()
    area = sklearn.roc_auc_score(labels, shares[:, 1] if classes == 2 else shares, multi_class="ovr")

    wanted = {
        metric("balanced-accuracy"): sklearn.balanced_accuracy_score(labels, predicted),
        metric("f1"): sklearn.f1_score(labels, predicted, average="macro"),
        metric("auc"): area,
    }
    if classes > 2:
        wanted[metric("top-k", k=2)] = sklearn.top_k_accuracy_score(labels, shares, k=2)
    for made, value in wanted.items():
        assert made.overall(outputs, targets) == pytest.approx(value, abs=1e-12), made.label
    assert metric("f1").by_class(outputs, targets) == pytest.approx(sklearn.f1_score(labels, predicted, average=None))


def test_errors_of_regression_equal_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    y = rng.standard_normal((50, 3)).astype(np.float32)
    f = (y + 0.3 * rng.standard_normal((50, 3))).astype(np.float32)
    values = [metric(name).overall(torch.from_numpy(f), torch.from_numpy(y)) for name in ("mae", "rmse", "r2")]
    exact = (y.astype(np.float64), f.astype(np.float64))
    functions = (sklearn.mean_absolute_error, sklearn.root_mean_squared_error, sklearn.r2_score)
    assert values == pytest.approx([function(*exact) for function in functions], abs=1e-12)


def test_what_is_not_defined_has_no_value() -> None:
    one_class = torch.zeros(3, dtype=torch.int64)
    outputs = THREE[:3]
    assert math.isnan(metric("auc").overall(outputs, one_class))
    assert math.isnan(metric("r2").overall(torch.zeros(2, 1), torch.ones(2, 1)))
    # Classes 1 and 2 have no samples; class 2 is never predicted either.
    assert [math.isnan(v) for v in metric("f1").by_class(outputs, one_class) or ()] == [False, False, True]
    assert metric("balanced-accuracy").overall(outputs, one_class) == pytest.approx(2 / 3)


BASE = {"data": "digits", "partition": {"name": "iid", "clients": 4}}


def test_a_path_of_torchmetrics_is_a_name() -> None:
    path = "torchmetrics.classification:MulticlassF1Score"
    made = resolve({**BASE, "metrics": [{"name": path, "average": "weighted", "title": "weighted f1"}, path]})
    first, _ = as_table(made)["metrics"]
    assert first == {"name": "torchmetrics", "path": path, "options": {"average": "weighted"}, "title": "weighted f1"}
    assert [one.label for one in made.metrics] == ["weighted f1", "MulticlassF1Score"]
    assert resolve(as_table(made)) == made


def test_without_torchmetrics_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(FedblendError, match=r"needs the package torchmetrics, which is not installed; .* extra"):
        criteria(setup(metrics=["torchmetrics:F1Score"]))
