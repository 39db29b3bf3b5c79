"""FLea: mixup with shared features, distillation and decorrelation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import each, federation_of, images, local, setup
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import Batch, Context, StepPlan, Task
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.flea import FLea, distance_correlation
from fedblend.methods.sharing.features import Features
from fedblend.models.layers import Staged

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


def net(seed: int) -> Staged:
    torch.manual_seed(seed)
    return Staged(
        nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)
    ).double()


@each("layer", [1, 2])
@each("weights", [(1.0, 1.0), (0.0, 3.0), (2.0, 0.0)])
def test_the_loss_is_that_of_an_independent_computation(layer: int, weights: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    model, teacher = net(0), net(1)
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
