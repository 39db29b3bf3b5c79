"""Means of clients' means as sums of whole numbers: groups, arithmetic, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, federation, federation_of, run, same
from sharing_helpers import server_side

from fedblend.core.context import Context, Task
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.core.sharing import ClientData, Pool, gather
from fedblend.core.trees import bytes_of
from fedblend.data.scale import Scaler
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.aggregators.mean import LEVELS
from fedblend.methods.sharing.means import SecureMeans, SharedMeans


def as_it_is() -> Scaler:
    one, zero = torch.ones(1), torch.zeros(1)
    return Scaler("own", False, one, zero, one, zero)


def local(x: torch.Tensor, y: list[int], minimum: int = 1) -> ClientData:
    def no_hidden(x: torch.Tensor, layer: int) -> torch.Tensor:
        raise AssertionError

    rng = np.random.default_rng(0)
    return ClientData(x, torch.tensor(y), Task("classification", 2), as_it_is(), no_hidden, rng, minimum)


def entries_of(sharing: SecureMeans, means: dict[int, list[float]]) -> Pool:
    """Entries of clients whose one sample is this vector, of class 1."""
    return gather({c: sharing.share(local(torch.tensor([x]), [1])) for c, x in means.items()})


def test_a_mean_leaves_as_whole_numbers_of_a_step() -> None:
    payload = SecureMeans(server_average=4, range=2.0).share(
        local(torch.tensor([[1.0, -2.0], [0.0, -2.0]]), [0, 1], minimum=2)
    )
    # A client fills an eighth of the range of a sum: 2.0 is LEVELS / 8.
    assert payload["whole-x"].dtype == torch.int32
    assert payload["whole-x"].tolist() == [[round(LEVELS / 8 / 4), -round(LEVELS / 8)]]
    assert payload["whole-y"].tolist() == [[round(LEVELS / 8 / 4)] * 2]
    assert SecureMeans().share(local(torch.ones(2, 2), [0, 1], minimum=3)) is None


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
        SecureMeans(range=3.0).share(local(torch.tensor([[0.0, bad]]), [0]))


def test_noise_is_that_of_means() -> None:
    for options in ({"noise": 0.5}, {"multiplier": 0.5}, {"scale": "unit"}):
        one = local(torch.rand(6, 3, generator=torch.Generator().manual_seed(0)), [0, 1, 1, 0, 1, 1])
        sharing = SecureMeans(**options)
        made = sharing.pool(gather({0: sharing.share(one)}), np.random.default_rng(0)).tensors
        one = local(one.x, one.y.tolist())
        plain = SharedMeans(**options).share(one)
        for name, tensor in plain.items():
            torch.testing.assert_close(made[name], tensor, rtol=0, atol=1e-6)
        assert sharing.mechanism() == SharedMeans(**options).mechanism()


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(
        FedblendError, match=r"server_average: groups of 2 clients are smaller than the smallest sum, fewest = 3"
    ):
        build("sharing", {"name": "secure-means", "server_average": 2})
    with pytest.raises(FedblendError, match="unknown key for the sharing 'secure-means'"):
        build("sharing", {"name": "secure-means", "refresh": 0.5})
    with pytest.raises(FedblendError, match=r"method\.sharing\.fewest: 3 clients to a sum, but only 2 hold 4 samples"):
        SecureMeans().require_possible(np.array([4, 3, 0, 9]), 4)
    SecureMeans().require_possible(np.array([4, 4, 0, 9]), 4)
    with pytest.raises(
        FedblendError, match=r"'secure-means' sums the data that clients share once, but the channel 'wireless' l"
    ):
        resolve(table(channel={"name": "wireless"}))


def table(**changes: Any) -> dict[str, Any]:
    method = {"name": "fedmix", "sharing": {"name": "secure-means", "server_average": 3}}
    made = {"data": "digits", "partition": {"name": "iid", "clients": 7}, "model": {"name": "mlp", "hidden": [4]}}
    made |= {"train": {"cohort": 2, "epochs": 1, "batch_size": 50}, "rounds": 1, "method": method, "fraction": 0.2}
    return {**made, **changes}


def test_clients_mix_with_the_means_of_groups() -> None:
    setup = make_setup(resolve(table()))
    federation = federation_of(setup)
    state, record = federation.round(federation.start()[0])
    assert record.shared == {"asked": 7, "sent": 7, "entries": 7}
    assert record.bytes_up["means"] == 7 * 4 * (64 + 10)
    # Two groups, to each of two clients.
    assert record.bytes_down["means"] == 2 * 2 * 4 * (64 + 10)
    pool = setup.experiment.method.sharing.make_pool(
        state.entries, server_side(stream(setup.experiment.seed, "pool", 0), np.arange(7))
    )
    assert bytes_of(pool.tensors) == 2 * 4 * (64 + 10)
    # Each sample counts as often as the others of its client: groups' means of clients' means of inputs.
    group = setup.experiment.method.sharing.groups(np.arange(7), stream(setup.experiment.seed, "pool", 0))
    means = np.stack([setup.scale(setup.samples(c, 10**6)[0]).double().mean(0).numpy() for c in range(7)])
    for g in range(2):
        assert np.abs(pool.tensors["x"][g].numpy() - means[group == g].mean(0)).max() < 1e-6


def test_a_model_that_trains_on_the_means_sees_them_as_it_sees_plain_ones() -> None:
    """Means are inputs already; a client must not scale them again."""
    groups, seen = [list(range(0, 40, 4)) for _ in range(3)], []
    for sharing in ({"name": "means"}, {"name": "secure-means"}):
        fed = federation(
            groups=groups, method={"sharing": sharing, "objective": "virtual-samples"}, train={"cohort": 3}
        )
        task = fed.begin_round(fed.start()[0]).task
        context = Context(
            fed.setup.task, fed.setup.scale, task.pool.tensors, pool_stored=fed.method.sharing.plan.is_stored
        )
        seen.append(context.entries(torch.arange(1)))

    for plain, secure in zip(*seen, strict=True):
        torch.testing.assert_close(secure, plain, rtol=0, atol=1e-6)


def test_the_server_can_train_on_averages_of_means() -> None:
    fed = federation(method={"sharing": "secure-means", "server_step": "train-on-means"})
    state, _ = run(fed, 1)
    assert not same(state.weights, run(federation(), 1)[0].weights)
