"""Baselines for non-IID data beside an independent computation of their papers' equations.

The reference is float64 (:mod:`baselines_helpers`), written from the papers' algorithm boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from baselines_helpers import GROUPS, Reference, descend, near, skewed, softmax
from helpers import federation_of, images, run, setup
from torch.nn import functional as F

from fedblend.core.aggregator import LocalWork
from fedblend.core.callbacks import Callback
from fedblend.core.context import Batch, Context, StepPlan, Task
from fedblend.core.loop import RoundLoop
from fedblend.core.trees import strip_prefix
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.nets import EagerNet
from fedblend.methods.aggregators.fednova import NormalisedMean
from fedblend.methods.objectives.calibrated import FedLC, FedRS
from fedblend.methods.objectives.fedmix import FedMix
from fedblend.methods.objectives.terms import ToPrototypes
from fedblend.methods.uploads import embedding

STEPS, LR, CLIENTS = 3, 0.1, 4


def scaffold(of: Reference, option: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Karimireddy et al. 2020, Algorithm 1, with eta_g = 1."""
    x, c = of.first, np.zeros_like(of.first)
    variates = [np.zeros_like(x) for _ in of.clients]
    for number, lr, cohort in of.cohorts():
        moves, changes = [], []
        for i in cohort:
            steps = of.steps(i, number)
            y = descend(x, steps, lr, lambda g, w, i=i, c=c: g - variates[i] + c)
            renewed = of.gradient(i)(x) if option == "I" else variates[i] - c + (x - y) / (len(steps) * lr)
            moves.append(y - x)
            changes.append(renewed - variates[i])
            variates[i] = renewed
        x = x + np.mean(moves, 0)
        c = c + np.sum(changes, 0) / len(of.clients)
    return x, c, variates


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold(option: str) -> None:
    of = Reference(method={"name": "scaffold", "terms": [{"name": "scaffold", "option": option}]})
    x, c, variates = scaffold(of, option)

    state = of.trained()

    near(of.flat(state.weights), x)
    near(of.flat(state.server_part("terms.0")), c)
    for i in state.client_states:
        near(of.flat(strip_prefix("terms.0/", state.client_states[i].parts)), variates[i])


SOLVERS: dict[str, tuple[float, float]] = {
    "sgd": (0.0, 0.0),
    "momentum": (0.7, 0.0),
    "proximal": (0.0, 2.0),
    "both": (0.7, 2.0),
}


def vectors(steps: int, eta: float, rho: float, mu: float) -> np.ndarray:
    """a_k: how often each gradient of SGD with momentum on a proximal loss is in w_0 - w_tau, over eta.

    By linearity: the derivative of the steps by each gradient, one after another.
    """
    weights = []
    for step in range(steps):
        v = w = 0.0
        for i in range(steps):
            v = rho * v + (i == step) + mu * w
            w = w - eta * v
        weights.append(-w / eta)
    return np.array(weights)


def fednova(of: Reference, rho: float, mu: float) -> np.ndarray:
    """Wang et al. 2020, equation 7, with tau_eff = sum_k p_k |a_k|_1."""
    x = of.first
    for number, lr, cohort in of.cohorts():
        p = of.shares(cohort)
        norms, directions = [], []
        for k in cohort:
            steps, v, w = of.steps(k, number), np.zeros_like(x), x
            for gradient in steps:
                v = rho * v + gradient(w) + mu * (w - x)
                w = w - lr * v
            norms.append(vectors(len(steps), lr, rho, mu).sum())
            directions.append((x - w) / lr / norms[-1])
        x = x - p @ norms * lr * np.tensordot(p, directions, 1)
    return x


@pytest.mark.parametrize("solver", SOLVERS)
def test_fednova(solver: str) -> None:
    rho, mu = SOLVERS[solver]
    terms = [{"name": "proximal", "mu": mu}] if mu else []
    of = Reference(method={"name": "fednova", "terms": terms}, train={"momentum": rho})
    near(of.flat(of.trained().weights), fednova(of, rho, mu))


def test_fednovas_norm_of_a_site_that_states_any_number_of_samples_takes_no_time() -> None:
    steps, rho, pull = 10**12, 0.9, 0.1 * 2.0
    momentum = NormalisedMean(LocalWork(lambda client, samples: steps, 0.1, rho, 0.0, [])).norm(0, 1)
    assert momentum == pytest.approx((steps - rho / (1 - rho)) / (1 - rho), rel=1e-12)
    proximal = NormalisedMean(LocalWork(lambda client, samples: steps, 0.1, 0.0, 2.0, [])).norm(0, 1)
    assert proximal == pytest.approx(1 / pull, rel=1e-12)


