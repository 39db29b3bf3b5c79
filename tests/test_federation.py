"""What holds for every run: order, weights, streams, uploads, bytes, resumption."""

from __future__ import annotations

import contextlib
import copy
import random as python_random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import (
    BatchNormNet,
    engine_of,
    examples,
    experiment,
    federation,
    federation_of,
    images,
    numbers,
    run,
    same,
    same_state,
    without_machine,
    world,
)
from hypothesis import given
from hypothesis import strategies as st

from fedblend import engines
from fedblend.account import Account
from fedblend.aggregators import Aggregator, WeightedMean
from fedblend.channels import Channel, Ideal
from fedblend.config import Train
from fedblend.data.dataset import Dataset, Samples
from fedblend.engines import LoopEngine, Scores, Trained, TrainTask
from fedblend.engines.loop import batches
from fedblend.engines.sgd import SGD
from fedblend.errors import FedblendError
from fedblend.evaluation import evaluate, over_clients
from fedblend.federation import Federation, State
from fedblend.methods import presets
from fedblend.objectives import Task
from fedblend.protection import NoProtection, Protection
from fedblend.random import key, lent_generator, stream
from fedblend.runs import checkpoint
from fedblend.server_steps import NoStep, Server, ServerStep
from fedblend.sharing import Pool
from fedblend.uploads import bytes_of, fault_of
from fedblend.world import World

BATCH_NORM = {"name": "module", "path": "helpers:BatchNormNet"}
DROPOUT = {"name": "mlp", "hidden": [12], "dropout": 0.5}


def train(made: World, clients: Iterable[int], round: int = 0) -> dict[int, Trained]:
    """Local training of some clients from a world's first weights, with what their sharing gives them."""
    fed = federation_of(made)
    start, sizes = fed.start()[0], made.sizes(0)
    state = fed._share_if_due(start, sizes, Account())[0]
    task = TrainTask(round, start.weights, fed._pool_of(state), sizes)
    return {trained.client: trained for trained in fed.engine.train(task, clients)}


def with_calls(engine: LoopEngine, **changed: Callable[..., Any]) -> LoopEngine:
    """Another engine like this one, with some of its calls changed."""
    made = copy.copy(engine)
    made.__dict__.update(changed)
    return made


def damaging(made: World, damage: Callable[[Trained], Trained]) -> Federation:
    """A federation whose clients' uploads are changed by ``damage`` on the way."""
    engine = engine_of(made)

    def train_(task: TrainTask, clients: Iterable[int]) -> Iterator[Trained]:
        for trained in engine.train(task, clients):
            yield damage(trained)

    return Federation(made, with_calls(engine, train=train_))


# Order of clients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedmix", "localmix", "fedprox+naivemix"])
@pytest.mark.parametrize("order", [[3, 1, 0, 2], [2], [0, 3]])
def test_a_clients_upload_depends_on_no_other_client(method: str, order: list[int]) -> None:
    made = world(method=method, model=DROPOUT)

    in_order, permuted = train(made, range(4)), train(made, order)

    assert list(permuted) == order
    for client in order:
        assert same(permuted[client].weights, in_order[client].weights)
        assert permuted[client].loss == in_order[client].loss


@pytest.mark.parametrize("model", [DROPOUT, BATCH_NORM])
def test_the_order_in_which_an_engine_works_changes_nothing(model: dict[str, Any]) -> None:
    made = world(model=model, method="naivemix", train={"cohort": 3})
    engine = engine_of(made)

    def backwards(task: TrainTask, clients: list[int]) -> Iterator[Trained]:
        done = {t.client: t for t in engine.train(task, reversed(clients))}
        return iter([done[client] for client in clients])

    straight, records = run(Federation(made, engine), 3)
    turned, turned_records = run(Federation(made, with_calls(engine, train=backwards)), 3)

    assert same_state(straight, turned)
    assert without_machine(records) == without_machine(turned_records)


def uploads_of(values: list[list[float]], dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor(v, dtype=dtype)} for v in values]


FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.tuples(st.lists(FLOATS, min_size=n, max_size=n), st.integers(1, 500)), min_size=1, max_size=7)
)


