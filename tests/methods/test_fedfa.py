"""FedFA: perturbed statistics of hidden maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, federation_of, images, run, same_up_to_rounding, setup
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import Batch, CohortSummary, Context, StepPlan, Task
from fedblend.core.setup import model_spec
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.fedfa import EPSILON, FedFA, channel_weights
from fedblend.models.layers import Staged

STEPS = 100
"""More than the operations of any test that are rounded one after another."""

LENET = {"model": "lenet5", "scale": "standard"}


def made(method: Any = "fedfa", side: int = 14, **changes: Any) -> Any:
    return setup(images(n=24, side=side), method=method, **{**LENET, "train": {"cohort": 4}, **changes})


def test_one_map_by_hand() -> None:
    # Two samples with one map of 1x2 each: means 2 and 6, deviations 1 and 2.
    x = torch.tensor([[[[1.0, 3.0]]], [[[4.0, 8.0]]]], dtype=torch.float64)
    state = {"mean/1": torch.zeros(1), "std/1": torch.ones(1)}
    server = {**state, "variance/mean/1": torch.ones(1), "variance/std/1": torch.ones(1)}
    context = Context(Task("classification", 2), lambda x: x, client_state=dict(state), server_state=server)
    noise = {"mean/1": torch.tensor([[1.0], [-1.0]]), "std/1": torch.tensor([[2.0], [0.0]])}

    moved = FedFA(momentum=0.75).perturbed(x, 1, {"active/1": torch.tensor(True), **noise}, context)

    # One channel has gamma = 1. Variances over the batch: 4 of the means, 1/4 of the deviations.
    by_mean, by_std = np.sqrt(2 * 4), np.sqrt(2 * 0.25)
    first = [2 + by_mean - (1 + 2 * by_std), 2 + by_mean + (1 + 2 * by_std)]
    second = [6 - by_mean - 2, 6 - by_mean + 2]
    np.testing.assert_allclose(moved.flatten().numpy(), [*first, *second], rtol=1e-5)
    # A quarter of the batch's mean statistics, 4 and 1.5.
    assert context.client_state["mean/1"].item() == pytest.approx(1.0)
    assert context.client_state["std/1"].item() == pytest.approx(0.75 + 0.375, rel=1e-5)


def test_an_inactive_layer_changes_nothing() -> None:
    x = torch.rand(3, 2, 4, 4)
    server = {f"{v}{s}/1": torch.ones(2) for v in ("", "variance/") for s in ("mean", "std")}
    context = Context(Task("classification", 2), lambda x: x, client_state={"mean/1": torch.ones(2)})
    context = replace(context, server_state=server)
    drawn = {"active/1": torch.tensor(False), "mean/1": torch.randn(3, 2), "std/1": torch.randn(3, 2)}

    assert torch.equal(FedFA().perturbed(x, 1, drawn, context), x)
    assert torch.equal(context.client_state["mean/1"], torch.ones(2))


def test_channels_that_differ_more_between_clients_are_perturbed_more() -> None:
    weights = channel_weights(torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64))
    # t = 0, 1/2, 3/4; their mean is 5/12.
    np.testing.assert_allclose(weights.numpy(), [0, 1.2, 1.8], atol=1e-5)
    np.testing.assert_allclose(channel_weights(torch.zeros(4)).numpy(), np.ones(4), rtol=1e-6)
    assert torch.isfinite(channel_weights(torch.tensor([0.0, torch.finfo(torch.float32).max]))).all()


def net() -> Staged:
    torch.manual_seed(0)
    return Staged(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 2), nn.Sequential(nn.Flatten(), nn.Linear(2 * 9, 3))).double()


def reference(model: Staged, batch: Batch, noise: dict[str, np.ndarray], server: dict[str, np.ndarray]) -> float:
    """The paper's equations channel by channel and sample by sample, in NumPy."""
    x = batch.x
    for layer, stage in enumerate(model.stages, 1):
        x = stage(x)
        if layer == len(model.stages) or not noise[f"active/{layer}"]:
            continue
        maps = x.detach().numpy()
        samples, channels = maps.shape[:2]
        mu = np.array([[maps[b, c].mean() for c in range(channels)] for b in range(samples)])
        sigma = np.array([[np.sqrt(maps[b, c].var() + EPSILON) for c in range(channels)] for b in range(samples)])
        moved = {}
        for name, values in (("mean", mu), ("std", sigma)):
            shared = server[f"variance/{name}/{layer}"] + EPSILON
            inverse = 1 / (1 + 1 / shared)
            gamma = channels * inverse / inverse.sum()
            own = np.array([np.mean((values[:, c] - values[:, c].mean()) ** 2) + EPSILON for c in range(channels)])
            moved[name] = values + noise[f"{name}/{layer}"][:samples] * np.sqrt((gamma + 1) * own)
        changed = np.empty_like(maps)
        for b in range(samples):
            for c in range(channels):
                changed[b, c] = moved["std"][b, c] * (maps[b, c] - mu[b, c]) / sigma[b, c] + moved["mean"][b, c]
        x = torch.from_numpy(changed)
    return F.cross_entropy(x, batch.y).item()


