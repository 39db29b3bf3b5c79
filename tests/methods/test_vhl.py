"""Virtual Homogeneity Learning: noise by class that the server makes, and the alignment of features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import federation_of, images, numbers, run, same, same_up_to_rounding, setup
from sharing_helpers import server_side
from torch.nn import functional as F

from fedblend.core.context import Batch, Context
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import Pool, gather
from fedblend.core.trees import bytes_of
from fedblend.engines.nets import EagerNet
from fedblend.experiment.config import resolve
from fedblend.methods.objectives.virtual import VirtualHomogeneity, VirtualSamples
from fedblend.methods.sharing.synthetic import ClassNoise

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


def test_alignment_needs_classes_too() -> None:
    method = {"sharing": "means", "objective": "virtual-homogeneity"}
    with pytest.raises(FedblendError, match=r"'virtual-homogeneity' needs classes.*valid: virtual-samples"):
        run(federation_of(setup(numbers(), method=method, model=DEEP)), 1)


def test_hidden_states_are_not_aligned() -> None:
    objective = {"name": "virtual-homogeneity", "base": "hidden-mix"}
    with pytest.raises(FedblendError, match=r"method.objective.base: 'hidden-mix' mixes hidden states"):
        resolve({"data": "digits", "partition": "iid", "method": {"sharing": "hidden-means", "objective": objective}})