@given(rows=ROWS, data=st.data())
@examples(60)
def test_the_mean_does_not_depend_on_the_order_of_uploads(rows: list[tuple[list[float], int]], data: Any) -> None:
    pairs = list(zip(uploads_of([v for v, _ in rows]), [w for _, w in rows], strict=True))
    permuted = data.draw(st.permutations(pairs))

    one, two = WeightedMean().aggregate(pairs), WeightedMean().aggregate(permuted)

    torch.testing.assert_close(one["w"], two["w"], rtol=1e-6, atol=1e-6)


# Aggregation -----------------------------------------------------------------------------------------------


@given(rows=ROWS)
@examples(60)
def test_the_mean_lies_in_the_convex_hull(rows: list[tuple[list[float], int]]) -> None:
    uploads = uploads_of([v for v, _ in rows])

    mean = WeightedMean().aggregate(zip(uploads, [float(w) for _, w in rows], strict=True))["w"]

    stacked = torch.stack([u["w"] for u in uploads])
    assert bool((mean >= stacked.amin(0)).all())
    assert bool((mean <= stacked.amax(0)).all())


@given(rows=ROWS)
@examples(60)
def test_the_mean_is_weighted_by_samples(rows: list[tuple[list[float], int]]) -> None:
    pairs = zip(uploads_of([v for v, _ in rows]), [w for _, w in rows], strict=True)

    mean = WeightedMean().aggregate(pairs)["w"]

    expected = np.average([v for v, _ in rows], axis=0, weights=[w for _, w in rows])
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-6)


@given(
    value=st.lists(FLOATS, min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 10_000), min_size=1, max_size=9),
)
@examples(60)
def test_equal_uploads_average_to_themselves_exactly(value: list[float], weights: list[int]) -> None:
    mean = WeightedMean().aggregate(({"w": torch.tensor(value)}, float(w)) for w in weights)

    assert torch.equal(mean["w"], torch.tensor(value))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_client_of_weight_0_changes_nothing(place: int) -> None:
    pairs = list(zip(uploads_of([[0.1, 0.7], [0.3, -5.0]]), [3.0, 4.0], strict=True))
    alone = WeightedMean().aggregate(pairs)

    pairs.insert(place, ({"w": torch.tensor([float("nan"), 1e30])}, 0.0))

    assert same(WeightedMean().aggregate(pairs), alone)


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
        (
            {"a": torch.tensor([1.0]), "b": torch.tensor(4), "c": torch.tensor([1.0], dtype=torch.float64)},
            1.0,
        ),
        (
            {"a": torch.tensor([2.0]), "b": torch.tensor(9), "c": torch.tensor([4.0], dtype=torch.float64)},
            2.0,
        ),
    ]

    mean = WeightedMean().aggregate(pairs)

    assert {n: t.dtype for n, t in mean.items()} == {"a": torch.float32, "b": torch.int64, "c": torch.float64}
    assert mean["a"].item() == pytest.approx(5 / 3, rel=1e-7)
    assert mean["b"].item() == 7  # 22 / 3, rounded
    assert mean["c"].item() == pytest.approx(3, rel=1e-15)


def test_the_mean_leaves_uploads_as_they_were() -> None:
    uploads = uploads_of([[1.0, 2.0], [3.0, 4.0]], torch.float64)
    copies = [u["w"].clone() for u in uploads]

    WeightedMean().aggregate(zip(uploads, [2.0, 1.0], strict=True))

    assert all(torch.equal(u["w"], c) for u, c in zip(uploads, copies, strict=True))


def test_a_round_averages_its_cohort_by_number_of_samples() -> None:
    made = world(groups=[range(4), range(4, 20), range(20, 40)], train={"cohort": 3})

    state, records = run(federation_of(made), 1)

    uploads = train(made, range(3))
    for name, tensor in state.weights.items():
        total = sum(uploads[k].weights[name].double() * n for k, n in enumerate((4, 16, 20)))
        torch.testing.assert_close(tensor, (total / 40).float(), rtol=1e-6, atol=1e-7)
    losses = sum(uploads[k].loss * n for k, n in enumerate((4, 16, 20))) / 40
    assert records[0]["train_loss"] == pytest.approx(losses)


# Streams ---------------------------------------------------------------------------------------------------

