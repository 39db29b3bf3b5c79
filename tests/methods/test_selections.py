"""Who is chosen, against computations of each test's own; losses that are asked for, their bytes, and resumed runs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import with_calls
from helpers import each, federation, federation_of, run, setup
from torch.func import functional_call

from fedblend import part
from fedblend.core.channel import Channel
from fedblend.core.columns import column
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.core.selection import Selection, SelectionContext, draw
from fedblend.core.setup import Setup, cohort_of
from fedblend.core.state import RunState
from fedblend.core.trees import bytes_of
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.runs import checkpoint

GROUPS = [range(2), range(2, 8), [], range(8, 11), range(11, 23), range(23, 28), range(28, 36)]
"""Clients of 2, 6, 0, 3, 12, 5 and 8 samples."""
SIZES = np.array([len(group) for group in GROUPS])
POWER = {"name": "power-of-choice", "candidates": 4}


def context(number: int, rng: Any = 0, losses: Any = None, **state: torch.Tensor) -> SelectionContext:
    """A choice of ``number`` of the clients of :data:`GROUPS` that hold samples."""
    clients = np.flatnonzero(SIZES)
    return SelectionContext(0, clients, number, SIZES, state, np.random.default_rng(rng), losses or (lambda who: who))


def often(selection: Selection, number: int, draws: int = 1000, losses: Any = None, **state: torch.Tensor) -> Any:
    """How often each client is chosen."""
    rng, counts = np.random.default_rng(5), np.zeros(len(SIZES))
    for _ in range(draws):
        chosen = selection.choose(context(number, rng, losses, **state))
        assert len(set(chosen.tolist())) == len(chosen)
        counts[chosen] += 1
    return counts / draws


def one_after_another(weights: np.ndarray, number: int) -> np.ndarray:
    """The probability that each is among ``number`` that are drawn in turn by weight, from all orders."""
    found = np.zeros(len(weights))
    for order in itertools.permutations(np.flatnonzero(weights), number):
        left, probability = float(weights.sum()), 1.0
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        found[list(order)] += probability
    return found


def test_the_default_is_the_choice_of_earlier_versions() -> None:
    made = setup(groups=GROUPS, train={"cohort": 3})
    for round in range(20):
        rng = stream(0, "cohort", round)
        earlier = np.sort(rng.choice(np.flatnonzero(SIZES), 3, replace=False, shuffle=False))
        assert cohort_of(made, round).tolist() == earlier.tolist()
    assert setup(selection="uniform").experiment == setup().experiment


def test_clients_are_drawn_one_after_another_by_weight() -> None:
    weights = np.array([1e-3, 0.2, 0.3, 0.5])
    rng = np.random.default_rng(1)
    pairs = [tuple(draw(rng, np.arange(4), 2, np.log(weights) + 700).tolist()) for _ in range(20000)]
    for i, j in ((3, 2), (2, 3), (1, 3)):
        expected = weights[i] * weights[j] / (weights.sum() * (weights.sum() - weights[i]))
        assert abs(pairs.count((i, j)) / 20000 - expected) < 0.012


def test_by_size() -> None:
    found = often(build("selection", "size"), 2)
    assert np.abs(found - one_after_another(SIZES, 2)).max() < 0.05
    # With the uniform third this would fail.
    assert np.abs(found - (SIZES > 0) / 3).max() > 0.2


def losses_by_hand(made: Setup, state: RunState) -> np.ndarray:
    """The mean cross-entropy of the state's model over each client's samples."""
    found = np.full(len(GROUPS), np.nan)
    for client in np.flatnonzero(SIZES).tolist():
        rows = torch.from_numpy(made.population.indices(client))
        x, y = made.scale(made.data.train.x[rows]), made.data.train.y[rows]
        outputs = functional_call(made.model.eval(), state.weights, (x,)).double()
        found[client] = float((outputs.logsumexp(1) - outputs[torch.arange(len(y)), y]).mean())
    return found


def chosen_by_hand(made: Setup, state: RunState, candidates: int, cohort: int) -> list[int]:
    """Candidates by size, from the keyed stream, and those of the largest losses among them."""
    rng, clients = stream(made.experiment.seed, "cohort", state.round), np.flatnonzero(SIZES)
    keys = np.log(SIZES[clients]) + rng.gumbel(size=len(clients))
    drawn = [int(clients[i]) for i in np.argsort(-keys)[:candidates]]
    losses = losses_by_hand(made, state)
    return sorted(sorted(drawn, key=lambda client: -losses[client])[:cohort])


@pytest.mark.parametrize("kind", [LoopEngine, StackedEngine])
def test_power_of_choice_by_hand(kind: Any) -> None:
    made = setup(groups=GROUPS, selection=POWER, train={"cohort": 2, "lr": 0.5}, rounds=6)
    loop = RoundLoop(made, kind(made))
    model = bytes_of(made.weights())
    state, _ = loop.start()
    cohorts = []
    for _ in range(6):
        expected = chosen_by_hand(made, state, 4, 2)
        state, record = loop.round(state)
        assert record.cohort == expected
        # Candidates have the model: the cohort does not receive it again.
        assert record.bytes_down == {"weights": 4 * model}
        assert record.bytes_up == {"local-loss": 4 * 8, "weights": 2 * model}
        assert record.asked == {"clients": 4, "losses": 4}
        cohorts.append(tuple(expected))
    assert len(set(cohorts)) > 2


def test_candidates_of_power_of_choice_are_drawn_by_size() -> None:
    """With as many candidates as clients to choose it is sampling by size, whatever the losses."""
    same = build("selection", {"name": "power-of-choice", "candidates": 2})
    assert np.abs(often(same, 2) - one_after_another(SIZES, 2)).max() < 0.05
    # All candidates: always the largest losses.
    largest = build("selection", {"name": "power-of-choice", "candidates": 6})
    assert often(largest, 2, 50, lambda who: -np.abs(who - 3.4)).tolist() == [0, 0, 0, 1, 1, 0, 0]


def test_equal_losses_are_ordered_at_random_and_missing_ones_are_not_chosen() -> None:
    power = build("selection", {"name": "power-of-choice", "candidates": 6})
    equal = often(power, 2, losses=lambda who: np.ones(len(who)))
    assert np.abs(equal - one_after_another(SIZES, 2)).max() < 0.05
    assert power.choose(context(3, losses=lambda who: np.where(who == 4, 1.0, np.nan))).tolist() == [4]


@part("channel", "every-other")
class EveryOther(Channel):
    """Delivers every other transmission."""

    def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.arange(len(sizes)) % 2 == 0


def test_losses_that_the_channel_loses_are_counted_and_not_used() -> None:
    changes = {"channel": "every-other", "train": {"cohort": 3}}
    _, (record,) = run(federation(groups=GROUPS, selection=POWER, **changes), 1)
    # Of four candidates two receive the model, and of their two losses one arrives.
    assert record["asked"] == {"clients": 4, "losses": 1}
    assert record["bytes_up"]["local-loss"] == 2 * 8
    assert len(record["cohort"]) == 1


def test_values_of_last_losses_by_hand() -> None:
    made = setup(groups=GROUPS, selection="loss", train={"cohort": 3}, rounds=4)
    loop, losses = federation_of(made), {}
    engine = loop.engine
    state, _ = loop.start()
    assert state.server_state["selection/values"].isnan().all()
    for _ in range(4):

        def noted(*given: Any) -> Any:
            for update in engine.train(*given):
                losses[update.client] = update.loss
                yield update

        loop.engine = with_calls(engine, train=noted)
        loop.cohorts.engine = loop.engine
        state, _ = loop.round(state)
        values = state.server_state["selection/values"]
        assert {c for c in range(7) if not values[c].isnan()} == set(losses)
        for client, loss in losses.items():
            assert float(values[client]) == pytest.approx(np.sqrt(SIZES[client]) * loss)


def test_probabilities_of_last_losses() -> None:
    values = torch.tensor([1.0, 2.0, 99.0, 3.0, 4.0, 0.0, np.nan], dtype=torch.float64)
    # The unknown value counts as the largest that is known of clients that hold samples: 4.
    known = np.array([1.0, 2.0, -np.inf, 3.0, 4.0, 0.0, 4.0])

    def found(number: int, **options: float) -> Any:
        return often(build("selection", {"name": "loss", **options}), number, values=values)

    weights = np.exp(0.5 * known)
    sharp = found(2, smallest=0.0, sharpness=0.5, uniform=0.0)
    assert np.abs(sharp - one_after_another(weights, 2)).max() < 0.05
    # Half of six are left out: the smallest values.
    half = found(2, smallest=0.5, sharpness=0.5, uniform=0.0)
    assert np.abs(half - one_after_another(np.where(known >= 3, weights, 0), 2)).max() < 0.05
    assert np.abs(found(2, uniform=1.0) - (SIZES > 0) / 3).max() < 0.05
    # One of two by value, always a largest; the other uniformly of the five that are left.
    both = found(2, smallest=0.5, sharpness=100.0, uniform=0.5)
    assert both[[4, 6]].sum() == pytest.approx(1 + 1 / 5, abs=0.05)
    # As few are left out as leave a cohort.
    assert found(5, smallest=0.75, uniform=0.0)[5] == 0
    assert found(6, smallest=0.75, uniform=0.0).tolist() == [1, 1, 0, 1, 1, 1, 1]


@each("selection", [POWER, "loss", "size", {"name": "available", "trace": "TRACE", "among": "loss"}])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_to_the_bit(selection: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n" + "".join(f"{c},1,99\n" for c in (0, 1, 3, 4, 5)))
    if isinstance(selection, dict) and "trace" in selection:
        selection = {**selection, "trace": str(tmp_path / "trace.csv")}
    made = setup(groups=GROUPS, selection=selection, train={"cohort": 2, "lr": 0.5}, rounds=8)
    whole, records = run(federation_of(made), 8)
    half, first = run(federation_of(made), 3)
    checkpoint.write(tmp_path, half)
    kept = checkpoint.read(tmp_path)
    assert kept is not None
    ended, rest = run(federation_of(made), 5, checkpoint.match_model(kept, made.weights(), 7, tmp_path))
    assert [r["cohort"] for r in first + rest] == [r["cohort"] for r in records]
    assert all(torch.equal(ended.weights[name], tensor) for name, tensor in whole.weights.items())
    assert ended.server_state.keys() == whole.server_state.keys()
    for name, tensor in whole.server_state.items():
        torch.testing.assert_close(ended.server_state[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_lists_are_taken_in_turn() -> None:
    listed = {"name": "list", "clients": [[4], [6, 0, 1]]}
    _, records = run(federation(groups=GROUPS, selection=listed, rounds=3), 3)
    assert [record["cohort"] for record in records] == [[4], [0, 1, 6], [4]]


def test_clients_that_are_there(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n0,1,2\n1,2,2\n4,2,4\n1,4,4\n6,4,4\n")
    selection = {"name": "available", "trace": str(trace)}
    made = setup(groups=GROUPS, selection=selection, rounds=5, min_uploads=0, train={"cohort": 2})
    state, records = run(federation_of(made), 5)
    assert records[0]["cohort"] == [0]
    assert len(records[1]["cohort"]) == 2
    assert set(records[1]["cohort"]) < {0, 1, 4}
    assert records[2]["cohort"] == [4]
    assert set(records[3]["cohort"]) < {1, 4, 6}
    assert records[4]["cohort"] == []
    assert (records[4]["uploads"], state.round) == (0, 5)

    seconds = setup(groups=GROUPS, selection={**selection, "seconds": 1.5}, rounds=5, min_uploads=0)
    assert [cohort_of(seconds, round).tolist() for round in (0, 2)] == [[], [4]]

    for text, told in (
        ("client,from,to\n2,1,2\n", "clients 2 hold no samples"),
        ("client,from,to\n0,1\n", "line 2: .*; valid: a number in each of the columns client, from, to"),
        ("client,from\n0,1\n", "line 2: KeyError: 'to'"),
    ):
        other = tmp_path / f"{len(text)}.csv"
        other.write_text(text)
        with pytest.raises(FedblendError, match=told):
            federation(groups=GROUPS, selection={"name": "available", "trace": str(other)})
    with pytest.raises(FedblendError, match="no such file; give a CSV file with columns client, from, to"):
        federation(groups=GROUPS, selection={"name": "available", "trace": str(tmp_path / "none.csv")})


@part("selection", "strange")
class Strange(Selection):
    """Chooses a client that holds nothing."""

    def choose(self, context: SelectionContext) -> Any:
        return [2, 0]


def test_a_selection_of_ones_own_is_held_to_clients_that_can_be_chosen() -> None:
    with pytest.raises(FedblendError, match="selection: 'strange' chose 0, 2 in round 1; valid: different clients"):
        run(federation(groups=GROUPS, selection="strange"), 1)


def test_a_file_of_numbers_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "sites.csv"
    for time, number in enumerate((1.5, 2.5)):
        file.write_text(f"weight\n{number}\n", encoding="utf-8")
        os.utime(file, ns=(time, time))
        assert column(f"{file}:weight").tolist() == [number]