def test_fednova_does_not_extrapolate_running_statistics() -> None:
    made = setup(images(), GROUPS, model={"name": "module", "path": "helpers:BatchNormNet"}, method="fednova")
    loop = federation_of(made)
    updates: dict[int, Any] = {}

    class Keep(Callback):
        def on_updates(self, task: Any, result: Any) -> None:
            updates[task.round] = result.partial.mean()

    state, _ = run(RoundLoop(made, LoopEngine(made), [Keep()]), 1)

    near(state.weights["norm.running_var"].numpy(), updates[0]["norm.running_var"].numpy())
    assert loop.spec.trained == ["norm.weight", "norm.bias", "last.weight", "last.bias"]


def test_feddyn() -> None:
    alpha = 0.05
    of = Reference(method={"name": "feddyn", "terms": [{"name": "feddyn", "alpha": alpha}]})
    theta, h = of.first, np.zeros_like(of.first)
    kept = [np.zeros_like(theta) for _ in of.clients]
    for number, lr, cohort in of.cohorts():
        models = []
        for k in cohort:
            steps = of.steps(k, number)
            model = descend(theta, steps, lr, lambda g, w, k=k, theta=theta: g - kept[k] + alpha * (w - theta))
            kept[k] = kept[k] - alpha * (model - theta)
            models.append(model)
        h = h - alpha / len(of.clients) * sum(model - theta for model in models)
        theta = np.mean(models, 0) - h / alpha

    state = of.trained()

    near(of.flat(state.weights), theta)
    near(of.flat(state.server_part("terms.0")), h)


def test_ditto() -> None:
    lam = 0.7
    of = Reference(method={"name": "ditto", "personal": {"name": "ditto", "lambda": lam}})
    w, personal = of.first, {}
    for number, lr, cohort in of.cohorts():
        models = []
        for k in cohort:
            models.append(descend(w, of.steps(k, number), lr))
            own = of.steps(k, number, personal=True)
            personal[k] = descend(personal.get(k, w), own, lr, lambda g, v, w=w: g + lam * (v - w))
        w = of.mean(cohort, models)

    state = of.trained()

    near(of.flat(state.weights), w)
    assert state.client_states.keys() == personal.keys()
    for k, v in personal.items():
        near(of.flat(state.client_states[k].personal), v)


