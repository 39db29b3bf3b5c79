"""Means: right, of groups that are allowed, with the options of the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, engine_of, examples, images, local, numbers, same, setup
from hypothesis import given
from hypothesis import strategies as st
from sharing_helpers import DATA, MADE, entries, mean, share

from fedblend.core.registry import build
from fedblend.core.setup import model_spec
from fedblend.methods.sharing import Raw
from fedblend.methods.sharing import means as means_module
from fedblend.methods.sharing.means import HiddenMeans, LocalMeans, Noise, SharedMeans

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


def test_groups_are_drawn_from_the_clients_stream() -> None:
    first, again, other = (share(SharedMeans(samples_per_mean=5), seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


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


def test_noise_is_drawn_from_the_clients_stream() -> None:
    first, again, other = (share(SharedMeans(noise=0.3), seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not torch.equal(first["x"], other["x"])


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


def test_server_average_of_1_leaves_entries_as_they_are() -> None:
    before = entries(5)
    assert SharedMeans().pool(before, np.random.default_rng(0)) is before


def test_server_average_groups_clients_at_random() -> None:
    after = [SharedMeans(server_average=3).pool(entries(9), np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert same(after[0].tensors, after[1].tensors)
    assert not same(after[0].tensors, after[2].tensors)


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
