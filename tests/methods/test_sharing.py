"""What clients share beside means, pools, synthetic samples, and shared data through the federation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    each,
    engine_of,
    experiment,
    federation,
    images,
    local,
    numbers,
    run,
    same,
    same_up_to_rounding,
    setup,
    without_machine,
)
from sharing_helpers import DATA, MADE, entries, mean, share
from torch import nn
from torch.func import functional_call

from fedblend.core.context import Task
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.engine import ClientUpdate, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.random import lent_generator, stream
from fedblend.core.setup import Portions, arrived
from fedblend.core.sharing import ClientData, Payload, Pool, Request, Shares, gather, rows_of
from fedblend.data.scale import Scaler
from fedblend.methods.sharing import Raw
from fedblend.methods.sharing.means import LocalMeans, Noise, SharedMeans
from fedblend.methods.sharing.seeds import MixedSeeds, RawSeeds
from fedblend.methods.sharing.synthetic import MatchedSamples
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.models.layers import Staged


def test_local_means_are_seen_by_their_own_client_only() -> None:
    pool = Pool(entries(5).tensors, np.array([0, 1, 1, 3, 4]))
    views = {k: LocalMeans().view(pool, k) for k in range(5)}
    assert [len(view) for view in views.values()] == [1, 2, 0, 1, 1]
    assert torch.equal(views[1].tensors["x"], pool.tensors["x"][1:3])
    assert torch.equal(views[3].tensors["y"], pool.tensors["y"][3:4])


def test_means_are_seen_by_everyone() -> None:
    pool = entries(5)
    assert all(SharedMeans().view(pool, client) is pool for client in range(5))


@pytest.mark.parametrize("method", ["local-means", "noise-mix"])
def test_controls_send_nothing_but_weights(method: str) -> None:
    fed = federation(method=method)
    _, records = run(fed, 2)
    assert all(set(record["bytes_up"]) == set(record["bytes_down"]) == {"weights"} for record in records)
    assert records[0]["shared"]["sent"] == 4


def test_noise_entries_are_gaussian_with_uniform_targets() -> None:
    data = images(8, side=40)

    payload = share(Noise(sigma=0.5), data)

    assert payload["x"].shape == (1, 1, 40, 40)
    assert payload["x"].std().item() == pytest.approx(0.5, rel=0.05)
    assert payload["x"].mean().item() == pytest.approx(0, abs=0.04)
    assert torch.equal(payload["y"], torch.full((1, 3), 1 / 3))
    assert torch.equal(share(Noise(), numbers(8))["y"], torch.zeros(1, 2))


HIDDEN = {"name": "fedmix-hidden", "sharing": {"layer": 1}, "objective": {"layer": 1}}


def test_hidden_means_are_means_of_the_global_models_hidden_states_without_dropout() -> None:
    model = {"name": "mlp", "hidden": [6], "dropout": 0.5}
    made = setup(groups=[range(9), range(9, 23)], method=HIDDEN, model=model)
    weights = {n: t + 0.1 for n, t in made.weights().items()}

    payloads = dict(engine_of(made).share(0, weights, [0, 1], made.sizes(0)))

    made.model.eval().load_state_dict(weights)
    for client, payload in payloads.items():
        x, y = made.samples(client, 99)
        torch.testing.assert_close(payload["x"][0], made.model(made.scale(x), 0, 1).mean(0).detach())
        assert torch.equal(payload["y"][0], mean(made.task.encode(y)))


def test_hidden_means_are_sent_again_every_round() -> None:
    state, records = run(federation(method=HIDDEN), 2)

    assert [record["shared"]["sent"] for record in records] == [4, 4]
    assert state.shared_round == 1


def test_raw_shares_samples_as_stored() -> None:
    payload = Raw().share(local(DATA.train.x, DATA.train.y, MADE.task, MADE.scale))
    assert payload["x"] is DATA.train.x
    assert payload["y"] is DATA.train.y


def test_gather_stacks_in_order_of_client_and_remembers_owners() -> None:
    two, one = (rows_of(entries(3), np.array(rows)).tensors for rows in ([0, 2], [1]))
    pool = gather({7: two, 3: one})
    assert pool.owner.tolist() == [3, 7, 7]
    assert torch.equal(pool.tensors["x"], entries(3).tensors["x"][[1, 0, 2]])


MEANS_BYTES = (16 + 3) * 4
"""One entry: an image of 4 x 4 and three classes, float32."""


def test_means_travel_once_to_the_server_and_once_to_each_client() -> None:
    fed = federation(images(40), partition={"name": "iid", "clients": 5}, method="fedmix")

    state, records = run(fed, 6)

    assert [record["bytes_up"].get("means", 0) for record in records] == [5 * MEANS_BYTES, 0, 0, 0, 0, 0]
    seen: set[int] = set()
    for record in records:
        fresh = set(record["cohort"]) - seen
        seen |= fresh
        assert record["bytes_down"].get("means", 0) == len(fresh) * 5 * MEANS_BYTES
    assert np.flatnonzero(state.has_pool).tolist() == sorted(seen)
    assert any("means" not in record["bytes_down"] for record in records)


ARRIVAL = {"first": 0.25, "clients": 0.4, "portion": 0.25}


def arriving(refresh: float | None) -> RoundLoop:
    sharing = {} if refresh is None else {"refresh": refresh}
    changes: dict[str, Any] = {
        "partition": {"name": "iid", "clients": 5},
        "arrival": ARRIVAL,
        "method": {"name": "fedmix", "sharing": sharing},
        "rounds": 8,
        "policy": {"min_mean": 1},
        "unsafe": True,
    }
    return federation(images(60), **changes)


@pytest.mark.parametrize("refresh", [None, 0.0, 0.5, 0.8, 1.0])
def test_means_are_renewed_once_enough_clients_have_new_data(refresh: float | None) -> None:
    fed = arriving(refresh)

    _, records = run(fed, 8)

    last = np.zeros(5, np.int64)
    has_pool: set[int] = set()
    renewals = 0
    for round, record in enumerate(records):
        sizes = fed.setup.sizes(round)
        new = int((sizes != last).sum())
        due = round == 0 or (refresh is not None and new >= max(1, refresh * 5))
        assert ("shared" in record) == due
        assert record["bytes_up"].get("means", 0) == (new * MEANS_BYTES if due else 0)
        if due:
            assert record["shared"] == {"asked": new, "sent": new, "entries": 5}
            last, has_pool, renewals = sizes, set(), renewals + 1
        fresh = set(record["cohort"]) - has_pool
        has_pool |= fresh
        assert record["bytes_down"].get("means", 0) == len(fresh) * 5 * MEANS_BYTES
    assert (renewals == 1) if refresh is None else (1 < renewals < 8)


def test_a_client_whose_renewal_is_lost_keeps_its_means_at_the_server() -> None:
    fed = arriving(0.0)
    state, _ = run(fed, 1)
    new = {name: -tensor[:1] for name, tensor in state.entries.tensors.items()}
    due, sizes = np.array([True, False, True, False, False]), state.shared_sizes + 3

    after = fed.exchange._store_shares(state, Shares(np.array([0, 2]), np.ones(2, bool), {0: new}, [2], []), due, sizes)

    assert after.entries.owner.tolist() == [0, 1, 2, 3, 4]
    for name, tensor in state.entries.tensors.items():
        assert torch.equal(after.entries.tensors[name], torch.cat([new[name], tensor[1:]]))
    # Client 2 has data that it has not shared, still.
    assert (after.shared_sizes == np.where([True, *[False] * 4], sizes, state.shared_sizes)).all()


def test_a_renewal_replaces_the_means_of_changed_clients_only() -> None:
    fed = arriving(0.0)
    before, _ = run(fed, 1)

    after, _ = run(fed, 1, before)

    sizes = [fed.setup.sizes(round) for round in (0, 1)]
    changed = np.flatnonzero(sizes[0] != sizes[1])
    assert 0 < len(changed) < 5
    assert after.entries.owner.tolist() == [0, 1, 2, 3, 4]
    for client in range(5):
        x, y = fed.setup.samples(client, int(sizes[1][client]))
        assert torch.equal(after.entries.tensors["x"][client], mean(fed.setup.scale(x)))
        assert torch.equal(after.entries.tensors["y"][client], mean(fed.setup.task.encode(y)))
        kept = torch.equal(after.entries.tensors["x"][client], before.entries.tensors["x"][client])
        assert kept == (client not in changed)


def test_clients_train_on_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = arriving(None)
    train, used = fed.engine.train, []

    def recording(task: TrainTask, clients: list[int]) -> Iterator[ClientUpdate]:
        for trained in train(task, clients):
            used.append((task.round, trained.client, trained.samples))
            yield trained

    monkeypatch.setattr(fed.engine, "train", recording)

    run(fed, 8)

    assert len(used) == 8 * 2
    assert all(samples == fed.setup.sizes(round)[client] for round, client, samples in used)
    assert len({samples for _, _, samples in used}) > 2


def test_clients_receive_samples_of_all_of_their_classes_from_the_start() -> None:
    partition = {"name": "classes", "clients": 5, "classes_per_client": 2}
    made = setup(images(400), partition=partition, arrival={"first": 0.5})
    whole = setup(images(400), partition=partition)

    for client in range(5):
        half, all_of_it = (made.label_counts(client, int(sizes[client])) for sizes in (made.sizes(0), whole.sizes(0)))
        assert all((0 < half[label] < all_of_it[label]) for label in np.flatnonzero(all_of_it))
        rows = (sorted(one.population.indices(client).tolist()) for one in (made, whole))
        assert len({tuple(one) for one in rows}) == 1


def test_arrival_by_hand() -> None:
    full = np.array([10, 10, 1, 0, 7])
    arrival = experiment(arrival={"first": 0.1, "clients": 0.5, "portion": 0.1}).arrival

    for round in range(5):
        times = sum((stream(3, "arrival", past).random(5) < 0.5).astype(int) for past in range(1, round + 1))
        tenths = np.minimum(10, 1 + times + np.zeros(5, int))
        expected = np.where(full > 0, np.maximum(1, -(-full * tenths // 10)), 0)
        assert arrived(full, arrival, Portions(5, 0.5, 3).before(round)).tolist() == expected.tolist()


def test_arrival_ends_with_all_samples() -> None:
    full = np.array([13, 1, 40])
    arrival = experiment(arrival={"first": 0.0, "clients": 1.0, "portion": 0.3}).arrival
    portions = Portions(3, 1.0, 0)
    sizes = [arrived(full, arrival, portions.before(round)).tolist() for round in range(6)]
    assert sizes == [[1, 1, 1], [4, 1, 12], [8, 1, 24], [12, 1, 36], [13, 1, 40], [13, 1, 40]]


@each("method", ["fedmix", "local-means"])
@each(
    ("sharing", "minimum", "told"),
    [
        ({"threshold": 11}, 2, "threshold: 11 samples, but the largest client holds 10 .* valid: 1 to 10"),
        ({"threshold": 10}, 10, None),
        ({}, 11, "policy.min_mean: 11 samples, but no mean can be of more than 10 .* valid: 2 to 10"),
        ({"samples_per_mean": 4}, 4, None),
        ({"samples_per_mean": 4}, 5, "no mean can be of more than 4 .*samples_per_mean is 4.* valid: 2 to 4"),
    ],
)
def test_what_nobody_could_share_is_told_before_the_first_round(
    method: str, sharing: dict[str, int], minimum: int, told: str | None
) -> None:
    changes = {"method": {"name": method, "sharing": sharing}, "policy": {"min_mean": minimum}}
    if told is None:
        run(federation(**changes), 1)
    else:
        with pytest.raises(FedblendError, match=told):
            federation(**changes)


def test_the_largest_mean_is_of_what_clients_hold_at_the_start() -> None:
    half = {"first": 0.5, "clients": 1.0, "portion": 0.5}
    federation(method="fedmix", arrival=half, policy={"min_mean": 5})
    with pytest.raises(FedblendError, match="holds 5 at the start"):
        federation(method="fedmix", arrival=half, policy={"min_mean": 6})
    # Sharings that make no means, and methods that use none, have no such policy.
    federation(method="noise-mix", policy={"min_mean": 100})
    federation(method="fedavg", policy={"min_mean": 100})
    with pytest.raises(FedblendError, match="100 samples, but no mean"):
        federation(method="fedmix", policy={"min_mean": 100}, unsafe=True)
    one = {"name": "fedmix", "sharing": {"samples_per_mean": 1}}
    with pytest.raises(FedblendError, match="state 1, with unsafe = true"):
        federation(method=one, unsafe=True)
    federation(method=one, policy={"min_mean": 1}, unsafe=True)


def test_a_client_without_means_of_its_own_trains_plainly() -> None:
    groups = [range(9), range(9, 18), range(18, 19)]
    mixed = federation(groups=groups, method="local-means", train={"cohort": 3})
    plain = federation(groups=groups, method="fedavg", train={"cohort": 3})

    def lone(fed: Any) -> dict[str, torch.Tensor]:
        state = run(fed, 1)[0]
        task = TrainTask(1, plain.setup.weights(), state.entries, fed.setup.sizes(0))
        return next(fed.engine.train(task, [2])).weights

    assert same(lone(mixed), lone(plain))


def test_payloads_that_cannot_be_used_are_refused_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(method="fedmix")
    honest, factors = fed.engine.share, {1: 1e6, 2: torch.inf}

    def damaged(*given_: Any) -> Iterator[tuple[int, Payload]]:
        for client, payload in honest(*given_):
            yield client, {**payload, "x": payload["x"] * factors.get(client, 1)}

    monkeypatch.setattr(fed.engine, "share", damaged)

    state, records = run(fed, 1)

    assert state.entries.owner.tolist() == [0, 3]
    beyond, infinite = records[0]["shared"]["refused"]
    assert infinite == {"client": 2, "reason": "'x' holds NaN or infinity"}
    assert beyond["client"] == 1
    assert "beyond the bounds" in beyond["reason"]
    assert records[0]["shared"]["sent"] == 2


def test_a_round_is_a_function_of_its_state_alone() -> None:
    used, fresh = federation(method=HIDDEN), federation(method=HIDDEN)
    start = used.start()[0]
    other = replace(start, weights={n: t + 0.3 for n, t in start.weights.items()})
    run(used, 1, start)

    after_another, records = run(used, 1, other)
    alone, expected = run(fresh, 1, other)

    assert same(after_another.weights, alone.weights)
    assert without_machine(records) == without_machine(expected)


REQUEST = Request(np.array([2, 0, 1]), np.array([1]))


@each(
    ("sharing", "most"),
    [
        (SharedMeans(), [0, 0, 2, 7]),
        (SharedMeans(samples_per_mean=3), [0, 0, 2, 7]),
        (SharedMeans(samples_per_mean=3, split="class"), [0, 0, 2, 7]),
        (Noise(), [0, 1, 1, 1]),
        (Raw(), [0, 1, 7, 23]),
        (RawSeeds(samples=4), [0, 1, 4, 4]),
        (MixedSeeds(samples=6), [0, 0, 6, 6]),
        (XorSeeds(), [3, 3, 3, 3]),
        (MixedTargetSeeds(), [3, 3, 3, 3]),
    ],
)
def test_the_most_entries_of_a_clients_samples(sharing: Any, most: list[int]) -> None:
    for n, bound in zip((0, 1, 7, 23), most, strict=True):
        assert sharing.most_entries(n, 3, REQUEST) == bound
        x, y = DATA.train.x[:n], DATA.train.y[:n]
        payload = sharing.share(replace(local(x, y, MADE.task, MADE.scale, minimum=3), request=REQUEST))
        assert len(next(iter(payload.values())) if payload else []) <= bound
    assert XorSeeds().most_entries(23, 3) == 0


GROUPS = [list(range(0, 12)), list(range(12, 20)), list(range(20, 40))]
QUICK = {"steps": 4, "per_class": 2, "batch_size": 3}


def world(method: str = "feddm", sharing: dict[str, Any] | None = None, **changes: Any) -> Any:
    given = {"name": method, "sharing": {**QUICK, **(sharing or {})}}
    return setup(**{"groups": GROUPS, "method": given, "train": {"cohort": 2}, **changes})


def unit_scale() -> Scaler:
    """A scale on which inputs are in [-1, 1], and stored values in [0, 1]."""
    one = torch.ones(1, 1, 1)
    return Scaler("symmetric", False, 2 * one, -one, one, 0 * one)


def client(x: torch.Tensor, y: list[int], model: nn.Module, minimum: int = 1) -> ClientData:
    given = local(x, torch.tensor(y), Task("classification", 3), unit_scale(), minimum=minimum)
    return replace(given, model=model.eval())


def embed(model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and outputs by the layers of a staged model."""
    return functional_call(model, weights, (x, 0, -1)), functional_call(model, weights, (x,))