ADDRESS = st.tuples(
    st.integers(0, 2**40),
    st.sampled_from(["cohort", "batches", "share"]),
    st.integers(0, 999),
    st.integers(0, 10**6),
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


@pytest.mark.parametrize("field", range(4))
def test_each_coordinate_gives_other_numbers(field: int) -> None:
    address: list[Any] = [5, "cohort", 3, 7]
    other = list(address)
    other[field] = "share" if field == 1 else address[field] + 1

    first, second = stream(*address).random(1000), stream(*other).random(1000)

    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


def global_states() -> tuple[bytes, bytes, Any]:
    """Where the generators stand that anyone may draw from."""
    words = np.random.get_state()[1]  # noqa: NPY002 (it is what must stay untouched)
    return torch.get_rng_state().numpy().tobytes(), words.tobytes(), python_random.getstate()


@pytest.mark.parametrize("method", sorted(presets()))
def test_a_whole_run_leaves_global_generators_untouched(method: str) -> None:
    before = global_states()

    fed = federation(method=method, model={"name": "mlp", "hidden": [8, 6, 5], "dropout": 0.3}, unsafe=True)
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
    for address in (
        (0, "train", 1, 2),
        (0, "train", 1, 3),
        (0, "train", 2, 2),
        (1, "train", 1, 2),
        (0, "model", 1, 2),
    ):
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
    made = world(copies(of), groups=groups, train={"batch_size": size, "epochs": 4}, **changes)
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


# Uploads ---------------------------------------------------------------------------------------------------


LIKE = {"w": torch.zeros(2, 3), "n": torch.tensor(4)}


@pytest.mark.parametrize(
    ("upload", "told"),
    [
        ({"w": torch.zeros(2, 3)}, "missing ['n'], unknown none"),
        ({**LIKE, "extra": torch.zeros(1)}, "missing none, unknown ['extra']"),
        ({**LIKE, "w": torch.zeros(3, 2)}, "'w' is of shape [3, 2], the model's of [2, 3]"),
        (
            {**LIKE, "w": torch.zeros(2, 3).double()},
            "'w' is of type torch.float64, the model's of torch.float32",
        ),
        ({**LIKE, "n": torch.tensor(4.0)}, "'n' is of type torch.float32"),
        ({**LIKE, "w": torch.full((2, 3), torch.nan)}, "'w' holds NaN or infinity"),
        ({**LIKE, "w": torch.tensor([[0, 0, 0], [0, 0, -torch.inf]])}, "'w' holds NaN or infinity"),
    ],
)
def test_uploads_that_are_not_the_models_are_refused(upload: dict[str, torch.Tensor], told: str) -> None:
    assert told in str(fault_of(upload, LIKE))


def test_sound_uploads_pass_whatever_the_order_of_names() -> None:
    assert fault_of(dict(reversed(list(LIKE.items()))), LIKE) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda upload: {n: t * torch.nan for n, t in upload.items()},
        lambda upload: {n: t.double() for n, t in upload.items()},
        lambda upload: dict(list(upload.items())[1:]),
        lambda upload: {n: t[None] for n, t in upload.items()},
    ],
    ids=["NaN", "type", "names", "shape"],
)
def test_refused_uploads_are_recorded_and_left_out(damage: Callable[[dict], dict]) -> None:
    made = world(train={"cohort": 4})
    fed = damaging(made, lambda t: replace(t, weights=damage(t.weights)) if t.client == 1 else t)

    state, records = run(fed, 1)

    good = train(made, [0, 2, 3])
    expected = WeightedMean().aggregate((t.weights, float(t.samples)) for t in good.values())
    assert same(state.weights, expected)
    assert [refused["client"] for refused in records[0]["refused"]] == [1]
    assert records[0]["uploads"] == 3
    assert records[0]["cohort"] == [0, 1, 2, 3]
    assert records[0]["train_loss"] == pytest.approx(np.mean([t.loss for t in good.values()]))


@pytest.mark.parametrize(("bad", "enough"), [(0, True), (1, True), (2, False), (4, False)])
def test_too_few_good_uploads_stop_the_run(bad: int, enough: bool) -> None:
    made = world(train={"cohort": 4}, min_uploads=3)
    fed = damaging(made, lambda t: replace(t, weights={}) if t.client < bad else t)

    if enough:
        assert run(fed, 1)[1][0]["uploads"] == 4 - bad
    else:
        with pytest.raises(
            FedblendError, match=rf"round 1: {4 - bad} good uploads of 4, but min_uploads is 3 .clients 0, 1"
        ):
            run(fed, 1)


