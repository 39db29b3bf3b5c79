"""CCVR: statistics of features, their exact combination, and the last layer trained on virtual features."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from helpers import each, engine_of, examples, federation_of, images, local, run, same, same_up_to_rounding, setup
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedblend.core.context import Task
from fedblend.core.loop import RoundLoop
from fedblend.core.random import stream
from fedblend.methods.server_steps.ccvr import CCVR
from fedblend.methods.sharing.feature_statistics import FeatureStatistics, combined
from fedblend.models.layers import Staged, last_layer, with_features

GROUPS = [list(range(0, 12)), list(range(12, 20)), list(range(20, 40))]
METHOD = {"name": "ccvr", "sharing": {"min_samples": 1}, "server_step": {"per_class": 40, "epochs": 2}}
ALL = {"unsafe": True, "groups": GROUPS, "train": {"cohort": 2}}
"""Classes of single samples count too; two of three clients train in a round."""


def world(method: Any = METHOD, **changes: Any) -> Any:
    return setup(**{**ALL, "method": method, **changes})


def pooled(made: Any, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features in float64 and labels of all clients' samples, with the model's layers written out."""
    rows = torch.from_numpy(made.population.order)
    x = made.scale(made.data.train.x[rows]).flatten(1)
    first, _ = (name.rpartition(".")[0] for name in weights if name.endswith("weight"))
    return torch.relu(F.linear(x, weights[f"{first}.weight"], weights[f"{first}.bias"])).double(), made.data.train.y[
        rows
    ]


def in_rows(packed: torch.Tensor, width: int) -> np.ndarray:
    """A packed covariance as a matrix."""
    whole = np.zeros((width, width))
    whole[np.triu_indices(width)] = packed.numpy()
    return whole + np.triu(whole, 1).T


def shared(z: torch.Tensor, y: list[int], minimum: int = 1, **options: Any) -> Any:
    """What a client with features ``z`` shares: its model is one dense layer, whose inputs are the samples."""
    given = local(z, torch.tensor(y), Task("classification", 3), lambda x: x, minimum=minimum)
    model = torch.nn.Linear(z.shape[1], 3, dtype=z.dtype)
    return FeatureStatistics(min_samples=1, **options).share(
        type(given)(**{**vars(given), "model": Staged(model).eval()})
    )


def test_a_client_sends_count_mean_and_unbiased_covariance() -> None:
    z = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 2.0], [7.0, 7.0]])

    made = shared(z, [2, 2, 2, 0])

    assert made["y"].tolist() == [0, 2]
    assert made["count"].tolist() == [1, 3]
    assert made["mean"].tolist() == [[7.0, 7.0], [3.0, 2.0]]
    assert made["covariance"].tolist() == [[0.0, 0.0, 0.0], [4.0, 2.0, 4.0]]  # (8, 4, 8) / 2
    assert shared(z, [2, 2, 2, 0], covariance="diagonal")["covariance"].tolist() == [[0.0, 0.0], [4.0, 4.0]]


def test_a_class_of_too_few_samples_is_left_out() -> None:
    z = torch.rand(5, 2)
    assert shared(z, [0, 0, 1, 1, 1], minimum=3)["y"].tolist() == [1]
    assert shared(z, [0, 0, 1, 1, 1], minimum=4) is None


