"""Random numbers: one stream for each address, whoever else draws, in whatever order clients are worked on."""

from __future__ import annotations

import contextlib
import random as python_random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import BATCH_NORM, DROPOUT, train, with_calls
from helpers import (
    each,
    engine_of,
    examples,
    federation,
    images,
    needs_of,
    run,
    same,
    same_state,
    setup,
    slow_except,
    without_machine,
)
from hypothesis import given
from hypothesis import strategies as st

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.engine import ClientUpdate, TrainTask
from fedblend.core.loop import RoundLoop
from fedblend.core.random import key, lent_generator, stream
from fedblend.core.sharing import Pool
from fedblend.experiment.presets import presets


@each("method", ["fedmix", "localmix"])
@each("order", [[3, 1, 0, 2], [2]])
def test_a_clients_upload_depends_on_no_other_client(method: str, order: list[int]) -> None:
    made = setup(method=method, model=DROPOUT)
    in_order, permuted = train(made, range(4)), train(made, order)
    assert list(permuted) == order
    for client in order:
        assert same(permuted[client].weights, in_order[client].weights)
        assert permuted[client].loss == in_order[client].loss


@pytest.mark.parametrize("model", [DROPOUT, BATCH_NORM])
def test_the_order_in_which_an_engine_works_changes_nothing(model: dict[str, Any]) -> None:
    made = setup(model=model, method="naivemix", train={"cohort": 3})
    engine = engine_of(made)

    def backwards(task: TrainTask, clients: list[int]) -> Iterator[ClientUpdate]:
        done = {t.client: t for t in engine.train(task, clients[::-1])}
        return iter([done[client] for client in clients])

    straight, records = run(RoundLoop(made, engine), 3)
    turned, turned_records = run(RoundLoop(made, with_calls(engine, train=backwards)), 3)

    assert same_state(straight, turned)
    assert without_machine(records) == without_machine(turned_records)


ADDRESS = st.tuples(
    st.integers(0, 2**40), st.sampled_from(["cohort", "batches", "share"]), st.integers(0, 999), st.integers(0, 10**6)
)


@given(one=ADDRESS, two=ADDRESS)
@examples(60)
def test_streams_are_equal_exactly_where_their_addresses_are(one: tuple, two: tuple) -> None:
    numbers_ = [stream(*address).random(4).tolist() for address in (one, one, two)]
    assert numbers_[0] == numbers_[1]
    assert (numbers_[0] == numbers_[2]) == (one == two)
    assert (key(*one) == key(*two)) == (one == two)


@pytest.mark.parametrize(
    ("one", "two"),
    [((0, "share", 1, 12), (0, "share", 11, 2)), ((1, "2", 3, 0), (12, "", 3, 0)), ((0, "a", 1, 2), (0, "a", 2, 1))],
)
def test_addresses_whose_digits_run_together_stay_apart(one: tuple, two: tuple) -> None:
    numbers_ = [stream(*address).random(4).tolist() for address in (one, two)]
    assert numbers_[0] != numbers_[1]


def global_states() -> tuple[bytes, bytes, Any]:
    """Where the generators stand that anyone may draw from."""
    words = np.random.get_state()[1]  # noqa: NPY002 (it is what must stay untouched)
    return torch.get_rng_state().numpy().tobytes(), words.tobytes(), python_random.getstate()


FEW = ["fedmix", "aggenhance", "mix2fld", "xormixfl", "fed-augmix"]


@pytest.mark.parametrize("method", slow_except(FEW, sorted(presets())))
def test_a_whole_run_leaves_global_generators_untouched(method: str) -> None:
    before = global_states()
    model = {"name": "mlp", "hidden": [8, 6, 5], "dropout": 0.3}
    short = {"server_step": {"steps": 20}} if method == "mix2fld" else {}
    fed = federation(**{"method": {"name": method, **short}, "model": model, "unsafe": True, **needs_of(method)})
    run(fed, 1)
    assert global_states() == before


@pytest.mark.parametrize("model", [DROPOUT, BATCH_NORM])
def test_results_do_not_depend_on_global_seeds(model: dict[str, Any]) -> None:
    results = []
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002 (it is what must not matter)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            results.append(run(federation(model=model, method="fedmix"), 2)[0])

    assert same_state(*results)


def test_the_experiments_seed_decides() -> None:
    first, again, other = (run(federation(seed=seed), 1)[0] for seed in (0, 0, 1))
    assert same_state(first, again)
    assert not same(first.weights, other.weights)


def test_a_lent_generator_is_put_back_even_after_an_error() -> None:
    before = global_states()
    drawn = []

    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), lent_generator(3, "train", 1, 2):
            drawn.append(torch.rand(3).tolist())
            _ = 1 / 0

    assert drawn[0] == drawn[1]
    assert global_states() == before


def test_lent_generators_differ_by_address() -> None:
    drawn = []
    for address in ((0, "train", 1, 2), (0, "train", 1, 3), (0, "train", 2, 2), (1, "train", 1, 2), (0, "model", 1, 2)):
        with lent_generator(*address):
            drawn.append(tuple(torch.rand(3).tolist()))
    assert len(set(drawn)) == 5


def copies(of: int) -> Dataset:
    """``of`` different samples over and over, 16 in all."""
    few = images(of)
    rows = torch.arange(16) % of
    return Dataset("copies", "image", Samples(few.train.x[rows], few.train.y[rows]), few.test, few.classes)


@pytest.mark.parametrize(
    ("of", "changes"),
    [(8, {}), (4, {"model": DROPOUT}), (4, {"method": {"name": "naivemix", "objective": {"lambda": 0.5}}})],
    ids=["order of batches", "dropout's masks", "entries"],
)
def test_each_client_and_round_has_random_numbers_of_its_own(of: int, changes: dict[str, Any]) -> None:
    # Two clients hold the same samples. Batches of one sample's copies are alike in any order, so that
    # each case leaves only its own randomness; the learning rate is the same in all rounds.
    size = 4 if of == 8 else 8
    groups = [range(8), range(8, 16)] if of == 8 else [range(0, 16, 4), range(0, 16, 4)]
    made = setup(copies(of), groups=groups, train={"batch_size": size, "epochs": 4}, **changes)
    rng = torch.Generator().manual_seed(0)
    entries = {"x": torch.randn(50, 1, 4, 4, generator=rng), "y": torch.rand(50, 3, generator=rng)}
    engine, weights, pool = engine_of(made), made.weights(), Pool(entries, np.full(50, 9))

    uploads = [
        next(engine.train(TrainTask(round, weights, pool, made.sizes(0)), [client])).weights
        for client, round in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]

    assert made.experiment.train.lr_decay == 1
    assert same(uploads[0], uploads[1])
    assert not any(same(uploads[a], uploads[b]) for a, b in ((0, 2), (0, 3), (2, 3)))