def test_training_that_diverges_stops_with_a_reason() -> None:
    with pytest.raises(FedblendError, match="NaN or infinity"):
        run(federation(train={"lr": 1e30, "epochs": 3}), 2)


def test_an_exception_in_training_names_client_round_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world()
    engine = engine_of(made)
    monkeypatch.setattr(engine, "_step", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError) as caught:
        next(engine.train(TrainTask(4, made.weights(), None, made.sizes(0)), [2]))

    assert caught.value.__notes__ == ["while training client 2 in round 5, batch 1"]


# Rounds and cohorts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("round", [0, 1, 7])
def test_the_learning_rate_decays_by_the_round(round: int) -> None:
    settings_ = {"cohort": 1, "batch_size": 40, "lr": 0.2, "lr_decay": 0.5}
    made = world(groups=[range(10)], train=settings_)
    before = made.weights()

    upload = train(made, [0], round=round)[0].weights

    made.model.load_state_dict(before)
    x, y = made.samples(0, 10)
    loss = torch.nn.functional.cross_entropy(made.model(made.scale(x)), y)
    gradients = torch.autograd.grad(loss, list(made.model.parameters()))
    for (name, parameter), gradient in zip(made.model.named_parameters(), gradients, strict=True):
        expected = parameter.detach() - 0.2 * 0.5**round * gradient
        torch.testing.assert_close(upload[name], expected, rtol=1e-5, atol=1e-7)


def test_the_federation_counts_rounds_for_the_decay() -> None:
    made = world()
    rounds = []
    engine = engine_of(made)

    def train_(task: TrainTask, clients: Iterable[int]) -> Iterator[Trained]:
        rounds.append(task.round)
        return engine.train(task, clients)

    state, records = run(Federation(made, with_calls(engine, train=train_)), 3)

    assert rounds == [0, 1, 2]
    assert [record["round"] for record in records] == [1, 2, 3]
    assert state.round == 3


def test_every_start_is_the_same() -> None:
    made = world(model=BATCH_NORM)
    fed = Federation(made, LoopEngine(made))
    first, record = fed.start()
    run(fed, 2, first)

    again, repeated = fed.start()
    beside, _ = Federation(made, LoopEngine(made)).start()

    assert same_state(again, first)
    assert same_state(beside, first)
    assert without_machine([repeated]) == without_machine([record])


def test_cohorts_are_drawn_without_replacement_from_clients_that_hold_samples() -> None:
    groups = [[], range(3), [], range(3, 6), range(6, 9), range(9, 12), []]
    fed = federation(groups=groups, train={"cohort": 3})

    cohorts = [fed._cohort(round).tolist() for round in range(400)]

    assert all(len(set(c)) == 3 and c == sorted(c) for c in cohorts)
    often = np.bincount(np.concatenate(cohorts), minlength=7) / 400
    assert often[[0, 2, 6]].tolist() == [0, 0, 0]
    assert np.abs(often[[1, 3, 4, 5]] - 0.75).max() < 0.08


def test_a_cohort_larger_than_the_clients_that_hold_samples_is_refused() -> None:
    with pytest.raises(FedblendError, match=r"train.cohort: 3 clients.*only 2 of 4.*valid: 1 to 2"):
        federation(groups=[[], range(3), range(3, 6), []], train={"cohort": 3})


@pytest.mark.parametrize("method", ["fedavg", "fedmix", "localmix"])
def test_a_client_with_fewer_samples_than_a_batch_trains(method: str) -> None:
    groups = [range(1), range(1, 4), range(4, 40)]
    fed = federation(groups=groups, method=method, train={"cohort": 3, "batch_size": 10})

    _, records = run(fed, 1)

    assert records[0]["uploads"] == 3
    uploads = train(fed.world, range(3))
    assert all(not same(uploads[k].weights, fed.world.weights()) for k in range(3))
    assert [uploads[k].samples for k in range(3)] == [1, 3, 36]