@given(
    split=st.lists(st.integers(0, 3), min_size=25, max_size=25),
    labels=st.lists(st.integers(0, 2), min_size=25, max_size=25),
    offset=st.sampled_from([0.0, 1e3]),
    diagonal=st.booleans(),
)
@examples(60)
def test_combined_statistics_are_those_of_the_pooled_features(
    split: list[int], labels: list[int], offset: float, diagonal: bool
) -> None:
    """In float64, however samples are split; single samples of a class at a client, or in all, are among them."""
    z, y = (
        torch.randn(25, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + offset,
        np.array(labels),
    )
    entries: dict[str, list[Any]] = {"y": [], "count": [], "mean": [], "covariance": []}
    for client, label in sorted({*zip(split, labels, strict=True)}):
        own = z[torch.from_numpy((np.array(split) == client) & (y == label))].numpy()
        whole = np.cov(own.T) if len(own) > 1 else np.zeros((4, 4))
        packed = np.diag(whole) if diagonal else whole[np.triu_indices(4)]
        for name, value in zip(entries, (label, len(own), own.mean(0), packed), strict=True):
            entries[name].append(value)

    found, means, covariances = combined({name: torch.tensor(np.array(v)) for name, v in entries.items()})

    assert found.tolist() == sorted(set(labels))
    for label, mean, packed in zip(found.tolist(), means, covariances, strict=True):
        own = z[torch.from_numpy(y == label)].numpy()
        wanted = np.cov(own.T) if len(own) > 1 else np.zeros((4, 4))
        np.testing.assert_allclose(mean.numpy(), own.mean(0), rtol=1e-12, atol=1e-12)
        if diagonal:
            np.testing.assert_allclose(packed.numpy(), np.diag(wanted), rtol=1e-9, atol=1e-9)
        else:
            np.testing.assert_allclose(in_rows(packed, 4), wanted, rtol=1e-9, atol=1e-9)


def independent(made: Any, weights: dict[str, torch.Tensor], round: int, step: CCVR) -> dict[str, torch.Tensor]:
    """The calibrated model, from the pooled features alone."""
    z, y = pooled(made, weights)
    noise = stream(made.experiment.seed, "server", round)
    classes = sorted(set(y.tolist()))
    normal = noise.standard_normal((len(classes), step.per_class, z.shape[1]))
    drawn = []
    for e, label in zip(normal, classes, strict=True):
        own = z[y == label].numpy()
        values, vectors = np.linalg.eigh(np.cov(own.T))
        values[values < z.shape[1] * 2.0**-23 * values[-1]] = 0
        drawn.append(own.mean(0) + e @ (vectors @ np.diag(np.sqrt(values)) @ vectors.T))
    x = torch.from_numpy(np.concatenate(drawn)).float()
    target = torch.tensor(classes).repeat_interleave(step.per_class)
    names = [name for name in weights if name.startswith(last_layer(made.model)[0])]
    head = torch.nn.Linear(x.shape[1], made.task.outputs)
    head.load_state_dict({name.rpartition(".")[2]: weights[name] for name in names})
    optimizer = torch.optim.SGD(head.parameters(), lr=step.lr or made.experiment.train.lr_in(round))
    for _ in range(step.epochs):
        order = torch.from_numpy(noise.permutation(len(x)))
        for rows in order.split(step.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(head(x[rows]), target[rows]).backward()
            optimizer.step()
    return {**weights, **{name: head.state_dict()[name.rpartition(".")[2]] for name in names}}


def test_the_last_round_ends_with_the_calibrated_aggregate() -> None:
    made, plain = world(), world("fedavg")

    state, records = run(made, 2)
    before, _ = run(made, 1)
    first, _ = run(plain, 1)
    aggregate, plain_records = run(plain, 2)

    assert same(before.weights, first.weights), "earlier rounds are FedAvg's"
    wanted = independent(made, aggregate.weights, 1, made.experiment.method.server_step)
    same_up_to_rounding(state.weights, wanted, steps=1000)
    body = {n: t for n, t in state.weights.items() if not n.startswith(last_layer(made.model)[0])}
    assert same(body, {n: aggregate.weights[n] for n in body})
    assert records[0]["loss"] == plain_records[0]["loss"]
    assert records[1]["loss"] != plain_records[1]["loss"], "the calibrated model is the one that is evaluated"


def test_all_clients_get_the_aggregate_and_send_statistics_once() -> None:
    made = world()

    state, records = run(made, 2)

    model = sum(tensor.numel() * 4 for tensor in state.weights.values())
    width, classes = 6, 3
    size = 16 + 4 * (width + width * (width + 1) // 2)
    assert [record["bytes_up"] for record in records] == [
        {"weights": 2 * model},
        {"weights": 2 * model, "statistics": 3 * classes * size},
    ]
    assert [record["bytes_down"] for record in records] == [{"weights": 2 * model}, {"weights": (2 + 3) * model}]
    assert records[1]["shared"] == {"asked": 3, "sent": 3, "entries": 9}
    assert "shared" not in records[0]


def test_from_a_round_on_clients_go_on_from_the_calibrated_model() -> None:
    method = {**METHOD, "sharing": {"min_samples": 1, "from_round": 1}}
    made = world(method, rounds=3)

    state, records = run(made, 1)
    again, later = run(made, 1, state)

    assert "shared" in records[0]
    assert "shared" in later[0]
    begun = federation_of(made).begin_round(state)
    assert same(begun.task.weights, state.weights)
    assert not same(again.weights, state.weights)


def test_a_run_with_more_rounds_does_not_use_its_earlier_statistics_again() -> None:
    ended, longer, plain = world(rounds=1), world(rounds=3), world("fedavg", rounds=3)
    first, records = run(ended, 1)
    assert "shared" in records[0]

    second, records = run(longer, 1, first)
    averaged, _ = run(plain, 1, first)
    third, last = run(longer, 1, second)
    uncalibrated, _ = run(plain, 1, averaged)

    assert "shared" not in records[0]
    assert same(second.weights, averaged.weights)
    assert "shared" in last[0]
    assert not same(third.weights, uncalibrated.weights)


def test_rows_of_classes_without_statistics_stay() -> None:
    made = world({**METHOD, "sharing": {"min_samples": 14}}, groups=[[i for i in range(40) if i % 3 < 2 or i < 6]] * 2)

    state, records = run(made, 2)
    plain = world("fedavg", groups=[[i for i in range(40) if i % 3 < 2 or i < 6]] * 2)
    aggregate, _ = run(plain, 2)

    name = last_layer(made.model)[0]
    assert records[1]["shared"]["entries"] == 2 * 1, "only the first class has 14 samples at a client"
    for field in ("weight", "bias"):
        new, old = state.weights[f"{name}.{field}"], aggregate.weights[f"{name}.{field}"]
        assert torch.equal(new[1:], old[1:])


def test_diagonal_covariances_draw_features_apart() -> None:
    made = world({**METHOD, "sharing": {"min_samples": 1, "covariance": "diagonal"}})

    state, _ = run(made, 2)
    whole, _ = run(RoundLoop(world(), engine_of(world())), 2)

    assert state.entries.tensors["covariance"].shape[1] == 6
    width = whole.entries.tensors["mean"].shape[1]
    rows, columns = torch.triu_indices(width, width)
    diagonal = whole.entries.tensors["covariance"][:, rows == columns]
    torch.testing.assert_close(state.entries.tensors["covariance"], diagonal)
    assert not same(state.weights, whole.weights)


def test_without_statistics_the_model_is_the_aggregate() -> None:
    made, plain = (world(method) for method in ({**METHOD, "sharing": {"min_samples": 20}}, "fedavg"))
    state, records = run(made, 2)
    assert records[1]["shared"]["sent"] == 0
    assert same(state.weights, run(plain, 2)[0].weights)


GOOD = {
    "y": torch.tensor([0, 2]),
    "count": torch.tensor([5, 3]),
    "mean": torch.ones(2, 6),
    "covariance": torch.ones(2, 21),
}


@each(
    ("name", "value", "told"),
    [
        ("y", torch.tensor([0, 3]), "no different labels from 0 to 2"),
        ("y", torch.tensor([-1, 0]), "no different labels"),
        ("y", torch.tensor([2, 2]), "no different labels"),
        ("y", torch.tensor([0.0, 2.0]), "of type int64"),
        ("count", torch.tensor([0, 3]), "no numbers of 8 samples"),
        ("count", torch.tensor([6, 3]), "no numbers of 8 samples"),
        ("count", torch.tensor([2**62, 2**62]), "no numbers of 8 samples"),
        ("mean", torch.ones(2, 5), "of the shapes"),
        ("covariance", torch.ones(2, 6), "of the shapes"),
        ("covariance", -torch.ones(2, 21), "negative variances"),
        ("more", torch.ones(2), "of the shapes"),
    ],
)
def test_statistics_that_no_client_can_have_are_refused(name: str, value: torch.Tensor, told: str) -> None:
    loop = RoundLoop(made := world(), engine_of(made))
    assert FeatureStatistics().fault(GOOD, 8, loop.spec) is None
    assert told in str(FeatureStatistics().fault({**GOOD, name: value}, 8, loop.spec))


def test_a_refused_client_is_recorded_and_left_out() -> None:
    made, engine = world(), engine_of(world())
    share = engine.share
    engine.share = lambda *given: (  # type: ignore[method-assign]
        (client, {**payload, "count": payload["count"] * 1000} if client == 1 else payload)
        for client, payload in share(*given)
    )

    state, records = run(RoundLoop(made, engine), 2)

    assert [one["client"] for one in records[1]["shared"]["refused"]] == [1]
    assert set(state.entries.owner.tolist()) == {0, 2}


def test_what_is_no_covariance_gives_finite_weights() -> None:
    """A client may send variances and products that no features have."""
    entries = copy.deepcopy(GOOD)
    entries["covariance"] = 100 * torch.ones(2, 21)
    entries["covariance"][:, 1] = -1e6
    _, means, covariances = combined(entries)

    drawn = CCVR(per_class=3)._virtual(
        means,
        covariances,
        type("Server", (), {"rng": np.random.default_rng(0)}),  # type: ignore[arg-type]
    )

    assert bool(torch.isfinite(drawn).all())


def test_features_are_the_inputs_of_the_last_layer_and_no_hook_stays() -> None:
    made = world(model="lenet5", data=images(side=14))
    x = made.scale(made.data.train.x[:3])
    outputs, features = with_features(made.model, x)
    torch.testing.assert_close(features, made.model(x, 0, -1))
    torch.testing.assert_close(outputs, made.model(x))
    assert not any(layer._forward_pre_hooks for layer in made.model.modules())
