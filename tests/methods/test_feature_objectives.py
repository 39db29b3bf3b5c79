"""Objectives on hidden maps (FedFA), shared features (FLea) and channel statistics (StatMix)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, engine_of, federation_of, images, local, run, same_up_to_rounding, setup
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.privacy import membership
from fedblend.core.context import Batch, CohortSummary, Context, StepPlan, Task
from fedblend.core.dataset import Dataset
from fedblend.core.setup import Setup, model_spec
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.fedfa import EPSILON, FedFA, channel_weights
from fedblend.methods.objectives.flea import FLea, distance_correlation
from fedblend.methods.objectives.statmix import StatMix
from fedblend.methods.sharing.channel_statistics import ChannelStatistics, channel_statistics
from fedblend.methods.sharing.features import Features
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
def test_fedfas_loss_is_that_of_an_independent_computation(layers: tuple[bool, bool]) -> None:
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


CLASSES = Task("classification", 3)


def test_distance_correlation_of_equal_distances_is_1_and_of_a_constant_is_no_number_without_end() -> None:
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))

    assert distance_correlation(x, 3 * x + 2).item() == pytest.approx(1, rel=1e-5)
    for other in (torch.zeros(9, 2, requires_grad=True), x[:1].repeat(9, 1).requires_grad_()):
        value = distance_correlation(x, other)
        (slope,) = torch.autograd.grad(value, other)
        assert torch.isfinite(value)
        assert torch.isfinite(slope).all()


def test_distance_correlation_is_the_one_of_explicit_sums() -> None:
    rng = np.random.default_rng(1)
    x, f = rng.standard_normal((7, 4)), rng.standard_normal((7, 3))

    def distances(rows: np.ndarray) -> np.ndarray:
        d = np.array([[np.linalg.norm(a - b) for b in rows] for a in rows])
        return np.array([[d[i, j] - d[i].mean() - d[:, j].mean() + d.mean() for j in range(7)] for i in range(7)])

    a, b = distances(x), distances(f)
    wanted = np.sqrt((a * b).mean()) / ((a * a).mean() * (b * b).mean()) ** 0.25

    assert distance_correlation(torch.from_numpy(x), torch.from_numpy(f)).item() == pytest.approx(wanted, rel=1e-6)


def staged(seed: int) -> Staged:
    torch.manual_seed(seed)
    return Staged(
        nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)
    ).double()


@each("layer", [1, 2])
@each("weights", [(1.0, 1.0), (0.0, 3.0), (2.0, 0.0)])
def test_fleas_loss_is_that_of_an_independent_computation(layer: int, weights: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    model, teacher = staged(0), staged(1)
    x, y = torch.from_numpy(rng.standard_normal((4, 5))), torch.tensor([0, 2, 1, 1])
    pool = {"x": torch.from_numpy(rng.standard_normal((6, 4))), "y": F.one_hot(torch.arange(6) % 3, 3).double()}
    drawn = {"ratio": torch.from_numpy(rng.random(5)), "entry": torch.tensor([3, 0, 5, 3, 1])}
    context = Context(CLASSES, lambda x: x, pool, start=dict(teacher.state_dict()))
    distillation, decorrelation = weights

    loss = FLea(layer=layer, distillation=distillation, decorrelation=decorrelation).loss(
        EagerNet(model), Batch(x, y), drawn, context
    )

    head, tail = nn.Sequential(*model.stages[:layer]), nn.Sequential(*model.stages[layer:])
    old = nn.Sequential(*teacher.stages[layer:])
    total = 0.0
    for i in range(4):
        b, shared = drawn["ratio"][i], pool["x"][drawn["entry"][i]]
        mixed = tail(b * head(x[i]) + (1 - b) * shared).log_softmax(0)
        total += -tail(head(x[i])).log_softmax(0)[y[i]]
        total += -b * mixed[y[i]] - (1 - b) * mixed[int(drawn["entry"][i]) % 3]
        p, q = old(shared).softmax(0), tail(shared).softmax(0)
        total += distillation * sum(p[c] * (p[c] / q[c]).log() for c in range(3))
    wanted = total / 4 + decorrelation * distance_correlation(x, head(x))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-10)
    parameters = list(model.parameters())
    for one, other in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(one, other)


def test_each_sample_draws_a_ratio_and_a_feature() -> None:
    drawn = FLea(alpha=0.5).draw(np.random.default_rng(0), StepPlan(np.array([4, 3]), 4, 0, entries=7))
    assert (drawn["ratio"].shape, drawn["ratio"].dtype, drawn["entry"].shape) == ((2, 4), np.float32, (2, 4))
    assert len(np.unique(drawn["ratio"])) == 8
    assert drawn["entry"].max() < 7


@pytest.mark.parametrize(("samples", "rows"), [(1, [0]), (9, [0]), (20, [0, 10]), (31, [0, 10, 20])])
def test_a_tenth_of_the_samples_is_shared_the_same_in_every_round(samples: int, rows: list[int]) -> None:
    x, y = torch.arange(samples)[:, None].float(), torch.arange(samples) % 3
    for seed in (0, 1):
        payload = Features().share(local(x, y, CLASSES, lambda x: x, seed=seed, hidden=lambda x, layer: 10 * x + layer))
        assert payload is not None
        assert payload["x"].flatten().tolist() == [10 * row + 1 for row in rows]
        assert payload["y"].tolist() == F.one_hot(y[rows], 3).float().tolist()
        assert Features().most_entries(samples, 2) == len(rows)


def test_only_the_rounds_clients_share_and_earlier_features_are_dropped() -> None:
    fed = federation_of(setup(images(n=80), method="flea", partition={"name": "iid", "clients": 4}, rounds=6))
    state = fed.start()[0]
    cohorts = set()
    for _ in range(4):
        before = state.weights
        state, record = fed.round(state)
        cohort = record.as_dict()["cohort"]
        cohorts.add(tuple(cohort))
        assert np.unique(state.entries.owner).tolist() == cohort
        assert record.as_dict()["shared"] == {"asked": 2, "sent": 2, "entries": 4}
        # Two features of 6 numbers and 3 for the target, of each client; all of them go to each client.
        assert record.as_dict()["bytes_up"]["features"] == 2 * 2 * (6 + 3) * 4
        assert record.as_dict()["bytes_down"]["features"] == 2 * 4 * (6 + 3) * 4
        weights = sum(t.numel() for t in before.values()) * 4
        assert record.as_dict()["bytes_down"]["weights"] == 2 * weights
        # They are those of the model that the round began with.
        x, _ = fed.setup.samples(cohort[0], 20)
        fed.setup.model.load_state_dict(before)
        torch.testing.assert_close(
            state.entries.tensors["x"][0], fed.setup.model(fed.setup.scale(x[:1]), 0, 1)[0].detach()
        )
    assert len(cohorts) > 1


MLP = {"name": "mlp", "hidden": [6]}


def coloured(n: int = 40) -> Dataset:
    """Images of three channels, each of its own brightness and contrast."""
    grey = images(n)
    halves = (
        replace(half, x=torch.cat([half.x, half.x // 2 + 9, 255 - half.x], 1)) for half in (grey.train, grey.test)
    )
    return Dataset("coloured", "image", *halves, grey.classes)


def share(sharing: ChannelStatistics, made: Setup, minimum: int = 1) -> Any:
    train = made.data.train
    return sharing.share(local(train.x, train.y, made.task, made.scale, minimum=minimum))


def test_statistics_of_an_image_by_hand() -> None:
    """Pixels 1, 3, 5, 7: mean 4, deviations 3, 1, 1, 3, so sqrt(5); a channel of one value deviates by 0."""
    x = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]], [[2.0, 2.0], [2.0, 2.0]]]])
    mean, std = channel_statistics(x)
    assert mean.tolist() == [[4.0, 2.0]]
    assert std[0].tolist() == pytest.approx([5**0.5, 0.0])


@pytest.mark.parametrize("data", [images, coloured])
@pytest.mark.parametrize("samples", [7, "all"])
def test_a_client_shares_those_of_some_of_its_images_each_once(data: Any, samples: Any) -> None:
    made = setup(data(), model=MLP)
    payload = share(ChannelStatistics(samples=samples), made)

    inputs = made.scale(made.data.train.x).numpy()
    all_of = {
        (*np.round(image.mean((1, 2)), 4), *np.round(image.std((1, 2)), 4)) for image in inputs.astype(np.float64)
    }
    rows = np.concatenate([payload["mean"], payload["std"]], 1).round(4)
    channels = made.data.train.x.shape[1]
    assert rows.shape == (40 if samples == "all" else 7, 2 * channels)
    near = [min(np.abs(np.array(one) - row).max() for one in all_of) for row in rows]
    assert max(near) < 2e-4
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("data", [images, coloured])
def test_overall_statistics_are_those_of_all_pixels_of_all_images(data: Any) -> None:
    made = setup(data(), model=MLP)
    payload = share(ChannelStatistics(of="client"), made)
    pixels = made.scale(made.data.train.x).double().numpy().swapaxes(0, 1).reshape(made.data.train.x.shape[1], -1)
    np.testing.assert_allclose(payload["mean"], pixels.mean(1)[None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(payload["std"], pixels.std(1)[None], rtol=1e-5)


def test_overall_statistics_need_as_many_images_as_the_policy_demands() -> None:
    made, overall = setup(images(), model=MLP), ChannelStatistics(of="client")
    assert share(overall, made, minimum=41) is None
    assert share(overall, made, minimum=40) is not None
    assert (overall.most_entries(40, 41), overall.most_entries(40, 40)) == (0, 1)
    assert (ChannelStatistics().most_entries(40, 41), ChannelStatistics(samples="all").most_entries(90, 2)) == (40, 90)


def test_bytes_are_two_numbers_a_channel_and_image() -> None:
    made = setup(coloured(), method={"name": "statmix", "sharing": {"samples": 4}}, model=MLP)
    _, (record, again) = run(federation_of(made), 2)

    entries = 4 * 4
    assert record["bytes_up"]["statistics"] == entries * 2 * 3 * 4
    new = set(again["cohort"]) - set(record["cohort"])
    assert record["bytes_down"]["statistics"] == 2 * entries * 2 * 3 * 4
    assert again["bytes_down"].get("statistics", 0) == len(new) * entries * 2 * 3 * 4
    assert "statistics" not in again["bytes_up"]


@each(
    ("payload", "words"),
    [
        ({"mean": torch.zeros(2, 3), "std": torch.tensor([[1.0, 0, 0], [1.0, -0.1, 1.0]])}, "'std' is negative"),
        ({"mean": torch.zeros(2, 3), "std": torch.zeros(1, 3)}, "not of the shapes"),
        ({"mean": torch.zeros(2, 1), "std": torch.zeros(2, 1)}, "tensors of shapes"),
        ({"mean": torch.zeros(2, 3)}, "tensors of shapes"),
        ({"std": torch.zeros(2, 3)}, "tensors of shapes"),
        ({"mean": torch.zeros(2, 3), "std": torch.zeros(2, 3)}, None),
    ],
)
def test_statistics_that_no_images_have_are_refused(payload: dict[str, torch.Tensor], words: str | None) -> None:
    made = setup(coloured(), model=MLP)
    fault = ChannelStatistics().fault(payload, 10, model_spec(made, made.model))
    assert fault is None if words is None else words in str(fault)


@pytest.mark.parametrize("data", [images, coloured])
def test_images_get_the_drawn_statistics_and_keep_their_shape(data: Any) -> None:
    made = setup(data(), model=MLP)
    batch = Batch(made.scale(made.data.train.x[:4]), made.data.train.y[:4])
    pool = share(ChannelStatistics(samples=6), made)
    drawn = {"style": torch.tensor([5, 0, 2, 2, 1]), "styled": torch.tensor([True, False, True, True, True])}
    context = Context(made.task, made.scale, pool)

    value = StatMix().loss(EagerNet(made.model), batch, drawn, context)

    changed = batch.x.double().numpy().copy()
    for i, (entry, styled) in enumerate([(5, True), (0, False), (2, True), (2, True)]):
        for c in range(changed.shape[1]) if styled else ():
            pixels = changed[i, c]
            normal = (pixels - pixels.mean()) / pixels.std()
            changed[i, c] = float(pool["std"][entry, c]) * normal + float(pool["mean"][entry, c])
    assert value.item() == pytest.approx(
        F.cross_entropy(made.model(torch.from_numpy(changed).float()), batch.y).item(), rel=1e-4
    )


def test_a_channel_of_one_value_stays_of_one_value() -> None:
    made = setup(images(), model=MLP)
    batch = Batch(torch.full((1, 1, 4, 4), 3.0), torch.tensor([0]))
    drawn = {"style": torch.tensor([0]), "styled": torch.tensor([True])}
    pool = {"mean": torch.tensor([[0.5]]), "std": torch.tensor([[2.0]])}
    made_of = StatMix().changed(batch, drawn, Context(made.task, made.scale, pool))
    assert made_of.x.unique().tolist() == [0.5]


def plan(own: list[bool]) -> StepPlan:
    return StepPlan(np.full(3000, 2), 2, 0, np.array(own), len(own))


def test_statistics_are_of_others_with_the_probability() -> None:
    drawn = StatMix(probability=0.3).draw(np.random.default_rng(0), plan([True, False, False, True]))
    assert set(drawn["style"].ravel()) == {1, 2}
    assert abs(drawn["styled"].mean() - 0.3) < 0.03
    anyone = StatMix(exclude_own=False).draw(np.random.default_rng(0), plan([True, False, False, True]))
    assert set(anyone["style"].ravel()) == {0, 1, 2, 3}
    assert not StatMix(probability=1.0).draw(np.random.default_rng(0), plan([True, True]))["styled"].any()


def test_statistics_of_all_images_give_their_members_away() -> None:
    made = setup(images(n=60), [list(range(0, 20)), list(range(20, 40))], model=MLP)
    rows = torch.from_numpy(made.population.order)

    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(channel_statistics(made.scale(x)), 1)

    entries = read(made.data.train.x[rows])

    assert membership.of_entries(made, entries, read) == 1.0