@given(n=st.integers(0, 50), epochs=st.integers(1, 4), size=st.integers(1, 20), seed=st.integers(0, 99))
@examples(60)
def test_every_sample_is_seen_once_an_epoch_and_the_last_batch_is_kept(
    n: int, epochs: int, size: int, seed: int
) -> None:
    order, bounds = batches(n, epochs, size, np.random.default_rng(seed))

    assert [sorted(order[e * n : (e + 1) * n]) for e in range(epochs)] == [list(range(n))] * epochs
    one_epoch = [size] * (n // size) + [n % size] * bool(n % size)
    assert np.diff(bounds).tolist() == one_epoch * epochs
    assert (bounds[0], bounds[-1]) == (0, n * epochs)


def test_each_epoch_is_a_fresh_permutation() -> None:
    order, _ = batches(30, 2, 10, np.random.default_rng(0))

    assert order[:30].tolist() != order[30:].tolist()
    assert order[:30].tolist() != list(range(30))


def test_epochs_are_epochs() -> None:
    made = world(groups=[range(11)], train={"cohort": 1, "epochs": 3, "batch_size": 4})
    engine, steps = engine_of(made), []
    engine.model.register_forward_hook(lambda module, inputs, outputs: steps.append(len(outputs)))

    trained = next(engine.train(TrainTask(0, made.weights(), None, made.sizes(0)), [0]))

    assert steps == [4, 4, 3] * 3
    assert trained.samples == 11


def test_the_training_loss_is_a_mean_over_samples() -> None:
    made = world(groups=[range(5)], train={"cohort": 1, "batch_size": 4, "lr": 1e-9})

    trained = train(made, [0])[0]

    x, y = made.samples(0, 5)
    expected = torch.nn.functional.cross_entropy(made.model(made.scale(x)), y)
    assert trained.loss == pytest.approx(expected.item(), rel=1e-5)


# SGD -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_sgd_is_torchs_sgd(momentum: float, decay: float) -> None:
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 4, generator=rng), torch.randn(5, generator=rng)]
    steps = [[torch.randn(p.shape, generator=rng) for p in start] for _ in range(4)]
    ours, theirs = [p.clone() for p in start], [p.clone() for p in start]
    mine = SGD(ours, Train(lr=0.3, lr_decay=0.9, momentum=momentum, weight_decay=decay), round=2)
    reference = torch.optim.SGD(theirs, lr=0.3 * 0.9**2, momentum=momentum, weight_decay=decay)

    for gradients in steps:
        mine.step([g.clone() for g in gradients])
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        reference.step()

    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_sgd_leaves_parameters_without_gradient_alone() -> None:
    params = [torch.ones(2), torch.ones(2)]
    optimizer = SGD(params, Train(lr=0.5, momentum=0.9, weight_decay=0.1), 0)

    optimizer.step([None, torch.ones(2)])
    optimizer.step([torch.ones(2), torch.ones(2)])

    # The first moves once by its first velocity; the second twice, by velocities v1 and 0.9 v1 + g2.
    v1 = 1 + 0.1
    w1 = 1 - 0.5 * v1
    v2 = 0.9 * v1 + 1 + 0.1 * w1
    torch.testing.assert_close(params[0], torch.full((2,), 1 - 0.5 * v1))
    torch.testing.assert_close(params[1], torch.full((2,), w1 - 0.5 * v2))


@pytest.mark.parametrize(("limit", "factor"), [(2.5, 0.5), (50.0, 1.0)])
def test_clipping_bounds_the_norm_over_all_parameters(limit: float, factor: float) -> None:
    params = [torch.zeros(1), torch.zeros(1)]

    SGD(params, Train(lr=1.0, clip_norm=limit), 0).step([torch.tensor([3.0]), torch.tensor([4.0])])

    torch.testing.assert_close(torch.cat(params), torch.tensor([-3.0 * factor, -4.0 * factor]), rtol=1e-5, atol=0)


def test_momentum_starts_anew_for_each_client_and_round() -> None:
    made = world(train={"momentum": 0.9, "epochs": 2})

    first = train(made, [0, 1])
    again = train(made, [1])

    assert same(first[1].weights, again[1].weights)


# Bytes -----------------------------------------------------------------------------------------------------


def test_bytes_of_lenet_5_and_its_means_by_hand() -> None:
    data = images(40, classes=10, side=28)
    fed = federation(data, model="lenet5", method="fedmix", train={"cohort": 2, "batch_size": 10})

    state, records = run(fed, 1)

    weights, entry = 61_706 * 4, (28 * 28 + 10) * 4
    assert bytes_of(state.weights) == weights
    assert records[0]["bytes_up"] == {"weights": 2 * weights, "means": 4 * entry}
    assert records[0]["bytes_down"] == {"weights": 2 * weights, "means": 2 * 4 * entry}


