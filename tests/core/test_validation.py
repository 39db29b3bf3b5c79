"""Samples for validation, the best round chosen on them, targets, and metrics in a run's record."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import engine_of, examples, federation_of, images, numbers, run, setup, without_machine
from hypothesis import given
from hypothesis import strategies as st

import fedblend
from fedblend.core.errors import FedblendError
from fedblend.core.evaluation import evaluate
from fedblend.core.loop import RoundLoop
from fedblend.core.record import RoundRecord
from fedblend.core.registry import build
from fedblend.data.partitions.prepare import prepare
from fedblend.engines import StackedEngine
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import resolve
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import group
from fedblend.runs.summary import rounds_to_target, rows_of

BOTH = {"server": 0.2, "clients": 0.25}
METRICS = ["f1", "auc", {"name": "top-k", "k": 2}, "ece", "balanced-accuracy"]


@examples(40)
@given(st.floats(0, 0.6), st.floats(0, 0.4), st.floats(0, 0.5), st.integers(1, 12))
def test_each_sample_has_one_place(server: float, clients: float, holdout: float, number: int) -> None:
    data = images(60)
    made = prepare(build("partition", {"name": "iid", "clients": number}), data, 0, 1.0, holdout, clients, server)

    places = [made.order, made.held_order, made.validation_order, made.server_order]

    assert sorted(np.concatenate(places).tolist()) == list(range(60))
    assert (made.sizes > 0).all()
    assert len(made.server_order) == (max(1, int(np.floor(server * 60 + 0.5))) if server else 0)
    for order, owners in (
        (made.held_order, made.owners("holdout")),
        (made.validation_order, made.owners("validation")),
    ):
        assert len(order) == len(owners)


def test_without_validation_the_split_is_as_before() -> None:
    partition, data = build("partition", {"name": "iid", "clients": 5}), images(60)
    plain, validated = prepare(partition, data, 0, 1.0, 0.2), prepare(partition, data, 0, 1.0, 0.2, 0.25)

    assert np.array_equal(plain.held_order, validated.held_order)
    for client in range(5):
        kept = validated.validation_order[validated.owners("validation") == client]
        assert sorted([*validated.indices(client), *kept]) == sorted(plain.indices(client))
    # 12 samples each: 2 are held out, and 3 of 12 are for validation.
    assert validated.sizes.tolist() == [7] * 5
    assert np.bincount(validated.owners("validation")).tolist() == [3] * 5


def test_validation_and_metrics_are_those_of_the_outputs() -> None:
    made = setup(images(60), holdout=0.2, validation=BOTH, metrics=METRICS)
    engine, weights = engine_of(made), made.weights()

    found = evaluate(engine, weights, made)

    test = engine.score(weights)
    assert test.outputs is not None
    for metric in made.experiment.metrics:
        assert found["metrics"][metric.label] == metric.overall(test.outputs, made.data.test.y)
    assert found["class_metrics"]["f1"] == made.experiment.metrics[0].by_class(test.outputs, made.data.test.y)
    assert set(found["class_metrics"]) == {"f1", "auc", "top-2"}
    population, y = made.population, made.data.train.y
    server, clients = engine.score(weights, "server"), engine.score(weights, "validation")
    f1 = made.experiment.metrics[0]
    assert found["validation"]["server"]["samples"] == 12
    assert found["validation"]["server"]["accuracy"] == server.right.mean()
    assert found["validation"]["server"]["metrics"]["f1"] == f1.overall(server.outputs, y[population.server_order])
    owner, targets = population.owners("validation"), y[population.validation_order]
    by_client = [f1.overall(clients.outputs[owner == k], targets[owner == k]) for k in range(4)]
    weighted = np.average(by_client, weights=np.bincount(owner))
    assert found["validation"]["clients"]["metrics"]["f1"] == pytest.approx(weighted)
    assert found["validation"]["clients"]["loss"] == pytest.approx(clients.loss.mean())
    assert found["validation"]["clients"]["tested"] == 4
    held, of = engine.score(weights, "holdout"), population.owners("holdout")
    values = [f1.overall(held.outputs[of == k], y[population.held_order][of == k]) for k in range(4)]
    assert found["client_metrics"]["f1"] == pytest.approx(
        {"tested": 4, "mean": np.mean(values), "std": np.std(values), "worst_tenth": np.percentile(values, 10)}
    )
    calibration = [
        made.experiment.metrics[3].overall(held.outputs[of == k], y[population.held_order][of == k]) for k in range(4)
    ]
    assert found["client_metrics"]["ece"]["worst_tenth"] == pytest.approx(np.percentile(calibration, 90))


def test_metrics_by_named_clients_of_the_data() -> None:
    data = replace(images(40, client=np.arange(40) % 4, test=8), client_names=("a", "b", "c", "d"))
    made = setup(data, partition="natural", metrics=["f1"])
    engine = engine_of(made)

    found = evaluate(engine, made.weights(), made)

    outputs = engine.score(made.weights()).outputs
    rows = np.arange(8) % 4 == 2
    assert found["site_metrics"]["f1"]["c"] == made.experiment.metrics[0].overall(outputs[rows], data.test.y[rows])
    assert found["client_metrics"]["f1"]["tested"] == 4


def test_records_survive_the_file_and_no_metrics_change_nothing() -> None:
    made = setup(images(60), validation=BOTH, metrics=METRICS)
    _, records = run(federation_of(made), 2)
    for record in records:
        assert RoundRecord.from_dict(record).as_dict() == record
    bare = setup(images(60), validation=BOTH)
    _, others = run(federation_of(bare), 2)
    for with_metrics, without in zip(without_machine(records), without_machine(others), strict=True):
        for one in (with_metrics, without):
            one["validation"] = {where: {**v, "metrics": None} for where, v in one["validation"].items()}
        assert {k: v for k, v in with_metrics.items() if k in without} == without


def test_the_stacked_engine_records_the_same() -> None:
    made = setup(images(60), validation=BOTH, metrics=METRICS)
    weights = made.weights()
    loop, stacked = (evaluate(engine(made), weights, made) for engine in (LoopEngine, StackedEngine))
    for where in ("server", "clients"):
        assert loop["validation"][where]["metrics"] == pytest.approx(stacked["validation"][where]["metrics"], rel=1e-4)
    assert loop["metrics"] == pytest.approx(stacked["metrics"], rel=1e-4)


def test_regression_is_validated_by_its_loss_and_its_errors() -> None:
    made = setup(numbers(), validation=BOTH, metrics=["mae", "r2"], train={"lr": 0.01}, holdout=0.2)
    _, records = run(federation_of(made), 3)
    losses = [record["validation"]["server"]["loss"] for record in records]
    assert "accuracy" not in records[0]["validation"]["server"]
    assert records[-1]["best_round"] == 1 + int(np.argmin(losses))
    assert records[-1]["client_metrics"]["mae"]["tested"] == 4


@pytest.mark.parametrize("metric", [None, "loss", "ece", "f1"])
def test_the_best_round_is_the_first_best_on_validation(metric: str | None) -> None:
    made = setup(images(60), validation={"server": 0.3, "metric": metric}, metrics=METRICS, train={"lr": 0.5}, rounds=6)
    federation = federation_of(made)
    state, first = federation.start()
    _, records = run(federation, 6, state)
    records = [first.as_dict(), *records]
    name = metric or "accuracy"
    values = [RoundRecord.from_dict(r).score_of(name, True) for r in records]
    for i, record in enumerate(records):
        so_far = np.array(values[: i + 1]) * (-1 if name in ("loss", "ece") else 1)
        assert record["best_round"] == int(so_far.argmax())


def test_the_clients_validation_chooses_where_the_server_has_none() -> None:
    made = setup(images(60), validation={"clients": 0.3}, rounds=3)
    _, records = run(federation_of(made), 3)
    values = [record["validation"]["clients"]["accuracy"] for record in records]
    assert records[-1]["best_round"] in (0, 1 + int(np.argmax(values)))


def test_a_resumed_run_knows_the_best_round_before(tmp_path: Path) -> None:
    fields = {"validation": BOTH, "metrics": ["f1"], "train": {"lr": 0.5, "cohort": 2, "batch_size": 4}}
    base = {"data": "digits", "fraction": 0.05, "partition": {"name": "iid", "clients": 4}, "engine": "loop"}
    base |= {"model": {"name": "mlp", "hidden": [6]}, **fields}
    whole = fedblend.run(fedblend.Experiment(**base, rounds=4), out=tmp_path / "whole")
    fedblend.run(fedblend.Experiment(**base, rounds=2), out=tmp_path / "resumed")
    resumed = fedblend.run(fedblend.Experiment(**base, rounds=4), out=tmp_path / "resumed", resume=True)

    both = [without_machine(RunDirectory(one.path).metrics()) for one in (whole, resumed)]
    assert both[0] == both[1]
    (row,) = rows_of(group([RunDirectory(tmp_path / "resumed")]))
    best = both[0][-1]["best_round"]
    assert row["chosen_by_seed"] == {0: best}
    assert row["chosen"] == both[0][best]["accuracy"]
    assert row["metric.f1"] == both[0][-1]["metrics"]["f1"]


@pytest.mark.parametrize(
    ("metric", "target", "validation"), [("loss", 2.0, {}), ("f1", 0.6, {}), ("accuracy", 0.6, {"server": 0.3})]
)
def test_a_run_ends_at_its_target(metric: str, target: float, validation: Any, tmp_path: Path) -> None:
    base = {"data": "digits", "fraction": 0.2, "partition": {"name": "iid", "clients": 4}, "engine": "loop"}
    base |= {"model": {"name": "mlp", "hidden": [16]}, "train": {"cohort": 4, "lr": 0.1}, "rounds": 30}
    asked = {"metrics": ["f1"], "target_metric": metric, "target": target, "stop_at_target": True}
    result = fedblend.run(fedblend.Experiment(**base, **asked, validation=validation), out=tmp_path / "run")

    directory = RunDirectory(result.path)
    values = [record.score_of(metric, bool(validation)) for record in directory.records()]
    sign = -1 if metric == "loss" else 1
    assert [sign * (v - target) >= 0 for v in values] == [False] * (len(values) - 1) + [True]
    assert directory.status()["reason"] == "ended by target"
    (row,) = rows_of(group([directory]))
    assert row["target_round"] == len(values) - 1
    assert rounds_to_target(row) == str(len(values) - 1)
    assert row["finished"] == 1


def test_accuracy_is_no_target_in_regression() -> None:
    with pytest.raises(FedblendError, match="target_metric: accuracy is not defined for regression data"):
        RoundLoop(made := setup(numbers(), target=0.5, stop_at_target=True), engine_of(made))


def test_each_clients_own_model_is_validated_on_its_own_samples() -> None:
    data = images(60, client=np.arange(60) % 4, test=8)
    made = setup(
        data,
        partition="natural",
        validation={"clients": 0.3},
        metrics=["f1"],
        evaluate_model="each",
        method={"name": "ditto"},
    )
    federation = federation_of(made)
    state, records = run(federation, 2)
    own = {c: kept.personal for c, kept in state.client_states.items()}
    engine, population = engine_of(made), made.population
    right = engine.score(state.weights, "validation").right.copy()
    owner = population.owners("validation")
    for client, weights in own.items():
        right[owner == client] = engine.score(weights, "validation").right[owner == client]
    assert records[-1]["validation"]["clients"]["accuracy"] == right.mean()


def test_the_file_of_the_page_on_training_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    asked = resolve(tomllib.loads(block))
    assert asked.train.optimizer.name == "adamw"
    assert len(asked.metrics) == 5
