"""Shared entries, raw samples and seeds as further samples of clients; class noise, and aligned features (VHL)."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    federation_of,
    images,
    local,
    loss_of,
    numbers,
    run,
    same,
    same_up_to_rounding,
    setup,
    tanh_net,
    weight_gradient,
)
from objectives_helpers import CLASSES, NUMBERS, draws, random_pool
from sharing_helpers import server_side
from torch.nn import functional as F

from fedblend.core.context import Batch, Context, Task
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.objective import Plain
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import Pool, gather
from fedblend.core.trees import bytes_of
from fedblend.data.scale import OneHot
from fedblend.engines.nets import EagerNet
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.methods.objectives.fedmix import FedMix
from fedblend.methods.objectives.virtual import VirtualHomogeneity, VirtualSamples
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.sharing.synthetic import ClassNoise
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds

LINEAR = {"name": "mlp", "hidden": []}
COUNTS = {"name": "counts", "counts": [[6, 6, 2], [6, 6, 5], [6, 6, 3]]}
"""Samples by label: label 2 lacks 4 at client 0, the server of XOR-ed seeds."""
METHODS = ("shared-set", "virtual-seeds", "virtual-xor")


def made_of(method: str, **changes: Any) -> Setup:
    table = {"method": method, "unsafe": True, "model": LINEAR, "partition": COUNTS, "train": {"cohort": 2}}
    return setup(images(n=60), **{**table, **changes})


def test_entries_as_stored_are_scaled_and_their_labels_are_as_good_as_distributions() -> None:
    made = made_of("shared-set")
    data, rows = made.data.train, torch.tensor([7, 0, 30])
    batch = Batch(made.scale(data.x[40:44]), data.y[40:44])
    drawn = {"virtual": rows, "virtual_weight": torch.tensor(0.5)}
    expected = F.cross_entropy(made.model(batch.x), batch.y) + 0.5 * F.cross_entropy(
        made.model(made.scale(data.x[rows])), data.y[rows]
    )
    for y in (data.y.to(torch.uint8), data.y, F.one_hot(data.y, 3).float()):
        context = Context(made.task, made.scale, {"x": data.x, "y": y}, pool_stored=True)
        value = VirtualSamples().loss(EagerNet(made.model), batch, drawn, context)
        torch.testing.assert_close(value, expected)


def test_distributions_may_lack_the_last_classes() -> None:
    """The server makes soft labels of the labels that arrive, and may receive none of the last classes."""
    task = Task("classification", 4)
    assert task.targets(torch.tensor([[0.25, 0.75]])).tolist() == [[0.25, 0.75, 0.0, 0.0]]
    assert task.targets(torch.tensor([3], dtype=torch.uint8)).dtype == torch.int64
    assert Task("regression", 2).targets(torch.tensor([[0.5, 2.0]])).tolist() == [[0.5, 2.0]]


@pytest.mark.parametrize("method", METHODS)
def test_every_client_downloads_once_what_the_server_made(method: str) -> None:
    made = made_of(method, rounds=4)
    fed = federation_of(made)
    state, records = run(fed, 4)

    sharing = made.experiment.method.sharing
    pool = fed.exchange.pool_for_clients(state)
    receivers = {client for record in records for client in record["cohort"]}
    kinds = {sharing.bytes_kind}
    assert sum(record["bytes_down"].get(kind, 0) for record in records for kind in kinds) == len(receivers) * bytes_of(
        pool.tensors
    )
    assert records[0]["bytes_up"][sharing.bytes_kind] == bytes_of(state.entries.tensors)
    assert all(sharing.bytes_kind not in record["bytes_up"] for record in records[1:])


def test_no_sample_of_a_server_with_data_of_its_own_reaches_a_client() -> None:
    made = made_of("virtual-xor")
    fed = federation_of(made)
    begun = fed.begin_round(fed.start()[0])

    assert begun.task.pool is not None
    own = {row.numpy().tobytes() for row in made.samples(0, 14)[0]}
    sent = [row.numpy().tobytes() for row in begun.task.pool.tensors["x"]]
    assert set(begun.task.pool.owner) == {-1}
    assert begun.task.pool.tensors["y"].tolist() == [2] * 4
    assert not own & set(sent)
    assert own <= {row.numpy().tobytes() for row in fed.exchange.pool_of(begun.state).tensors["x"]}, (
        "the server itself has them"
    )


def test_a_shared_set_is_as_many_raw_samples_of_each_client() -> None:
    made = made_of({"name": "shared-set", "sharing": {"samples": 3}})  # type: ignore[arg-type]
    fed = federation_of(made)
    pool = fed.exchange.pool_of(fed.begin_round(fed.start()[0]).state)

    assert np.bincount(pool.owner).tolist() == [3, 3, 3]
    for client in range(3):
        x, y = made.samples(client, int(made.sizes(0)[client]))
        held = {(row.numpy().tobytes(), int(label)) for row, label in zip(x, y, strict=True)}
        rows = torch.from_numpy(pool.owner == client)
        assert held >= {
            (row.numpy().tobytes(), int(label))
            for row, label in zip(pool.tensors["x"][rows], pool.tensors["y"][rows], strict=True)
        }


def test_a_shared_set_of_numbers_keeps_the_targets() -> None:
    made = setup(numbers(), method="shared-set", unsafe=True, model=LINEAR)
    fed = federation_of(made)
    state, _ = run(fed, 1)
    held = {tuple(row) for row in made.data.train.y.tolist()}
    assert state.entries.tensors["y"].dtype == torch.float32
    assert {tuple(row) for row in state.entries.tensors["y"].tolist()} <= held


def test_more_entries_than_samples_in_a_batch_go_through_dropout_in_stacks() -> None:
    made = made_of("virtual-seeds", model={"name": "mlp", "hidden": [5], "dropout": 0.5}, train={"batch_size": 4})
    begin, (state, _) = made.weights(), run(RoundLoop(made, StackedEngine(made, stack=2)), 1)
    assert not same(begin, state.weights)


@pytest.mark.parametrize(
    ("sharing", "told"),
    [
        (MixedSeeds(), "'mixed-seeds' needs images or features, but these data are text; valid: means"),
        (XorSeeds(), "'xor-seeds' needs 8-bit pixels (uint8); these data are text; valid: images"),
        (MixedTargetSeeds(), "'mixed-target-seeds' needs 8-bit pixels (uint8); these data are text; valid: images"),
    ],
)
def test_seeds_of_text_are_refused(sharing: Any, told: str) -> None:
    codes, labels = torch.arange(12, dtype=torch.uint8).reshape(4, 3), torch.tensor([0, 1, 0, 1])
    with pytest.raises(FedblendError, match=re.escape(f"method.sharing: {told}")):
        sharing.share(local(codes, labels, Task("classification", 2), OneHot(12)))


def test_the_entries_of_a_pool_of_inputs_are_not_scaled() -> None:
    model, task = tanh_net(), Task("classification", 3)
    pool = {"x": torch.ones(1, 5, dtype=torch.float64), "y": torch.tensor([1])}
    batch = Batch(torch.zeros(2, 5, dtype=torch.float64), torch.tensor([0, 2]))
    drawn = {"virtual": torch.tensor([0]), "virtual_weight": torch.tensor(1.0)}
    value = loss_of(VirtualSamples(), model, batch, task, 0.0, pool, **drawn)
    expected = F.cross_entropy(model(batch.x), batch.y) + F.cross_entropy(model(pool["x"]), pool["y"])
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("task", [CLASSES, NUMBERS])
@pytest.mark.parametrize("base", [Plain(), FedMix(lam=0.2)])
def test_the_loss_on_the_drawn_entries_is_added_to_the_base(task: Task, base: Any) -> None:
    model, batch, pool = tanh_net(seed=1), Batch(*draws(task, 6, 1)), random_pool(task, 5)
    rows = torch.tensor([3, 1, 3])

    drawn = {"virtual": rows, "virtual_weight": torch.tensor(0.3)}
    made = loss_of(VirtualSamples(base=base), model, batch, task, 0.2, pool, **drawn)

    added = torch.stack([task.loss(model(pool["x"][[i]]), pool["y"][[i]]) for i in rows.tolist()]).mean()
    wanted = loss_of(base, model, batch, task, 0.2, pool) + 0.3 * added
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(weight_gradient(made, model), weight_gradient(wanted, model))


class Mistaken(Plain):
    """An objective whose own code fails."""

    @property
    def counts_labels(self) -> bool:
        return bool(self.counted)


def test_what_the_base_reads_is_read() -> None:
    assert VirtualSamples(base={"name": "fedlc"}).counts_labels
    assert not VirtualSamples().counts_labels
    with pytest.raises(AttributeError, match="no attribute 'counted'"):
        _ = VirtualSamples(base=Mistaken()).counts_labels


DEEP = {"name": "mlp", "hidden": [8, 6]}


def world(**changes: Any) -> Setup:
    return setup(images(side=6), **{"method": "vhl", "model": DEEP, "train": {"cohort": 3, "lr": 0.02}, **changes})


def made_by(sharing: ClassNoise, made: Setup, seed: int = 0) -> Pool:
    return sharing.make_pool(gather({}), server_side(np.random.default_rng(seed), spec=model_spec(made, made.model)))


def test_the_noise_is_the_class_mean_and_a_deviation_on_the_grid_enlarged() -> None:
    made = world()
    pool = made_by(ClassNoise(samples=4, grid=3, deviation=0.25), made)

    rng = np.random.default_rng(0)
    means, noise = rng.standard_normal((3, 1, 1, 3, 3), np.float32), rng.standard_normal((3, 4, 1, 3, 3), np.float32)
    for place in range(12):
        coarse = torch.from_numpy(means[place // 4, 0] + np.float32(0.25) * noise[place // 4, place % 4])
        enlarged = F.interpolate(coarse[None], (6, 6), mode="bilinear")[0]
        torch.testing.assert_close(pool.tensors["x"][place], enlarged)
    assert pool.tensors["y"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (pool.owner == -1).all()


def test_a_grid_is_at_most_the_image_and_inputs_that_are_no_images_have_none() -> None:
    fine = made_by(ClassNoise(samples=1, grid=50, deviation=0.0), world())
    drawn = np.random.default_rng(0).standard_normal((3, 1, 1, 6, 6), np.float32)
    torch.testing.assert_close(fine.tensors["x"], torch.from_numpy(drawn[:, 0]))


def test_the_noise_holds_nothing_of_any_clients_samples() -> None:
    first, second = (setup(images(side=6, seed=seed), method="vhl", model=DEEP, scale="none") for seed in (0, 1))
    assert same(made_by(ClassNoise(), first).tensors, made_by(ClassNoise(), second).tensors)


def test_nothing_leaves_a_client_and_each_downloads_the_noise_once() -> None:
    made = world(rounds=3, train={"cohort": 2, "lr": 0.02})
    fed = federation_of(made)
    state, records = run(fed, 3)

    pool = fed.exchange.pool_of(state)
    receivers = {client for record in records for client in record["cohort"]}
    assert sum(record["bytes_down"].get("noise", 0) for record in records) == len(receivers) * bytes_of(pool.tensors)
    assert bytes_of(pool.tensors) == 300 * (36 * 4 + 8)
    assert all(set(record["bytes_up"]) == {"weights"} and "shared" not in record for record in records)
    assert not len(state.entries)


def reference(z: np.ndarray, labels: np.ndarray, tau: float) -> float:
    """Khosla et al. 2020, equation 2, sum by sum, with the weights of targets that are distributions."""
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    total = 0.0
    for i in range(len(z)):
        others = [k for k in range(len(z)) if k != i]
        norm = sum(math.exp(unit[i] @ unit[k] / tau) for k in others)
        weights = {k: float(labels[i] @ labels[k]) for k in others}
        if sum(weights.values()):
            shares = [w * math.log(math.exp(unit[i] @ unit[k] / tau) / norm) for k, w in weights.items()]
            total -= sum(shares) / sum(weights.values())
    return total / len(z)


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_is_that_of_virtual_samples_and_lambda_times_the_contrast(soft: bool) -> None:
    made = world()
    pool = {name: t[::20] for name, t in made_by(ClassNoise(), made).tensors.items()}
    if soft:
        pool["y"] = torch.tensor([[0.5, 0.5, 0.0]] * 15)
    batch = Batch(made.scale(made.data.train.x[:5]), made.data.train.y[:5])
    objective = VirtualHomogeneity(lam=0.3, tau=0.2)
    rows = torch.tensor([0, 7, 14, 7])
    drawn = {"virtual": rows, "virtual_weight": torch.tensor(0.5), "align": torch.tensor(0.3)}
    context, net = Context(made.task, made.scale, pool), EagerNet(made.model)

    value = objective.loss(net, batch, drawn, context)

    features = torch.cat([net(x, 0, net.layers - 1) for x in (batch.x, pool["x"][rows])]).detach().double().numpy()
    labels = torch.cat([F.one_hot(batch.y, 3).float(), pool["y"][rows] if soft else F.one_hot(pool["y"][rows], 3)])
    plain = VirtualSamples(weight=0.5).loss(net, batch, drawn, context)
    wanted = plain.item() + 0.3 * reference(features, labels.double().numpy(), 0.2)
    assert value.item() == pytest.approx(wanted, rel=1e-5)


def test_a_client_alone_with_its_means_is_not_aligned_with_them() -> None:
    objective = {"name": "virtual-homogeneity", "exclude_own": True}
    changes: dict[str, Any] = {"groups": [list(range(20))], "model": DEEP, "train": {"cohort": 1}}
    alone, plain = (
        run(federation_of(setup(images(side=6), **changes, method={"sharing": "means", "objective": one})), 1)[0]
        for one in (objective, {"name": "virtual-samples", "exclude_own": True})
    )
    same_up_to_rounding(alone.weights, plain.weights, steps=1000)