def test_the_untrained_model_costs_nothing() -> None:
    _, record = federation(method="fedmix").start()

    assert record["round"] == 0
    assert record["bytes_up"] == record["bytes_down"] == {}
    assert 0 <= record["accuracy"] <= 1


def test_bytes_are_those_of_each_type() -> None:
    tensors = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(2, dtype=torch.float64),
        "c": torch.zeros(7, dtype=torch.uint8),
    }

    assert bytes_of(tensors) == 15 * 4 + 2 * 8 + 7


def test_refused_uploads_are_counted_as_they_were_sent() -> None:
    made = world(train={"cohort": 4})
    fed = damaging(
        made,
        lambda t: replace(t, weights={n: w.double() for n, w in t.weights.items()}) if t.client == 0 else t,
    )

    _, records = run(fed, 1)

    assert records[0]["bytes_up"]["weights"] == 5 * bytes_of(made.weights())


# Parts that do nothing, and channels that lose -------------------------------------------------------------


def test_none_and_ideal_are_the_identity() -> None:
    weights, start = {"w": torch.randn(3)}, {"w": torch.zeros(3)}

    protected = NoProtection().protect(weights, start, 0.1, np.random.default_rng(0))
    refined, kept = NoStep().refine(weights, mock.sentinel.server)
    arrives = Ideal().delivers("up", np.array([1, 10**12]), np.random.default_rng(0))

    assert protected["w"] is weights["w"]
    assert refined["w"] is weights["w"]
    assert kept == {}
    assert arrives.tolist() == [True, True]


def with_parts(made: World, **fields: Any) -> Federation:
    """A federation in which some parts of the experiment or its method are stand-ins."""
    of_method = {k: v for k, v in fields.items() if k in ("aggregator", "server_step")}
    method = made.experiment.method.model_copy(update=of_method)
    rest = {k: v for k, v in fields.items() if k not in of_method}
    changed = replace(made, experiment=made.experiment.model_copy(update={"method": method, **rest}))
    return federation_of(changed)


class Loses(Channel):
    """A channel that loses one client's transmissions in one direction."""

    def __init__(self, direction: str, place: int) -> None:
        self.direction, self.place, self.sizes = direction, place, {}

    def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        self.sizes[direction] = sizes.tolist()
        return (np.arange(len(sizes)) != self.place) | (direction != self.direction)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_what_a_channel_loses_is_left_out(direction: str) -> None:
    # What is shared before training would be lost on its way up as well.
    made = world(train={"cohort": 4}, method="fedmix" if direction == "down" else "fedavg")
    channel = Loses(direction, 2)

    state, records = run(with_parts(made, channel=channel), 1)

    good = train(made, [0, 1, 3])
    assert same(state.weights, WeightedMean().aggregate((t.weights, float(t.samples)) for t in good.values()))
    assert records[0]["uploads"] == 3
    assert state.holders.tolist() == [True, True, direction == "up", True]
    weights, means = bytes_of(state.weights), bytes_of(state.entries.tensors)
    assert channel.sizes["down"] == [weights + means] * 4
    assert records[0]["bytes_up"]["weights"] == (4 if direction == "up" else 3) * weights


def test_nothing_arriving_stops_the_run() -> None:
    class Dead(Channel):
        def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            return np.zeros(len(sizes), bool)

    with pytest.raises(FedblendError, match=r"0 good uploads.*none arrived"):
        run(with_parts(world(), channel=Dead()), 1)


def test_protection_aggregator_and_server_step_are_used_in_this_order() -> None:
    class Shift(Protection):
        def protect(self, upload: Any, start: Any, lr: float, rng: Any) -> dict[str, torch.Tensor]:
            drawn.append(rng.random())
            return {n: start[n] + 1 for n in upload}

    class First(Aggregator):
        def aggregate(self, uploads: Any) -> dict[str, torch.Tensor]:
            first, *_ = [tensors for tensors, _ in uploads]
            return {n: t * 2 for n, t in first.items()}

    class Add(ServerStep):
        def refine(self, weights: Any, server: Server) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            return {n: t + 3 for n, t in weights.items()}, {"seen": torch.tensor(server.round)}

    made, drawn = world(), []

    state, records = run(with_parts(made, protection=Shift(), aggregator=First(), server_step=Add()), 1)

    assert same(state.weights, {n: (t + 1) * 2 + 3 for n, t in made.weights().items()})
    assert state.server == {"seen": torch.tensor(0)}
    expected = [stream(0, "protection", 0, client).random() for client in records[0]["cohort"]]
    assert drawn == expected


