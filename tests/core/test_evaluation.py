"""Scores: by class and by client, on whose samples, after which rounds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, experiment, federation, federation_of, images, numbers, run, setup

from fedblend import engines
from fedblend.core.context import Task
from fedblend.core.engine import Scores
from fedblend.core.errors import FedblendError
from fedblend.core.evaluation import evaluate, over_clients
from fedblend.core.setup import Setup
from fedblend.engines.loop_engine import LoopEngine


def test_accuracy_over_clients_by_hand() -> None:
    owner = np.array([0, 0, 0, 0, 1, 1, 3])
    right = np.array([1, 1, 1, 0, 0, 1, 1], bool)

    result = over_clients(owner, right, np.array([99, 100, 50, 200]))

    accuracies = np.array([0.75, 0.5, 1.0])
    assert result["tested"] == 3
    assert result["mean"] == pytest.approx(0.75)
    assert result["std"] == pytest.approx(np.sqrt(((accuracies - 0.75) ** 2).mean()))
    assert result["p10"] == pytest.approx(0.5 + 0.2 * 0.25)
    assert result["by_size"] == {
        "<100": {"clients": 1, "mean": 0.75, "std": 0.0},
        "100-199": {"clients": 1, "mean": 0.5, "std": 0.0},
        ">199": {"clients": 1, "mean": 1.0, "std": 0.0},
    }


def scored(made: Setup, right: list[int], held: list[int] | None = None) -> SimpleNamespace:
    """An engine whose scores are known."""

    def score(weights: Any, split: str = "test") -> Scores:
        values = np.array(held if split == "holdout" else right, bool)
        return Scores(np.where(values, 0.0, 1.0).astype(np.float32), values)

    return SimpleNamespace(score=score)


def test_accuracy_by_class_by_hand() -> None:
    made = setup(images(40, classes=3, test=7))

    result = evaluate(scored(made, [1, 0, 1, 1, 1, 0, 0]), {}, made)

    # Test labels are 0 1 2 0 1 2 0.
    assert result["accuracy"] == pytest.approx(4 / 7)
    assert result["loss"] == pytest.approx(3 / 7)
    assert result["per_class"] == pytest.approx([2 / 3, 1 / 2, 1 / 2])
    assert "clients" not in result


def test_a_class_without_test_samples_has_no_accuracy() -> None:
    made = setup(images(40, classes=3, test=2))
    assert evaluate(scored(made, [1, 1]), {}, made)["per_class"] == [1.0, 1.0, None]


def test_samples_held_out_test_their_own_client() -> None:
    made = setup(images(20), holdout=0.4)
    # 5 samples a client, of which 2 are held out.
    held = [1, 1, 1, 0, 0, 0, 1, 1]

    result = evaluate(scored(made, [1] * 12, held), {}, made)["clients"]

    assert made.population.sizes.tolist() == [3, 3, 3, 3]
    assert result["tested"] == 4
    assert result["mean"] == pytest.approx((1 + 0.5 + 0 + 1) / 4)


def test_clients_of_the_data_set_are_tested_on_their_own_samples() -> None:
    data = images(40, client=np.arange(40) % 4 * 10, test=8)
    made = setup(data, partition="natural")
    # Test samples belong to clients 0 10 20 30 0 10 20 30.
    result = evaluate(scored(made, [1, 1, 0, 0, 1, 0, 0, 1]), {}, made)
    assert result["clients"]["tested"] == 4
    assert result["clients"]["mean"] == pytest.approx((1 + 0.5 + 0 + 0.5) / 4)


def test_own_tests_belong_to_clients_in_the_order_of_the_population() -> None:
    made = setup(images(40, client=np.arange(40) % 4 * 10, test=8), partition="natural")
    natural = np.array([20, 0, 30, 10])
    assert made.own_tests().tolist() == [0, 1, 2, 3] * 2
    assert replace(made, population=replace(made.population, natural=natural)).own_tests().tolist() == [1, 3, 0, 2] * 2


def test_tests_of_clients_that_take_no_part_are_of_no_client() -> None:
    data = images(40, client=np.arange(40) % 4, test=8)
    strangers = replace(data, test=replace(data.test, client=np.full(8, 9)))
    made = setup(strangers, partition="natural", metrics=["f1"])
    result = evaluate(engine_of(made), made.weights(), made)
    assert "clients" not in result
    assert 0 <= result["accuracy"] <= 1


def test_scores_are_those_of_the_model_on_the_test_half() -> None:
    made = setup(images(40, test=7))
    result = evaluate(engine_of(made), made.weights(), made)
    outputs = made.model(made.scale(made.data.test.x))
    assert result["accuracy"] == pytest.approx((outputs.argmax(1) == made.data.test.y).float().mean().item())
    assert result["loss"] == pytest.approx(Task("classification", 3).loss(outputs, made.data.test.y).item(), rel=1e-5)


def test_held_out_samples_are_not_trained_on_and_are_scored_by_client() -> None:
    made = setup(images(20), holdout=0.4)

    scores = engine_of(made).score(made.weights(), "holdout")

    used = set(made.population.order.tolist())
    assert scores.samples.tolist() == made.population.held_order.tolist()
    assert used.isdisjoint(scores.samples.tolist())
    x, y = made.data.train.x[scores.samples], made.data.train.y[scores.samples]
    expected = torch.nn.functional.cross_entropy(made.model(made.scale(x)), y, reduction="none")
    np.testing.assert_allclose(scores.loss, expected.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedmix", "naivemix", "localmix"])
def test_regression_trains_and_is_scored_by_squared_error(method: str) -> None:
    made = setup(numbers(40), method=method, model={"name": "mlp", "hidden": []}, train={"lr": 0.02, "epochs": 3})

    state, records = run(federation_of(made), 6)

    made.model.load_state_dict(state.weights)
    error = (made.model(made.scale(made.data.test.x)) - made.data.test.y).square().sum(1).mean().item()
    assert records[-1]["loss"] == pytest.approx(error, rel=1e-5)
    assert records[-1]["loss"] < records[0]["loss"]
    assert "accuracy" not in records[-1]


@pytest.mark.parametrize(("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_evaluation_is_every_so_many_rounds_and_at_the_end(every: int, evaluated: list[int]) -> None:
    _, records = run(federation(eval_every=every, rounds=5), 5)
    assert [record["round"] for record in records if "accuracy" in record] == evaluated


def test_a_fixed_part_of_the_test_samples_is_the_same_for_seeds_and_methods() -> None:
    data = images(test=12, client=np.arange(40) % 4)
    first, second = (setup(data, eval_samples=5, seed=seed, method=m) for seed, m in [(0, "fedavg"), (7, "fedmix")])
    rows = [next(i for i, x in enumerate(data.test.x) if torch.equal(x, part)) for part in first.data.test.x]

    assert len(rows) == 5
    assert rows == sorted(set(rows))
    assert torch.equal(first.data.test.x, second.data.test.x)
    assert first.data.test.client is not None
    assert data.test.client is not None
    assert first.data.test.client.tolist() == data.test.client[rows].tolist()
    assert torch.equal(first.data.test.y, data.test.y[rows])
    whole, part = (engine_of(made).score(first.weights()) for made in (setup(data), first))
    np.testing.assert_allclose(part.loss, whole.loss[rows], rtol=1e-6)


def test_a_part_is_not_larger_than_the_test_half() -> None:
    with pytest.raises(FedblendError, match="eval_samples: 13: the data have 12 test samples; valid: 1 to 12"):
        setup(images(test=12), eval_samples=13)


def test_a_short_run_takes_the_loop() -> None:
    made = setup()
    choice = engines.plan_engine(made, processors=2, rounds=1)
    assert (choice.engine, choice.ranks) == ("loop", 1)
    assert type(engines.make(made, choice)) is LoopEngine
    assert experiment().engine == "auto"