def pfedme(of: Reference, options: dict[str, Any]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Dinh et al. 2020, Algorithm 1 with beta = 1, and each client's theta at its last w_k."""
    lam, w, personal = options["lambda"], of.first, {}

    def nearest(gradient: Any, centre: np.ndarray) -> np.ndarray:
        theta = centre
        for _ in range(options["steps"]):
            theta = theta - options["personal_lr"] * (gradient(theta) + lam * (theta - centre))
        return theta

    for number, lr, cohort in of.cohorts():
        models = []
        for k in cohort:
            local = theta = w
            for gradient in of.steps(k, number):
                theta = nearest(gradient, local)
                local = local - lr * lam * (local - theta)
            models.append(local)
            personal[k] = nearest(of.gradient(k), local)
        w = np.mean(models, 0)
    return w, personal


def test_pfedme() -> None:
    options = {"lambda": 3.0, "steps": 4, "personal_lr": 0.05}
    of = Reference(method={"name": "pfedme", "personal": options})
    w, personal = pfedme(of, options)

    state = of.trained()

    near(of.flat(state.weights), w)
    assert state.client_states.keys() == personal.keys()
    for k, theta in personal.items():
        near(of.flat(state.client_states[k].personal), theta)


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_server_optimisers(name: str) -> None:
    options: dict[str, Any] = {"lr": 0.5, "beta": 0.8} if name == "fedavgm" else {"lr": 0.02, "beta_1": 0.8}
    of = Reference(method={"name": name, "server_step": {"name": name, **options}})
    beta_2, tau = 0.99, 1e-3
    x, m, v = of.first, np.zeros_like(of.first), np.full_like(of.first, tau**2)
    for number, lr, cohort in of.cohorts():
        delta = of.mean(cohort, [descend(x, of.steps(k, number), lr) for k in cohort]) - x
        if name == "fedavgm":
            m = 0.8 * m + delta
            x = x + 0.5 * m
            continue
        m = 0.8 * m + 0.2 * delta
        if name == "fedadagrad":
            v = v + delta**2
        elif name == "fedadam":
            v = beta_2 * v + (1 - beta_2) * delta**2
        else:
            v = v - (1 - beta_2) * delta**2 * np.sign(v - delta**2)
        x = x + 0.02 * m / (np.sqrt(v) + tau)

    near(of.flat(of.trained().weights), x)


def test_moon() -> None:
    """With a hidden layer; the reference is written with functions of PyTorch in float64."""
    made = setup(
        method={"name": "moon", "terms": [{"name": "moon", "mu": 2.0, "tau": 0.7}]},
        model={"name": "mlp", "hidden": [5]},
        train={"cohort": CLIENTS, "epochs": STEPS, "batch_size": 1000, "lr": LR},
    )
    names = list(made.weights())
    w = [tensor.double() for tensor in made.weights().values()]
    previous = [list(w) for _ in range(CLIENTS)]

    def hidden(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ weights[0].T + weights[1])

    for _ in range(2):
        models = []
        for k in range(CLIENTS):
            x, y = made.samples(k, int(made.population.sizes[k]))
            x, local = made.scale(x).flatten(1).double(), list(w)
            for _ in range(STEPS):
                local = [p.detach().requires_grad_() for p in local]
                z = hidden(local, x)
                near_, far = ((F.cosine_similarity(z, hidden(other, x)) / 0.7).exp() for other in (w, previous[k]))
                loss = F.cross_entropy(z @ local[2].T + local[3], y) - 2.0 * (near_ / (near_ + far)).log().mean()
                local = [p - LR * g for p, g in zip(local, torch.autograd.grad(loss, local), strict=True)]
            previous[k] = [p.detach() for p in local]
            models.append(previous[k])
        share = made.population.sizes / made.population.sizes.sum()
        w = [sum(s * m[i] for s, m in zip(share, models, strict=True)) for i in range(len(w))]

    state, _ = run(made, 2)

    for name, wanted in zip(names, w, strict=True):
        near(state.weights[name].double().numpy(), wanted.numpy())


Slope = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(logits, logits of the global model, one-hot labels, the client's samples by class) -> the loss's slope by logits."""


def averaged(of: Reference, slope: Slope) -> np.ndarray:
    """FedAvg with another loss of clients."""
    w = of.first
    for number, lr, cohort in of.cohorts():
        models = []
        for k in cohort:
            x, y = of.samples(k)
            label = np.eye(3)[y]

            def gradient(v: np.ndarray, rows: np.ndarray, x: Any = x, label: Any = label, w: Any = w) -> np.ndarray:
                made = slope(x[rows] @ v.T, x[rows] @ w.T, label[rows], label.sum(0))
                return made.T @ x[rows] / len(rows)

            steps = [lambda v, rows=rows, gradient=gradient: gradient(v, rows) for rows in of.batches(k, number)]
            models.append(descend(w, steps, lr))
        w = of.mean(cohort, models)
    return w


def fedntd(beta: float, tau: float) -> Slope:
    def slope(z: np.ndarray, z_global: np.ndarray, label: np.ndarray, counts: np.ndarray) -> np.ndarray:
        student, teacher = (np.where(label, 0.0, np.exp(one / tau)) for one in (z, z_global))
        student, teacher = (one / one.sum(1, keepdims=True) for one in (student, teacher))
        return softmax(z) - label + beta * tau**2 * (student - teacher) / tau

    return slope


def fedlc(tau: float) -> Slope:
    def slope(z: np.ndarray, z_global: np.ndarray, label: np.ndarray, counts: np.ndarray) -> np.ndarray:
        # The limit of no sample: the class takes no part.
        e = np.where(counts > 0, np.exp(z - tau * np.maximum(counts, 1) ** -0.25), 0.0)
        return e / e.sum(1, keepdims=True) - label

    return slope


def fedrs(alpha: float) -> Slope:
    def slope(z: np.ndarray, z_global: np.ndarray, label: np.ndarray, counts: np.ndarray) -> np.ndarray:
        factor = np.where(counts > 0, 1.0, alpha)
        return factor * (softmax(factor * z) - label)

    return slope


CASES: dict[str, tuple[Any, Slope]] = {
    "fedntd": ({"name": "fedntd", "terms": [{"name": "fedntd", "beta": 0.7, "tau": 2.0}]}, fedntd(0.7, 2.0)),
    "fedlc": ({"name": "fedlc", "objective": {"tau": 0.8}}, fedlc(0.8)),
    "fedrs": ({"name": "fedrs", "objective": {"alpha": 0.3}}, fedrs(0.3)),
}
"""By method: its fields and the slope of its loss."""


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_papers(name: str) -> None:
    method, slope = CASES[name]
    of = Reference(skewed(), method=method)
    near(of.flat(of.trained().weights), averaged(of, slope))


def test_label_counts_are_those_of_the_data_that_have_arrived() -> None:
    made = setup(groups=skewed(), arrival={"first": 0.4, "clients": 0.0})
    assert made.label_counts(1, int(made.sizes(0)[1])).tolist() == [4, 0, 0]
    assert made.label_counts(1, 9).tolist() == [5, 4, 0]


def test_a_mixed_target_with_a_class_that_the_client_lacks_has_a_finite_loss() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(2, 3), torch.randn(4, 2)
    context = Context(Task("classification", 3), lambda x: x, {"x": torch.randn(1, 2), "y": torch.ones(1, 3) / 3})
    plan = StepPlan(np.array([4]), 4, 0, entries=1, label_counts=np.array([3, 1, 0]))
    for objective in (FedLC(base=FedMix(lam=0.5)), FedRS(alpha=0.0, base=FedMix(lam=0.5))):
        row = {name: torch.from_numpy(a)[0] for name, a in objective.draw(np.random.default_rng(0), plan).items()}
        (phase,) = objective.phases()
        loss = phase(EagerNet(model), Batch(x, torch.tensor([0, 0, 0, 1])), row, context)
        assert torch.isfinite(loss)
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, list(model.parameters())))


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