@pytest.mark.parametrize("layers", [(True, True), (True, False), (False, True), (False, False)])
def test_the_loss_is_that_of_an_independent_computation(layers: tuple[bool, bool]) -> None:
    rng, model = np.random.default_rng(3), net()
    batch = Batch(torch.from_numpy(rng.standard_normal((4, 1, 6, 6))), torch.tensor([0, 2, 1, 2]))
    server, drawn = {}, {}
    for layer, (channels, active) in enumerate(zip((3, 2), layers, strict=True), 1):
        drawn[f"active/{layer}"] = np.array(active)
        for name in ("mean", "std"):
            server |= {f"{name}/{layer}": np.zeros(channels), f"variance/{name}/{layer}": rng.random(channels)}
            drawn[f"{name}/{layer}"] = rng.standard_normal((6, channels))
    tensors = {name: torch.from_numpy(values) for name, values in drawn.items()}
    context = Context(
        Task("classification", 3), lambda x: x, server_state={n: torch.from_numpy(v) for n, v in server.items()}
    )

    loss = FedFA().loss(EagerNet(model), batch, tensors, context)

    assert loss.item() == pytest.approx(reference(model, batch, drawn, server), rel=1e-10)


def test_the_server_computes_mean_and_variance_between_clients() -> None:
    state = {"mean/2": torch.tensor([0.5, -1.0]), "variance/mean/2": torch.ones(2)}
    estimates = torch.tensor([[1.0, 4.0], [3.0, 4.0], [8.0, 4.0]], dtype=torch.float64)
    extras = {"mean/2": estimates.sum(0), "variance/mean/2": (estimates - state["mean/2"]).square().sum(0)}

    weights, renewed = FedFA().after_aggregation({}, state, CohortSummary({}, extras, uploads=3, clients=50))

    assert weights == {}
    np.testing.assert_allclose(renewed["mean/2"].numpy(), [4, 4])
    np.testing.assert_allclose(renewed["variance/mean/2"].numpy(), [26 / 3, 0], atol=1e-6)


def test_squares_of_a_bad_client_leave_finite_variances() -> None:
    state = {"mean/1": torch.zeros(2), "variance/mean/1": torch.ones(2)}
    large = float(torch.finfo(torch.float32).max)
    extras = {
        "mean/1": torch.tensor([large, -large]).double(),
        "variance/mean/1": torch.tensor([-large, large]).double(),
    }

    _, renewed = FedFA().after_aggregation({}, state, CohortSummary({}, extras, uploads=1, clients=2))

    assert (renewed["variance/mean/1"] >= 0).all()
    assert torch.isfinite(channel_weights(renewed["variance/mean/1"])).all()


def test_a_clients_estimates_are_running_means_over_its_batches() -> None:
    """A learning rate of 0 leaves the weights, so that every batch can be read again."""
    world = made(
        {"name": "fedfa", "objective": {"layers": [1], "probability": 1.0, "momentum": 0.5}},
        train={"cohort": 4, "lr": 1e-30},
    )
    fed = federation_of(world)
    task = fed.begin_round(fed.start()[0]).task
    engine = engine_of(world)

    for client, update in zip(range(4), engine.train(task, range(4)), strict=True):
        mean, std = np.zeros(6), np.ones(6)
        assignment = engine.assign(task, client)
        x, _ = world.samples(client, assignment.samples)
        for a, b in zip(assignment.bounds, assignment.bounds[1:], strict=False):
            maps = world.model(world.scale(x[assignment.order[a:b]]), 0, 1).detach().numpy()
            mean = 0.5 * mean + 0.5 * maps.mean((0, 2, 3))
            std = 0.5 * std + 0.5 * np.sqrt(maps.var((2, 3)) + EPSILON).mean(0)
        wanted = {"objective/mean/1": torch.from_numpy(mean).float(), "objective/std/1": torch.from_numpy(std).float()}
        same_up_to_rounding(update.state.parts, wanted, STEPS)
        squares = update.extras["objective/variance/std/1"]
        torch.testing.assert_close(squares, (update.state.parts["objective/std/1"] - 1).square())


def test_estimates_go_on_from_round_to_round_and_reach_the_server() -> None:
    fed = federation_of(made())

    state, records = run(fed, 2)

    table = state.server_part("objective")
    for name in ("mean/1", "std/1", "mean/2", "std/2"):
        kept = torch.stack([state.client_states[client].parts[f"objective/{name}"] for client in range(4)])
        wanted = {name: kept.double().mean(0).float()}
        same_up_to_rounding({name: table[name]}, wanted, 1)
        variance = kept.double().var(0, correction=0)
        # Squares of distances from the last round's mean were rounded to float32.
        largest = float((kept - kept.mean(0)).abs().max()) ** 2 + 1
        assert float((table[f"variance/{name}"] - variance).abs().max()) < 8 * torch.finfo(torch.float32).eps * largest
    # Two layers of 6 and 16 channels, two statistics, each with its square: 88 numbers, up and down, of 4 clients.
    assert [record["bytes_up"]["extras"] for record in records] == [4 * 88 * 4] * 2
    assert [record["bytes_down"]["extras"] for record in records] == [4 * 88 * 4] * 2


def test_draws_have_a_number_for_each_sample_and_channel() -> None:
    plan = StepPlan(np.array([3, 2]), 3, 0, server_state={"mean/2": torch.zeros(5), "std/2": torch.zeros(5)})

    drawn = FedFA(probability=1.0).draw(np.random.default_rng(0), plan)

    assert {name: values.shape for name, values in drawn.items()} == {
        "active/2": (2,),
        "mean/2": (2, 3, 5),
        "std/2": (2, 3, 5),
    }
    assert drawn["active/2"].all()


def test_layers_are_those_with_maps_unless_given() -> None:
    world = made()
    spec = model_spec(world, world.model)
    assert FedFA().channels(spec) == {1: 6, 2: 16}
    assert FedFA(layers=(2,)).channels(spec) == {2: 16}
