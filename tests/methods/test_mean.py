"""The mean of uploads: weighted, exact, whatever their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation_helpers import FLOATS, ROWS, train, uploads_of
from helpers import examples, federation, federation_of, run, same, setup, without_machine
from hypothesis import given
from hypothesis import strategies as st

from fedblend.methods.aggregators.mean import WeightedMean


@given(rows=ROWS)
@examples(60)
def test_the_mean_is_weighted_by_samples(rows: list[tuple[list[float], int]]) -> None:
    pairs = zip(uploads_of([v for v, _ in rows]), [w for _, w in rows], strict=True)
    mean = WeightedMean().aggregate(pairs)["w"]
    expected = np.average([v for v, _ in rows], axis=0, weights=[w for _, w in rows])
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-6)


@given(value=st.lists(FLOATS, min_size=1, max_size=5), weights=st.lists(st.integers(1, 10_000), min_size=1, max_size=9))
@examples(60)
def test_equal_uploads_average_to_themselves_exactly(value: list[float], weights: list[int]) -> None:
    mean = WeightedMean().aggregate(({"w": torch.tensor(value)}, float(w)) for w in weights)
    assert torch.equal(mean["w"], torch.tensor(value))


def test_a_client_without_samples_changes_nothing() -> None:
    groups = [range(7), range(7, 20), range(20, 25)]
    with_empty = federation(groups=[*groups, []], train={"cohort": 3}, method="fedmix")
    without = federation(groups=groups, train={"cohort": 3}, method="fedmix")

    (state, records), (expected, expected_records) = run(with_empty, 3), run(without, 3)

    assert same(state.weights, expected.weights)
    assert same(state.entries.tensors, expected.entries.tensors)
    assert without_machine(records) == without_machine(expected_records)


def test_the_mean_keeps_types_and_rounds_whole_numbers() -> None:
    pairs = [
        ({"a": torch.tensor([1.0]), "b": torch.tensor(4), "c": torch.tensor([1.0], dtype=torch.float64)}, 1.0),
        ({"a": torch.tensor([2.0]), "b": torch.tensor(9), "c": torch.tensor([4.0], dtype=torch.float64)}, 2.0),
    ]

    mean = WeightedMean().aggregate(pairs)

    assert {n: t.dtype for n, t in mean.items()} == {"a": torch.float32, "b": torch.int64, "c": torch.float64}
    assert mean["a"].item() == pytest.approx(5 / 3, rel=1e-7)
    assert mean["b"].item() == 7  # 22 / 3, rounded
    assert mean["c"].item() == pytest.approx(3, rel=1e-15)


def test_a_round_averages_its_cohort_by_number_of_samples() -> None:
    made = setup(groups=[range(4), range(4, 20), range(20, 40)], train={"cohort": 3})

    state, records = run(federation_of(made), 1)

    uploads = train(made, range(3))
    for name, tensor in state.weights.items():
        total = sum(uploads[k].weights[name].double() * n for k, n in enumerate((4, 16, 20)))
        torch.testing.assert_close(tensor, (total / 40).float(), rtol=1e-6, atol=1e-7)
    losses = sum(uploads[k].loss * n for k, n in enumerate((4, 16, 20))) / 40
    assert records[0]["train_loss"] == pytest.approx(losses)
