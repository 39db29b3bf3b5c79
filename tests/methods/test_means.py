"""Means: right, of groups that are allowed; sums of them that hide single ones; training of the aggregate on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from baselines_helpers import GROUPS
from helpers import (
    each,
    engine_of,
    examples,
    federation,
    iid,
    images,
    local,
    numbers,
    run,
    same,
    same_up_to_rounding,
    setup,
)
from hypothesis import given
from hypothesis import strategies as st
from sharing_helpers import DATA, MADE, entries, mean, server_side, share
from torch.func import functional_call
from torch.nn import functional as F

from fedblend.core.context import Context, Task
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.core.setup import model_spec
from fedblend.core.sharing import ClientData, Pool, gather
from fedblend.core.trees import bytes_of
from fedblend.data.scale import Scaler
from fedblend.methods.aggregators.mean import LEVELS
from fedblend.methods.sharing import Raw
from fedblend.methods.sharing import means as means_module
from fedblend.methods.sharing.means import HiddenMeans, LocalMeans, Noise, SecureMeans, SharedMeans

X, Y = MADE.scale(DATA.train.x), MADE.task.encode(DATA.train.y)


def test_means_of_all_is_the_mean() -> None:
    payload = share(SharedMeans())
    assert payload["x"].shape == (1, 1, 4, 4)
    assert torch.equal(payload["x"][0], mean(X))
    assert torch.equal(payload["y"][0], mean(Y))


def test_a_smaller_groups_mean_is_over_its_own_samples() -> None:
    payload = share(SharedMeans(samples_per_mean=22))
    # The second group holds one sample: its mean is that sample, its target one-hot.
    held = (payload["x"][1] == X).flatten(1).all(1)
    assert int(held.sum()) == 1
    assert torch.equal(payload["y"][1], Y[held][0])
    torch.testing.assert_close(payload["x"][0], mean(X[~held]))


@given(n=st.integers(1, 40), size=st.integers(1, 45), seed=st.integers(0, 2**20))
@examples(40)
def test_means_weighted_by_group_size_give_the_total_mean(n: int, size: int, seed: int) -> None:
    data = images(n, seed=seed)
    made = replace(MADE, data=data)

    payload = SharedMeans(samples_per_mean=size).share(local(data.train.x, data.train.y, made.task, made.scale, seed))

    count = torch.tensor([min(size, n - first) for first in range(0, n, size)], dtype=torch.float64)
    assert len(payload["x"]) == len(payload["y"]) == len(count)
    total = torch.einsum("g,gchw->chw", count, payload["x"].double()) / n
    torch.testing.assert_close(total, made.scale(data.train.x).double().mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(payload["y"].double().sum(1), torch.ones(len(count), dtype=torch.float64))


def test_inputs_and_targets_are_of_the_same_groups() -> None:
    # Each image is filled with its own label, so a mean image tells its mean label.
    labels = torch.arange(20) % 3
    x = (labels * 100).to(torch.uint8)[:, None, None, None].expand(20, 1, 4, 4)
    scale = build("scale", {"name": "unit", "invert": False}).fit(images())
    payload = SharedMeans(samples_per_mean=6).share(local(x, labels, MADE.task, scale))
    told = payload["x"][:, 0, 0, 0] * 255 / 100
    torch.testing.assert_close(payload["y"] @ torch.tensor([0.0, 1.0, 2.0]), told)


@each("options", [{"samples_per_mean": 5}, {"noise": 0.3}])
def test_groups_and_noise_are_drawn_from_the_clients_stream(options: dict[str, Any]) -> None:
    first, again, other = (share(SharedMeans(**options), seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not torch.equal(first["x"], other["x"])


def test_group_means_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = share(SharedMeans(samples_per_mean=5))
    for chunk in (1, 7, 22):
        monkeypatch.setattr(means_module, "CHUNK", chunk)
        assert same(share(SharedMeans(samples_per_mean=5)), whole)


def test_numbers_to_predict_are_averaged_as_they_are() -> None:
    data = numbers(9)
    payload = share(SharedMeans(split="class"), data)
    assert torch.equal(payload["y"], mean(data.train.y)[None])


@each(("minimum", "groups"), [(1, 4), (2, 4), (3, 3), (5, 3), (8, 0)])
def test_groups_smaller_than_the_policy_allows_are_not_sent(minimum: int, groups: int) -> None:
    # 23 samples make groups of 7, 7, 7 and 2.
    payload = share(SharedMeans(samples_per_mean=7), minimum=minimum)
    assert (0 if payload is None else len(payload["x"])) == groups
    if groups == 3:
        assert same(payload, {n: t[:3] for n, t in share(SharedMeans(samples_per_mean=7)).items()})


def test_the_engine_applies_the_experiments_policy() -> None:
    groups, method = ([range(5), range(5, 7), range(7, 8)], {"name": "fedmix", "sharing": {"samples_per_mean": 4}})

    def sent(**changes: Any) -> dict[int, int]:
        made = setup(groups=groups, method=method, **changes)
        payloads = engine_of(made).share(0, made.weights(), range(3), made.sizes(0))
        return {client: len(payload["x"]) for client, payload in payloads}

    assert sent() == {0: 1, 1: 1}
    assert sent(policy={"min_mean": 4}) == {0: 1}
    assert sent(unsafe=True) == sent()
    assert sent(unsafe=True, policy={"min_mean": 1}) == {0: 2, 1: 1, 2: 1}


@each(("threshold", "sends"), [(1, True), (23, True), (24, False)])
@each("part", [SharedMeans, LocalMeans, HiddenMeans])
def test_clients_below_the_threshold_send_nothing(part: type, threshold: int, sends: bool) -> None:
    assert (share(part(threshold=threshold)) is not None) == sends


@each("part", [SharedMeans(), LocalMeans(), Noise(), HiddenMeans(), Raw()])
def test_a_client_without_samples_sends_nothing(part: SharedMeans) -> None:
    assert part.share(local(DATA.train.x[:0], DATA.train.y[:0], MADE.task, MADE.scale)) is None


@given(labels=st.lists(st.integers(0, 2), min_size=1, max_size=40), size=st.integers(1, 12), seed=st.integers(0, 999))
@examples(60)
def test_same_class_groups_are_pure_and_complete(labels: list[int], size: int, seed: int) -> None:
    y = torch.tensor(labels)
    x = torch.arange(len(y)).to(torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    sharing = SharedMeans(split="class", samples_per_mean=size)

    payload = sharing.share(local(x, y, MADE.task, MADE.scale, seed))

    supply = np.bincount(labels, minlength=3)
    assert set(payload["y"].unique().tolist()) <= {0.0, 1.0}
    assert payload["y"].sum(0).tolist() == [-(-n // size) for n in supply]
    # Every sample is in exactly one group: the groups' totals are each class's total.
    for c in np.flatnonzero(supply):
        of_class = payload["x"][payload["y"][:, c] == 1].double()
        full = [min(size, supply[c] - first) for first in range(0, supply[c], size)]
        total = torch.einsum("g,gchw->chw", torch.tensor(full, dtype=torch.float64), of_class)
        torch.testing.assert_close(total, MADE.scale(x[y == c]).double().sum(0), rtol=1e-4, atol=1e-4)


def test_noise_has_the_asked_deviation_and_spares_targets() -> None:
    data = images(400, side=16)
    clean, noisy = (share(SharedMeans(samples_per_mean=4, noise=sigma), data) for sigma in (0.0, 0.3))

    drawn = (noisy["x"] - clean["x"]).double()
    assert drawn.std().item() == pytest.approx(0.3, rel=0.02)
    assert drawn.mean().item() == pytest.approx(0, abs=0.01)
    assert (drawn[0] - drawn[1]).abs().max() > 0.1
    assert torch.equal(noisy["y"], clean["y"])


def test_unit_scale_shares_pictures() -> None:
    payload = share(SharedMeans(scale="unit"))
    torch.testing.assert_close(payload["x"][0], DATA.train.x.float().mean(0) / 255, rtol=1e-4, atol=1e-5)
    assert payload["x"].min() >= 0
    assert payload["x"].max() <= 1


@pytest.mark.parametrize(("m", "left"), [(2, 5), (4, 3), (9, 1), (50, 1)])
def test_server_averages_random_groups_of_entries(m: int, left: int) -> None:
    before = entries(9)

    after = SharedMeans(server_average=m).pool(before, np.random.default_rng(0))

    sizes = torch.tensor([min(m, 9 - first) for first in range(0, 9, m)], dtype=torch.float64)
    assert len(after) == len(after.tensors["x"]) == left
    assert after.owner.tolist() == [-1] * left
    for name, tensor in after.tensors.items():
        total = (tensor.double() * sizes.reshape(-1, *[1] * (tensor.dim() - 1))).sum(0) / 9
        torch.testing.assert_close(total, before.tensors[name].double().mean(0), rtol=1e-5, atol=1e-6)
    # x and y of one group stay together: a pair of entries is found in both.
    if m == 2:
        pairs = [(i, j) for i in range(9) for j in range(i)]
        for x, y in zip(after.tensors["x"][:4], after.tensors["y"][:4], strict=True):
            of_x, of_y = (
                [torch.allclose((t[i] + t[j]) / 2, made, atol=1e-6) for i, j in pairs]
                for t, made in ((before.tensors["x"], x), (before.tensors["y"], y))
            )
            assert of_x == of_y
            assert sum(of_x) == 1


def test_server_averages_clients_at_random() -> None:
    after = [SharedMeans(server_average=3).pool(entries(9), np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert same(after[0].tensors, after[1].tensors)
    assert not same(after[0].tensors, after[2].tensors)
    before = entries(5)
    assert SharedMeans().pool(before, np.random.default_rng(0)) is before


@each("options", [{}, {"scale": "unit"}, {"noise": 2.0}, {"multiplier": 3.0}, {"split": "class"}])
@each("scale", ["standard", "unit", "symmetric", "none"])
def test_means_beyond_the_bounds_of_samples_and_noise_are_refused(scale: str, options: dict[str, Any]) -> None:
    made = setup(DATA, scale={"name": scale})
    sharing, spec = SharedMeans(samples_per_mean=1, **options), model_spec(made, made.model)
    payload = sharing.share(local(DATA.train.x, DATA.train.y, made.task, made.scale))

    assert sharing.fault(payload, 23, spec) is None
    largest = 255.0 * (1 + 100 * (options.get("noise", 0) + options.get("multiplier", 0)))
    for name, number in (("x", largest * 10), ("x", -largest * 10), ("y", 1e4), ("y", -1e4)):
        wrong = {**payload, name: payload[name].clone()}
        wrong[name][0, 0] = number
        assert f"it sent means '{name}' with a number beyond the bounds" in str(sharing.fault(wrong, 23, spec))


def test_numbers_without_known_bounds_are_not_refused() -> None:
    data = numbers(30)
    made = setup(data, model={"name": "mlp", "hidden": []})
    payload = {"x": torch.full((1, *data.train.x.shape[1:]), 1e6), "y": torch.full((1, 2), 1e6)}
    assert SharedMeans().fault(payload, 30, model_spec(made, made.model)) is None


def test_targets_beside_means_of_hidden_states_are_within_0_and_1() -> None:
    sharing, spec = HiddenMeans(layer=1), model_spec(MADE, MADE.model)
    for x, y, refused in ((1e6, 0.5, False), (0.0, 2.0, True), (0.0, -1.0, True)):
        payload = {"x": torch.full((1, 8), x), "y": torch.full((1, 3), y)}
        assert (sharing.fault(payload, 23, spec) is not None) == refused


AS_IT_IS = Scaler("own", False, *torch.tensor([[1.0], [0.0], [1.0], [0.0]]))


def holder(x: torch.Tensor, y: list[int], minimum: int = 1) -> ClientData:
    return local(x, torch.tensor(y), Task("classification", 2), AS_IT_IS, minimum=minimum)


def entries_of(sharing: SecureMeans, means: dict[int, list[float]]) -> Pool:
    """Entries of clients whose one sample is this vector, of class 1."""
    return gather({c: sharing.share(holder(torch.tensor([x]), [1])) for c, x in means.items()})


def test_a_mean_leaves_as_whole_numbers_of_a_step() -> None:
    payload = SecureMeans(server_average=4, range=2.0).share(
        holder(torch.tensor([[1.0, -2.0], [0.0, -2.0]]), [0, 1], minimum=2)
    )
    # A client fills an eighth of the range of a sum: 2.0 is LEVELS / 8.
    assert payload["whole-x"].dtype == torch.int32
    assert payload["whole-x"].tolist() == [[round(LEVELS / 8 / 4), -round(LEVELS / 8)]]
    assert payload["whole-y"].tolist() == [[round(LEVELS / 8 / 4)] * 2]
    assert SecureMeans().share(holder(torch.ones(2, 2), [0, 1], minimum=3)) is None


@each(("clients", "sizes"), [(0, []), (2, [2]), (5, [5]), (6, [3, 3]), (11, [3, 4, 4])])
def test_groups_are_dealt_at_random_and_nearly_even(clients: int, sizes: list[int]) -> None:
    group = SecureMeans(server_average=3).groups(np.arange(clients), np.random.default_rng(0))
    assert sorted(np.bincount(group).tolist()) == sizes
    again, other = (SecureMeans().groups(np.arange(30), np.random.default_rng(s)).tolist() for s in (0, 1))
    assert again == SecureMeans().groups(np.arange(30), np.random.default_rng(0)).tolist() != other


def test_a_groups_entry_is_the_mean_of_its_clients_means() -> None:
    sharing, asked = SecureMeans(server_average=3), np.array([2, 3, 5, 7, 11, 13, 17])
    drawn = np.random.default_rng(5).normal(0, 3, (len(asked), 4)).astype(np.float32)
    entries = entries_of(sharing, dict(zip(asked.tolist(), drawn.tolist(), strict=True)))
    pool = sharing.make_pool(entries, server_side(np.random.default_rng(1), asked))
    group = sharing.groups(asked, np.random.default_rng(1))
    expected = np.stack([drawn[group == g].astype(np.float64).mean(0) for g in range(2)])
    # Half a step, and half a place of float32.
    assert np.abs(pool.tensors["x"].numpy() - expected).max() <= 2.3e-8 + np.abs(expected).max() * 2**-24
    assert pool.tensors["y"].tolist() == [[0.0, 1.0]] * 2
    assert pool.owner.tolist() == [-1, -1]
    # Entries one by one, as a trial of an engine reads them.
    alone = sharing.pool(entries, np.random.default_rng(1))
    assert np.abs(alone.tensors["x"].numpy() - drawn).max() <= 1e-6
    assert alone.owner.tolist() == asked.tolist()


def test_a_group_in_which_too_few_share_has_no_entry() -> None:
    sharing, asked = SecureMeans(server_average=4, fewest=2), np.arange(8)
    group = sharing.groups(asked, np.random.default_rng(0))
    first, second = (np.flatnonzero(group == g).tolist() for g in range(2))
    # More than half of four are three.
    there = {c: [float(c)] for c in (*first[:3], *second[:2])}
    pool = sharing.make_pool(entries_of(sharing, there), server_side(np.random.default_rng(0), asked))
    assert pool.tensors["x"].flatten().tolist() == pytest.approx([np.mean(first[:3])], abs=1e-6)
    assert [sharing.threshold(n) for n in (2, 3, 4, 5)] == [2, 2, 3, 3]
    none = sharing.make_pool(gather({}), server_side(np.random.default_rng(0), asked))
    assert len(none) == 0


def test_the_largest_means_of_the_largest_group_do_not_wrap_round() -> None:
    sharing = SecureMeans(server_average=5, range=3.0)
    entries = entries_of(sharing, {c: [3.0, -3.0] for c in range(9)})
    total = entries.tensors["whole-x"].sum(0)
    assert int(total.abs().max()) < 2**31
    pool = sharing.make_pool(entries, server_side(np.random.default_rng(0), np.arange(9)))
    torch.testing.assert_close(pool.tensors["x"], torch.tensor([[3.0, -3.0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [3.1, -3.1, float("nan"), float("inf")])
def test_numbers_beyond_the_range_are_refused(bad: float) -> None:
    with pytest.raises(FedblendError, match=r"method\.sharing\.range: a number of 'x' is beyond 3, or not fin"):
        SecureMeans(range=3.0).share(holder(torch.tensor([[0.0, bad]]), [0]))


def test_noise_is_that_of_means() -> None:
    for options in ({"noise": 0.5}, {"multiplier": 0.5}, {"scale": "unit"}):
        one = holder(torch.rand(6, 3, generator=torch.Generator().manual_seed(0)), [0, 1, 1, 0, 1, 1])
        sharing = SecureMeans(**options)
        made = sharing.pool(gather({0: sharing.share(one)}), np.random.default_rng(0)).tensors
        one = holder(one.x, one.y.tolist())
        plain = SharedMeans(**options).share(one)
        for name, tensor in plain.items():
            torch.testing.assert_close(made[name], tensor, rtol=0, atol=1e-6)
        assert sharing.mechanism() == SharedMeans(**options).mechanism()


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(FedblendError, match=r"method\.sharing\.fewest: 3 clients to a sum, but only 2 hold 4 samples"):
        SecureMeans().require_possible(np.array([4, 3, 0, 9]), 4)
    SecureMeans().require_possible(np.array([4, 4, 0, 9]), 4)


def test_clients_mix_with_the_means_of_groups() -> None:
    method = {"name": "fedmix", "sharing": {"name": "secure-means", "server_average": 3}}
    made = setup(method=method, **iid(7, 2))
    state, (record,) = run(made, 1)
    entry = 4 * (16 + 3)
    assert record["shared"] == {"asked": 7, "sent": 7, "entries": 7}
    assert record["bytes_up"]["means"] == 7 * entry
    # Two groups, to each of two clients.
    assert record["bytes_down"]["means"] == 2 * 2 * entry
    sharing, seed = made.method.sharing, made.experiment.seed
    pool = sharing.make_pool(state.entries, server_side(stream(seed, "pool", 0), np.arange(7)))
    assert bytes_of(pool.tensors) == 2 * entry
    # Each sample counts as often as the others of its client: groups' means of clients' means of inputs.
    group = sharing.groups(np.arange(7), stream(seed, "pool", 0))
    means = np.stack([made.scale(made.samples(c, 10**6)[0]).double().mean(0).numpy() for c in range(7)])
    for g in range(2):
        assert np.abs(pool.tensors["x"][g].numpy() - means[group == g].mean(0)).max() < 1e-6


def test_a_model_that_trains_on_the_means_sees_them_as_it_sees_plain_ones() -> None:
    """Means are inputs already; a client must not scale them again."""
    groups, seen = [list(range(0, 40, 4)) for _ in range(3)], []
    for sharing in ({"name": "means"}, {"name": "secure-means"}):
        method = {"sharing": sharing, "objective": "virtual-samples"}
        fed = federation(groups=groups, method=method, train={"cohort": 3})
        pool, stored = fed.begin_round(fed.start()[0]).task.pool.tensors, fed.method.sharing.plan.is_stored
        context = Context(fed.setup.task, fed.setup.scale, pool, pool_stored=stored)
        seen.append(context.entries(torch.arange(1)))

    for plain, secure in zip(*seen, strict=True):
        torch.testing.assert_close(secure, plain, rtol=0, atol=1e-6)


def test_the_server_can_train_on_averages_of_means() -> None:
    fed = federation(method={"sharing": "secure-means", "server_step": "train-on-means"})
    state, _ = run(fed, 1)
    assert not same(state.weights, run(federation(), 1)[0].weights)


SHARING = {"name": "means", "split": "class", "samples_per_mean": 4}
STEP = {"name": "train-on-means", "epochs": 2, "batch_size": 64, "lr": 0.05}


def trained(step: Any, sharing: Any = SHARING, **changes: Any) -> tuple[Any, Any, Any]:
    """Setup, state and record after one round."""
    method = {"sharing": sharing, "server_step": step}
    made = setup(**{"groups": GROUPS, "method": method, "train": {"cohort": 3}, **changes})
    state, (record,) = run(made, 1)
    return made, state, record


@pytest.mark.parametrize("split", ["class", "random"])
def test_the_aggregate_takes_gradient_steps_on_the_means(split: str) -> None:
    """Means of random groups have soft targets."""
    made, state, _ = trained(STEP, {**SHARING, "split": split})
    _, aggregate, _ = trained("none", "none")
    x, y = (state.entries.tensors[name] for name in ("x", "y"))
    assert len(x) <= STEP["batch_size"]  # one batch an epoch, so that order does not matter

    weights = {name: tensor.clone().requires_grad_() for name, tensor in aggregate.weights.items()}
    for _ in range(STEP["epochs"]):
        loss = F.cross_entropy(functional_call(made.model.eval(), weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()))
        pairs = zip(weights.items(), slopes, strict=True)
        weights = {name: (old - STEP["lr"] * slope).detach().requires_grad_() for (name, old), slope in pairs}

    same_up_to_rounding(state.weights, {name: tensor.detach() for name, tensor in weights.items()}, steps=1000)
    assert not same(state.weights, aggregate.weights)


def test_the_means_go_to_the_server_once_and_to_no_client() -> None:
    made = setup(groups=GROUPS, method={"sharing": SHARING, "server_step": STEP}, train={"cohort": 3})
    state, records = run(made, 3)
    sent = 4 * sum(tensor.numel() for tensor in state.entries.tensors.values())
    assert [record["bytes_up"].get("means", 0) for record in records] == [sent, 0, 0]
    assert not any(record["bytes_down"].get("means") for record in records)


def test_clients_that_mix_with_the_means_receive_them() -> None:
    method = {"sharing": SHARING, "server_step": STEP, "objective": "virtual-samples"}
    made = setup(groups=GROUPS, method=method, train={"cohort": 3})
    state, (record,) = run(made, 1)
    assert record["bytes_down"]["means"] == 3 * 4 * sum(tensor.numel() for tensor in state.entries.tensors.values())


def test_the_server_waits_where_a_channel_loses_all_means() -> None:
    lossy = {"name": "wireless", "t_max": 0.001, "power_up": -50}
    _, state, _ = trained(STEP, channel=lossy, min_uploads=0)
    assert not len(state.entries)
    assert same(state.weights, setup(groups=GROUPS).weights())


@pytest.mark.parametrize("step", ["fedavgm", "fedadam", "aggenhance"])
def test_a_round_without_uploads_changes_nothing(step: str) -> None:
    reaches, lost = {"name": "wireless", "t_max": 10.0}, {"name": "wireless", "power_up": -100}
    changes = {"method": {"server_step": step}, "min_uploads": 0}
    first, later = (federation(channel=one, **changes) for one in (reaches, lost))
    state, (record,) = run(first, 1)

    after, (missed,) = run(later, 1, state)

    assert record["uploads"] > 0
    assert missed["uploads"] == 0
    assert same(after.weights, state.weights)
    assert same(after.server_state, state.server_state)
