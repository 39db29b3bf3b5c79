"""FedProto: what clients compute and the server makes of it, beside the paper's equations in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from baselines_helpers import Reference, near, skewed
from helpers import experiment, images, run, setup
from torch.nn import functional as F

from fedblend.core.context import Batch, Context
from fedblend.core.errors import FedblendError
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.terms import ToPrototypes
from fedblend.methods.uploads import embedding

DEEP = {"name": "mlp", "hidden": [5]}
METHOD = {"name": "fedproto", "terms": [{"name": "prototypes", "lambda": 3.0}]}
CLASSES, WIDTH = 3, 5


def fedproto(of: Reference) -> tuple[dict[int, list[torch.Tensor]], torch.Tensor]:
    """The clients' models and the global prototypes (Tan et al. 2022, Algorithm 1)."""
    first = [tensor.double() for tensor in of.setup.weights().values()]
    models: dict[int, list[torch.Tensor]] = {}
    shared = torch.zeros(CLASSES, WIDTH, dtype=torch.float64)

    def hidden(w: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ w[0].T + w[1])

    for number, lr, cohort in of.cohorts():
        sums, weights = torch.zeros_like(shared), torch.zeros(CLASSES, 1, dtype=torch.float64)
        for k in cohort:
            x, y = (torch.from_numpy(half) for half in of.samples(k))
            x, w = x[:, :-1], models.get(k, first)
            for rows in of.batches(k, number):
                w = [p.detach().requires_grad_() for p in w]
                z, target = hidden(w, x[rows]), shared[y[rows]]
                known = (target != 0).any(1)
                distance = ((z - target).square().mean(1) * known).mean()
                loss = F.cross_entropy(z @ w[2].T + w[3], y[rows]) + 3.0 * distance
                w = [p.detach() - lr * g for p, g in zip(w, torch.autograd.grad(loss, w), strict=True)]
            models[k] = w
            for label in range(CLASSES):
                mine = y == label
                if mine.sum() >= 2:
                    sums[label] += hidden(w, x[mine]).mean(0)
                    weights[label] += 1
        shared = sums / weights.clamp(min=1)
    return models, shared


def test_fedproto_is_the_papers() -> None:
    of = Reference(skewed(), method=METHOD, model=DEEP, holdout=0.2, evaluate_model="each")
    models, shared = fedproto(of)

    state = of.trained()

    near(state.global_outputs["prototypes"].double().numpy(), shared.numpy())
    assert state.client_states.keys() == models.keys()
    for k, model in models.items():
        for name, wanted in zip(of.names, model, strict=True):
            near(state.client_states[k].model[name].double().numpy(), wanted.numpy())


def test_only_prototypes_are_sent() -> None:
    made = setup(images(), method="fedproto", model=DEEP)
    _, records = run(made, 2)
    size = 4 * CLASSES * WIDTH
    assert [one["bytes_up"] for one in records] == [{"prototypes": 2 * size}] * 2
    assert [one["bytes_down"] for one in records] == [{}, {"prototypes": 2 * size}]


def test_a_class_of_too_few_samples_has_no_prototype() -> None:
    made = setup(images(), [[0, 3, 1], [2, 5, 4, 7]], method="fedproto", model=DEEP, train={"cohort": 2})
    means = [LoopEngine(made).prototypes(made.weights(), client, n) for client, n in ((0, 3), (1, 4))]
    assert [(mean != 0).any(1).tolist() for mean in means] == [[True, False, False], [False, True, True]]


def test_a_class_without_a_global_prototype_adds_nothing() -> None:
    made = setup(images(), method="fedproto", model=DEEP)
    net, batch = EagerNet(made.model), Batch(made.scale(made.data.train.x[:3]), torch.tensor([0, 1, 2]))
    prototypes = torch.tensor([[1.0] * WIDTH, [2.0] * WIDTH, [0.0] * WIDTH])
    context = Context(made.task, made.scale, global_outputs={"prototypes": prototypes})

    value = ToPrototypes(lam=3.0).loss({}, net, batch, context)

    distances = (embedding(net, batch.x) - prototypes).square().mean(1)
    torch.testing.assert_close(value, 3.0 * distances[:2].sum() / 3)


def test_embeddings_of_feature_maps_are_means_over_positions() -> None:
    made = setup(images(side=8), method="fedproto", model={"name": "cnn", "channels": [6]})
    engine, x = LoopEngine(made), torch.rand(2, 1, 8, 8)
    assert made.task.features == 6
    wanted = engine.model.eval()(x, 0, 1).mean((2, 3))
    np.testing.assert_allclose(embedding(engine.net, x).detach(), wanted.detach(), rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedavg", "terms": ["prototypes"]}, 'does not send; valid: upload = "prototypes"'),
        ({"name": "fd", "terms": ["prototypes"]}, 'does not send; valid: upload = "prototypes"'),
        ({"name": "fedproto", "stateful_clients": False}, "sends no models"),
    ],
)
def test_what_does_not_go_together_is_refused(method: Any, message: str) -> None:
    with pytest.raises(FedblendError, match=message):
        experiment(method=method)