def independent(made: Any, client: int, sharing: MatchedSamples, round: int = 0) -> torch.Tensor:
    """The same samples, class after class, with PyTorch's SGD and weights moved or renewed one tensor at a time."""
    rng = stream(made.experiment.seed, "share", round, client)
    x, y = made.samples(client, int(made.sizes(0)[client]))
    x = made.scale(x)
    classes = [c for c in range(3) if (y == c).sum() >= made.experiment.policy.min_mean]
    shape = (len(classes) * sharing.per_class, *x.shape[1:])
    synthetic = torch.from_numpy(rng.standard_normal(shape, np.float32)).requires_grad_()
    optimizer = torch.optim.SGD([synthetic], lr=sharing.lr, momentum=sharing.momentum)
    model = copy.deepcopy(made.model).eval()
    for step in range(sharing.steps):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        if sharing.networks == "global":
            noise = rng.standard_normal(sum(p.numel() for p in weights.values()), np.float32)
            noise, used = noise * (sharing.radius / np.linalg.norm(noise)), 0
            for p in weights.values():
                p += torch.from_numpy(noise[used : used + p.numel()]).view(p.shape)
                used += p.numel()
        else:
            with lent_generator(int(rng.integers(2**31)), "network", step):
                fresh = [nn.Linear(16, 6), nn.Linear(6, 3)]
            weights = dict(zip(weights, [p.detach() for layer in fresh for p in layer.parameters()], strict=True))
        keys = rng.random(len(y))
        with torch.no_grad():
            synthetic.copy_(made.scale.from_unit(made.scale.to_unit(synthetic)))
        loss = torch.zeros(())
        for i, label in enumerate(classes):
            rows = np.flatnonzero(y.numpy() == label)
            rows = rows[np.argsort(keys[rows])][: sharing.batch_size]
            real = embed(model, weights, x[torch.from_numpy(rows)])
            own = embed(model, weights, synthetic[i * sharing.per_class : (i + 1) * sharing.per_class])
            loss = loss + sum((a.mean(0) - b.mean(0)).square().sum() for a, b in zip(own, real, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.scale.from_unit(made.scale.to_unit(synthetic.detach()))


@pytest.mark.parametrize("method", ["feddm", "server-matched"])
def test_entries_are_those_of_an_independent_implementation(method: str) -> None:
    made = world(method, {"radius": 0.3, "lr": 0.5})

    state, _ = run(made, 1)

    entries, sharing = state.entries, made.experiment.method.sharing
    assert sharing.networks == ("global" if method == "feddm" else "random")
    for k in range(3):
        wanted = independent(made, k, sharing)
        same_up_to_rounding({"x": entries.tensors["x"][entries.owner == k]}, {"x": wanted}, steps=1000)


def test_a_class_of_too_few_samples_has_none() -> None:
    model, sharing = Staged(nn.Flatten(), nn.Linear(4, 3)), MatchedSamples(per_class=2, steps=1)
    x = torch.rand(5, 1, 2, 2)
    assert sharing.share(client(x, [0, 0, 1, 1, 1], model, minimum=3))["y"].argmax(1).tolist() == [1, 1]
    assert sharing.share(client(x, [0, 0, 1, 1, 1], model, minimum=4)) is None


def test_the_clients_model_is_not_changed() -> None:
    model = Staged(nn.Flatten(), nn.Linear(4, 3))
    before = copy.deepcopy(model.state_dict())
    for networks in ("global", "random"):
        MatchedSamples(per_class=1, steps=2, networks=networks).share(client(torch.rand(4, 1, 2, 2), [0] * 4, model))
    assert same(model.state_dict(), before)


def test_feddm_sends_samples_in_each_round_and_no_models() -> None:
    made = world("feddm")

    first, _ = run(made, 1)
    state, records = run(made, 2)

    model = 4 * sum(tensor.numel() for tensor in state.weights.values())
    size = 3 * 3 * 2 * 4 * (16 + 3)  # clients, classes, samples of each; inputs and targets
    assert [record["bytes_up"] for record in records] == [{"synthetic": size}] * 2
    assert [record["bytes_down"] for record in records] == [{"weights": 3 * model}] * 2
    assert not torch.equal(state.entries.tensors["x"], first.entries.tensors["x"])
    same_up_to_rounding(
        {"x": state.entries.tensors["x"][state.entries.owner == 1]},
        {
            "x": independent(
                replace(made, model=with_weights(made.model, first.weights)), 1, made.experiment.method.sharing, 1
            )
        },
        steps=1000,
    )


def with_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(weights)
    return other


def features() -> Dataset:
    """A table with classes."""
    made = numbers(40)
    halves = (Samples(half.x, (half.y[:, 0] > 0).long()) for half in (made.train, made.test))
    return Dataset("table", "features", *halves, ("no", "yes"))


def test_tables_with_classes_can_be_matched() -> None:
    made = world("feddm", data=features())
    state, _ = run(made, 1)
    assert state.entries.tensors["x"].shape[1:] == (5,)


def test_text_is_refused() -> None:
    given = local(
        torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), Task("classification", 3), lambda x: x
    )
    with pytest.raises(FedblendError, match=r"'matched-samples' needs images or features, but these data are text"):
        MatchedSamples().share(given)


GOOD = {"x": torch.zeros(4, 1, 4, 4), "y": torch.eye(3)[[0, 0, 2, 2]]}


@each(
    ("name", "value", "told"),
    [
        ("x", torch.zeros(4, 1, 4, 5), "of the shapes"),
        ("x", torch.zeros(4, 1, 4, 4).double(), "torch.float64"),
        ("x", torch.zeros(3, 1, 4, 4), "of the shapes"),
        ("y", torch.eye(4)[[0, 0, 2, 2]], "of the shapes"),
        ("y", torch.full((4, 3), 1 / 3), "no single class"),
        ("y", torch.tensor([[1.0, 1.0, 0.0]] * 4), "no single class"),
        ("y", torch.tensor([[2.0, -1.0, 0.0]] * 4), "no single class"),
        ("y", torch.eye(3)[[0, 0, 0, 2]], "3 samples of a class; valid: 2"),
        ("z", torch.zeros(4), "of the shapes"),
    ],
)
def test_samples_that_no_client_can_have_are_refused(name: str, value: torch.Tensor, told: str) -> None:
    loop, sharing = RoundLoop(made := world(), engine_of(made)), MatchedSamples(per_class=2)
    assert sharing.fault(GOOD, 20, loop.spec) is None
    assert told in str(sharing.fault({**GOOD, name: value}, 20, loop.spec))
