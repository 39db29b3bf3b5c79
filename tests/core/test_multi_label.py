"""Samples that may have several labels: loss, metrics, methods, files, and the model in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, records, succeeded
from helpers import each, federation_of, labelled, metric, numbers, run, same_up_to_rounding, setup, slow_except
from safetensors.torch import load_file
from torch.nn import functional as F

from fedblend.core.context import Task
from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.registry import build
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.runs.directory import RunDirectory
from fedblend.runs.predictor import Predictor

ROOT = Path(__file__).parents[2]
LABELS = Task("multi-label", 2)
OUTPUTS = torch.tensor([[2.0, -1.0], [-1.0, 3.0], [1.0, 1.0]])
TARGETS = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def test_the_loss_is_that_of_pytorch_and_linear_in_targets_of_any_shape() -> None:
    outputs, shares = torch.tensor([[90.0, -90.0], [0.0, 12.0]]), torch.tensor([[0.25, 0.0], [1.0, 0.5]])
    wanted = F.binary_cross_entropy_with_logits(outputs, shares)
    assert torch.equal(LABELS.loss(outputs, shares), wanted)
    assert LABELS.loss(outputs, shares[1]) == F.binary_cross_entropy_with_logits(outputs, shares[1].expand(2, 2))


def test_metrics_by_hand() -> None:
    # Predicted: a, b, ab; true: a, ab, b. Label a: TP 1, FP 1, FN 1. Label b: TP 2, FP 0, FN 0.
    assert metric("f1").by_class(OUTPUTS, TARGETS) == pytest.approx([1 / 2, 1])
    assert metric("f1").overall(OUTPUTS, TARGETS) == pytest.approx(3 / 4)
    assert metric("f1", average="micro").overall(OUTPUTS, TARGETS) == pytest.approx(6 / 8)
    assert metric("f1", average="micro").by_class(OUTPUTS, TARGETS) is None
    assert metric("hamming-loss").by_class(OUTPUTS, TARGETS) == pytest.approx([2 / 3, 0])
    assert metric("hamming-loss").overall(OUTPUTS, TARGETS) == pytest.approx(2 / 6)
    # Label a, positives 2 and -1, negative 1; label b, positives 3 and 1, negative -1.
    assert metric("auc").by_class(OUTPUTS, TARGETS) == pytest.approx([1 / 2, 1])


def test_metrics_equal_those_of_scikit_learn_and_torchmetrics() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    pytest.importorskip("torchmetrics")
    rng = np.random.default_rng(0)
    outputs = torch.from_numpy(rng.standard_normal((50, 4)).astype(np.float32))
    targets = torch.from_numpy((rng.random((50, 4)) < 0.4).astype(np.float32))
    y, guessed = targets.numpy(), (outputs > 0).numpy()
    wanted = {
        "hamming-loss": metrics.hamming_loss(y, guessed),
        "f1": metrics.f1_score(y, guessed, average="macro"),
        "auc": metrics.roc_auc_score(y, outputs.numpy(), average="macro"),
    }
    assert {name: metric(name).overall(outputs, targets) for name in wanted} == pytest.approx(wanted)
    micro = metrics.f1_score(y, guessed, average="micro")
    assert metric("f1", average="micro").overall(outputs, targets) == pytest.approx(micro)
    for path, own in (("torchmetrics:HammingDistance", "hamming-loss"), ("torchmetrics:F1Score", "f1")):
        theirs = metric("torchmetrics", path=path, options={"average": "macro"})
        theirs.require_possible(Task("multi-label", 4))
        # Of logits from 0 to 1, too, which torchmetrics alone would take for probabilities.
        for logits in (outputs, outputs.sigmoid()):
            mine = metric(own).overall(logits, targets)
            assert theirs.overall(logits, targets) == pytest.approx(mine, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "path", "words"),
    [
        (Task("multi-label", 3), "torchmetrics.regression:MeanAbsoluteError", "it is for numbers"),
        (Task("multi-label", 3), "torchmetrics.classification:MulticlassCohenKappa", "it is for numbers"),
        (Task("regression", 3), "torchmetrics:F1Score", "it is for classes or labels"),
    ],
)
def test_metrics_of_torchmetrics_for_another_task_are_refused(task: Task, path: str, words: str) -> None:
    pytest.importorskip("torchmetrics")
    with pytest.raises(ValueError, match=words):
        metric("torchmetrics", path=path).require_possible(task)


SETTINGS = {
    "train": {"cohort": 3, "epochs": 2, "batch_size": 4},
    "model": {"name": "mlp", "hidden": [4, 4]},
    "scale": "standard",
}
WORKING = ["fedavg", "naivemix", "fedmix", "localmix", "fedmix-hidden", "scaffold", "feddyn", "moon", "fedadam"]


REMEDY = {"name": "fedmix", "objective": {"remedy": "check"}}


@pytest.mark.parametrize(
    "method", slow_except([REMEDY, "scaffold"], [*WORKING, REMEDY, "ditto", "fedper", "pfedme"]), ids=str
)
def test_methods_that_need_no_classes_work_in_all_engines(method: Any) -> None:
    own = {"holdout": 0.2} if method in ("ditto", "fedper", "pfedme") else {}
    made = setup(labelled(), method=method, metrics=["hamming-loss"], **SETTINGS, **own)

    state, rounds = run(federation_of(made), 2)
    stacked, _ = run(RoundLoop(made, StackedEngine(made, stack=3)), 2)

    same_up_to_rounding(stacked.weights, state.weights, steps=24)
    assert "accuracy" not in rounds[-1]
    assert "per_class" not in rounds[-1]
    assert 0 <= rounds[-1]["metrics"]["hamming-loss"] <= 1


def test_a_federation_learns_labels_and_is_scored_by_their_loss() -> None:
    made = setup(labelled(80), **{**SETTINGS, "train": {"cohort": 4, "epochs": 5}})
    state, rounds = run(federation_of(made), 4)
    made.model.load_state_dict(state.weights)
    outputs, y = made.model(made.scale(made.data.test.x)), made.data.test.y
    assert rounds[-1]["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(outputs, y).item(), rel=1e-5)
    assert rounds[-1]["loss"] < rounds[0]["loss"]


NEED_CLASSES = {
    "fedntd": "'fedntd' needs classes, but these data have none",
    "fedlc": "counts a client's samples by class, but the targets are no classes",
    "fedrs": "counts a client's samples by class, but the targets are no classes",
    "fedproto": "'prototypes' needs classes, but these data have none",
    "fd": "'outputs' needs classes, but these data have none",
    "mix2fld": "'outputs' needs classes, but these data have none",
    "xormixfl": "'train-on-seeds' needs classes, but these data have none",
    "aggenhance": "'aggenhance' needs classes, but these data have none",
    "ccvr": "'ccvr' needs classes",
    "flea": "'flea' needs classes, but these data have none",
    "vhl": "'class-noise' needs classes, but these data have none",
    "virtual-seeds": "'mixed-seeds' needs classes, but these data have none",
    "feddm": "needs classes",
}


@each("method", NEED_CLASSES)
@each("data", [labelled(), numbers()])
def test_methods_that_need_classes_are_refused(data: Dataset, method: str) -> None:
    with pytest.raises(FedblendError, match=NEED_CLASSES[method]):
        run(federation_of(setup(data, method=method, unsafe=True, **SETTINGS)), 1)


@pytest.mark.parametrize("partition", ["classes", "dirichlet", "mix2fld", "xormixfl"])
def test_partitions_by_class_are_refused(partition: str) -> None:
    with pytest.raises(FedblendError, match=f"partition '{partition}': needs classes, but these targets"):
        setup(labelled(), partition=partition)


def load(path: Path, **arrays: Any) -> Dataset:
    np.savez(path, **arrays)
    data: Dataset = build("dataset", {"name": "npz", "path": str(path)}).load()
    return data


@pytest.mark.parametrize("kind", [np.int64, np.uint8, bool])
def test_columns_of_0_and_1_in_an_npz_file_are_labels(kind: type, tmp_path: Path) -> None:
    y = np.tile(np.array([[0, 1], [1, 1], [0, 0]]), (4, 1))
    split = np.arange(12) % 4 == 3
    data = load(tmp_path / "a.npz", x=np.ones((12, 3)), y=y.astype(kind), split=split, labels=np.array(["red", "big"]))
    assert (data.task, data.outputs, data.classes, data.labels) == ("multi-label", 2, (), ("red", "big"))
    assert data.train.y.dtype == torch.float32
    assert data.train.y.tolist() == y[~split].tolist()
    assert load(tmp_path / "b.npz", x=np.ones((12, 3)), y=y).labels == ("0", "1")
    assert load(tmp_path / "c.npz", x=np.ones((12, 3)), y=y.astype(float)).task == "regression"


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.array([[0, 2], [1, 0]])}, r"'y' \[n, 2\] holds 2; valid: 0 and 1 for each label"),
        (
            {"y": np.eye(2, dtype=int)},
            r"'y' \[n, 2\] has one 1 in each row, as one-hot classes have; valid: numbers of classes \[n\], such as "
            r"y.argmax\(1\), or names in 'labels' if they are labels$",
        ),
        ({"y": np.eye(2, dtype=int), "labels": np.array(["a"])}, "'y' has 2 columns, 'labels' 1 names"),
        ({"y": np.eye(2, dtype=int), "labels": np.array(["a", "a"])}, "'labels' has a name twice"),
        ({"y": np.array([0, 1]), "labels": np.array(["a", "b"])}, "valid: by 'labels' whole numbers 0 and 1"),
        (
            {"y": np.eye(2, dtype=int), "classes": np.array(["a", "b"])},
            r"valid: whole numbers or text \[n\] \(classes\)",
        ),
    ],
)
def test_wrong_labels_in_a_file_are_refused(arrays: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    with pytest.raises(FedblendError, match=words):
        load(tmp_path / "a.npz", x=np.ones((2, 3)), **arrays)


@pytest.mark.slow
def test_the_example_runs_and_its_model_predicts_and_is_exported(tmp_path: Path) -> None:
    out, table = tmp_path / "machines", ROOT / "examples" / "machines.csv"
    changes = ("--set", "rounds=2", "--seeds", "0")
    succeeded(here("run", ROOT / "examples" / "machines.toml", "--out", out, "--jobs", 1, *changes))
    record = json.loads(records(out / "fedavg-seed0")[-1])
    assert set(record["metrics"]) == {"hamming-loss", "f1", "f1-micro", "auc"}
    assert len(record["class_metrics"]["f1"]) == 3

    predicted = succeeded(here("predict", out / "fedavg-seed0", table, "--out", tmp_path / "p.csv"))
    assert "labels" in predicted.out
    header = (tmp_path / "p.csv").read_text().splitlines()[0]
    assert header == "sample,labels,p(overheated),p(worn),p(leaking)"

    predictor = Predictor.of_run(RunDirectory(out / "fedavg-seed0"))
    x = torch.randn(5, predictor.description["shape"][0])
    probabilities = torch.from_numpy(predictor.predict_proba(x.numpy()))
    weights = load_file(out / "fedavg-seed0" / "checkpoint.safetensors")
    net = predictor.module.net
    net.load_state_dict({name: weights[f"weights/{name}"] for name in net.state_dict()})
    scaled = x * predictor.module.factor + predictor.module.offset
    assert torch.equal(probabilities, net(scaled).sigmoid().detach())
    assert np.array_equal(predictor.predict(x.numpy()), probabilities.numpy() > 0.5)

    succeeded(here("export", out / "fedavg-seed0", "--out", tmp_path / "model.pt2"))
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.allclose(program(x), probabilities)
    assert json.loads((tmp_path / "model.json").read_text())["labels"] == ["overheated", "worn", "leaking"]