# Models with buffers or masks ------------------------------------------------------------------------------


def test_batch_norms_buffers_are_averaged() -> None:
    made = world(groups=[range(8), range(8, 20)], model=BATCH_NORM)

    state, _ = run(federation_of(made), 1)

    uploads = train(made, [0, 1])
    for name in ("norm.running_mean", "norm.running_var"):
        expected = (8 * uploads[0].weights[name].double() + 12 * uploads[1].weights[name].double()) / 20
        torch.testing.assert_close(state.weights[name], expected.float())
        assert not torch.equal(state.weights[name], made.weights()[name])
    # Batches of 4: two for the first client, three for the second, (8 * 2 + 12 * 3) / 20 = 2.6.
    counter = state.weights["norm.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.item() == 3


def test_each_client_starts_from_the_rounds_buffers() -> None:
    made = world(model=BATCH_NORM)

    uploads = train(made, range(4))

    assert [uploads[k].weights["norm.num_batches_tracked"].item() for k in range(4)] == [3, 3, 3, 3]
    assert isinstance(made.model, BatchNormNet)


def test_scoring_changes_no_buffer() -> None:
    made = world(model=BATCH_NORM)
    engine, weights = engine_of(made), made.weights()

    first, again = engine.score(weights), engine.score(weights)

    assert same(weights, {n: t.detach() for n, t in made.model.state_dict().items()})
    assert np.array_equal(first.loss, again.loss)


def test_scoring_uses_no_dropout() -> None:
    made = world(model=DROPOUT)

    scores = engine_of(made).score(made.weights())

    outputs = made.model.eval()(made.scale(made.data.test.x))
    expected = torch.nn.functional.cross_entropy(outputs, made.data.test.y, reduction="none")
    np.testing.assert_allclose(scores.loss, expected.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("model", [DROPOUT, BATCH_NORM])
@pytest.mark.parametrize("method", ["fedavg", "fedmix", "localmix"])
def test_a_run_repeats_to_the_last_bit(model: dict[str, Any], method: str) -> None:
    first, again = (run(federation(model=model, method=method), 2) for _ in range(2))

    assert same_state(first[0], again[0])
    assert without_machine(first[1]) == without_machine(again[1])


def test_a_round_leaves_the_state_it_began_with_alone() -> None:
    fed = federation(method="fedmix", model=BATCH_NORM)
    before, _ = run(fed, 1)
    copy = State(
        before.round,
        {n: t.clone() for n, t in before.weights.items()},
        before.holders.copy(),
        before.shared_sizes.copy(),
        replace(before.entries, tensors={n: t.clone() for n, t in before.entries.tensors.items()}),
        before.shared_round,
    )

    run(fed, 2, before)

    assert same_state(before, copy)


# Resumption ------------------------------------------------------------------------------------------------

RESUMED = {
    "fedavg": {},
    "fedmix": {"method": "fedmix"},
    "dropout": {"model": DROPOUT, "method": "naivemix"},
    "batch norm": {"model": BATCH_NORM},
    "local means": {"method": "local-means"},
    "hidden": {"method": "fedprox+fedmix-hidden", "model": {"name": "mlp", "hidden": [8, 6, 5]}},
    "raw": {"method": "global-mixup", "unsafe": True},
    "server average": {"method": {"name": "fedmix", "sharing": {"server_average": 2}}},
    "secure means": {"method": {"name": "fedmix", "sharing": "secure-means"}},
    "arrival": {
        "method": {"name": "fedmix", "sharing": {"refresh": 0.0}},
        "arrival": {"first": 0.3, "clients": 0.6, "portion": 0.2},
    },
}


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(case: str, at: int, tmp_path: Path) -> None:
    whole, records = run(federation(**RESUMED[case]), 4)
    before, _ = run(federation(**RESUMED[case]), at)
    checkpoint.write(tmp_path, before)

    read = checkpoint.read(tmp_path)
    after, later = run(federation(**RESUMED[case]), 4 - at, read)

    assert same_state(read, before)
    assert same_state(after, whole)
    assert without_machine(later) == without_machine(records[at:])


def test_a_folder_without_checkpoint_gives_none(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path) is None


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, run(federation(), 1)[0])
    path = tmp_path / checkpoint.NAME
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(FedblendError, match="damaged"):
        checkpoint.read(tmp_path)


# Evaluation ------------------------------------------------------------------------------------------------


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


def scored(made: World, right: list[int], held: list[int] | None = None) -> SimpleNamespace:
    """An engine whose scores are known."""

    def score(weights: Any, held_: bool = False, **kwargs: Any) -> Scores:
        values = np.array(held if kwargs.get("held", held_) else right, bool)
        return Scores(np.where(values, 0.0, 1.0).astype(np.float32), values)

    return SimpleNamespace(score=score)


def test_accuracy_by_class_by_hand() -> None:
    made = world(images(40, classes=3, test=7))

    result = evaluate(scored(made, [1, 0, 1, 1, 1, 0, 0]), {}, made)

    # Test labels are 0 1 2 0 1 2 0.
    assert result["accuracy"] == pytest.approx(4 / 7)
    assert result["loss"] == pytest.approx(3 / 7)
    assert result["per_class"] == pytest.approx([2 / 3, 1 / 2, 1 / 2])
    assert "clients" not in result


def test_a_class_without_test_samples_has_no_accuracy() -> None:
    made = world(images(40, classes=3, test=2))

    assert evaluate(scored(made, [1, 1]), {}, made)["per_class"] == [1.0, 1.0, None]


def test_samples_held_out_test_their_own_client() -> None:
    made = world(images(20), holdout=0.4)
    # 5 samples a client, of which 2 are held out.
    held = [1, 1, 1, 0, 0, 0, 1, 1]

    result = evaluate(scored(made, [1] * 12, held), {}, made)["clients"]

    assert made.population.sizes.tolist() == [3, 3, 3, 3]
    assert result["tested"] == 4
    assert result["mean"] == pytest.approx((1 + 0.5 + 0 + 1) / 4)


def test_clients_of_the_data_set_are_tested_on_their_own_samples() -> None:
    data = images(40, client=np.arange(40) % 4 * 10, test=8)
    made = world(data, partition="natural")
    # Test samples belong to clients 0 10 20 30 0 10 20 30.
    result = evaluate(scored(made, [1, 1, 0, 0, 1, 0, 0, 1]), {}, made)

    assert result["clients"]["tested"] == 4
    assert result["clients"]["mean"] == pytest.approx((1 + 0.5 + 0 + 0.5) / 4)


def test_scores_are_those_of_the_model_on_the_test_half() -> None:
    made = world(images(40, test=7))

    result = evaluate(engine_of(made), made.weights(), made)

    outputs = made.model(made.scale(made.data.test.x))
    assert result["accuracy"] == pytest.approx((outputs.argmax(1) == made.data.test.y).float().mean().item())
    assert result["loss"] == pytest.approx(Task("classification", 3).loss(outputs, made.data.test.y).item(), rel=1e-5)


def test_held_out_samples_are_not_trained_on_and_are_scored_by_client() -> None:
    made = world(images(20), holdout=0.4)

    scores = engine_of(made).score(made.weights(), held=True)

    used = set(made.population.order.tolist())
    assert scores.samples.tolist() == made.population.held_order.tolist()
    assert used.isdisjoint(scores.samples.tolist())
    x, y = made.data.train.x[scores.samples], made.data.train.y[scores.samples]
    expected = torch.nn.functional.cross_entropy(made.model(made.scale(x)), y, reduction="none")
    np.testing.assert_allclose(scores.loss, expected.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedmix", "naivemix", "localmix"])
def test_regression_trains_and_is_scored_by_squared_error(method: str) -> None:
    made = world(numbers(40), method=method, model={"name": "mlp", "hidden": []}, train={"lr": 0.02, "epochs": 3})

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


def test_training_learns() -> None:
    fed = federation(images(60, seed=3), train={"epochs": 5, "cohort": 4})

    before = fed.start()[1]
    _, records = run(fed, 5)

    assert records[-1]["accuracy"] > max(0.6, before["accuracy"])


def test_a_short_run_takes_the_loop() -> None:
    made = world()
    choice = engines.choose(made, processors=2, rounds=1)

    assert (choice.engine, choice.ranks) == ("loop", 1)
    assert type(engines.make(made, choice)) is LoopEngine
    assert experiment().engine == "auto"
