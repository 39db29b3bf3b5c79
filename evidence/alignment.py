"""Gradients of FedMix's terms, compared with the gradient over all clients' data (docs/results/fedmix.md).

Setting: the split of examples/fashion-mnist.toml, FedAvg's weights after some rounds (seed 0), 20 clients. Gradients:
of the client's own loss, of FedMix's three terms, and of Global Mixup with fixed lambda. Each has its norm and its
cosine to the gradient of the plain loss over all clients' training data. All are computed at the round's global
weights, and again after the client's local training.

FedMix is affine in (x_g, y_g), so its mean over all entries is its value at their mean.

    python evidence/run.py alignment
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.core.context import Batch, Context
from fedblend.core.engine import TrainTask
from fedblend.core.loop import RoundLoop
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.sharing import ClientData
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.objectives.fedmix import FedMix, GlobalMixup
from fedblend.methods.sharing.means import SharedMeans
from fedblend.runs.api import expand_file

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = (0, 5, 20, 60)
CLIENTS = range(0, 60, 3)
LAM = 0.1
PARTNERS = 4
"""Random partners of each sample in the estimate of Global Mixup's gradient."""
Tensors = dict[str, torch.Tensor]


class Gradients:
    """Gradients of losses at given weights, flat, for the terms of FedMix."""

    def __init__(self, engine: LoopEngine, setup: Setup) -> None:
        self.engine, self.setup = engine, setup
        sizes = setup.sizes(0)
        means = [self._mean(k, int(sizes[k])) for k in range(len(setup.population))]
        entry = {name: torch.stack([m[name][0] for m in means]).mean(0, keepdim=True) for name in ("x", "y")}
        indices = torch.from_numpy(setup.population.order)
        self.x, self.y = setup.data.train.x[indices], setup.data.train.y[indices]
        self.means = Context(setup.task, setup.scale, entry)
        self.raw = Context(setup.task, setup.scale, {"x": self.x, "y": self.y})

    def _mean(self, client: int, size: int) -> dict[str, torch.Tensor]:
        x, y = self.setup.samples(client, size)
        rng = stream(0, "alignment", client=client)
        payload = SharedMeans().share(ClientData(x, y, self.setup.task, self.setup.scale, lambda h, k: h, rng))
        assert payload is not None
        return payload

    def _flat(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.engine.params)])

    def over_all_data(self) -> torch.Tensor:
        """The gradient of the plain loss over all clients' data."""
        total = torch.zeros(sum(p.numel() for p in self.engine.params))
        for rows in torch.arange(len(self.y)).split(1000):
            outputs = self.engine.net(self.setup.scale(self.x[rows]))
            total += self._flat(self.setup.task.loss(outputs, self.y[rows])) * (len(rows) / len(self.y))
        return total

    def terms(self, client: int) -> dict[str, torch.Tensor]:
        """The gradients on a client's data, by the term's name."""
        x, y = self.setup.samples(client, int(self.setup.sizes(0)[client]))
        batch, net, task = Batch(self.setup.scale(x), y), self.engine.net, self.setup.task
        drawn = {"lam": torch.tensor(LAM), "entry": torch.tensor(0)}
        whole = self._flat(FedMix().loss(net, batch, drawn, self.means))
        without = self._flat(FedMix(taylor_weight=0.0).loss(net, batch, drawn, self.means))
        shrunk = self._flat(task.loss(net((1 - LAM) * batch.x), y))
        label = self._flat(task.loss(net((1 - LAM) * batch.x), self.means.pool["y"][0]))
        rng = np.random.Generator(np.random.Philox(client))
        mixed = torch.zeros_like(whole)
        for _ in range(PARTNERS):
            partner = torch.from_numpy(rng.integers(len(self.y), size=len(y)))
            mix = {"lam": torch.tensor(LAM), "partner": partner}
            mixed += self._flat(GlobalMixup().loss(net, batch, mix, self.raw)) / PARTNERS
        return {
            "own loss (FedAvg)": self._flat(task.loss(net(batch.x), y)),
            "FedMix": whole,
            "Global Mixup, fixed lambda": mixed,
            "1st term: own labels at (1 - lambda) x": (1 - LAM) * shrunk,
            "2nd term: others' labels": LAM * label,
            "3rd term: Taylor": whole - without,
        }


def mean_rows(gradients: Gradients, weights_of: Callable[[int], Tensors]) -> dict[str, dict[str, float]]:
    """Each term's norm and cosines, to the gradient over all data and to Global Mixup's; means over the clients."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for client in CLIENTS:
        gradients.engine._load(weights_of(client))
        gradients.engine.model.eval()
        target = gradients.over_all_data()
        found = gradients.terms(client)
        mixup = found["Global Mixup, fixed lambda"]
        for name, g in found.items():
            cosines = [float(torch.nn.functional.cosine_similarity(g, other, 0)) for other in (target, mixup)]
            rows.setdefault(name, []).append((float(g.norm()), *cosines))
    names = ("norm", "cosine_to_all", "cosine_to_global_mixup")
    return {
        name: {k: round(float(v), 4) for k, v in zip(names, np.mean(values, 0), strict=True)}
        for name, values in rows.items()
    }


def write(path: Path) -> None:
    """Train with FedAvg, compare gradients at the chosen rounds, and write the result."""
    torch.set_num_threads(1)
    experiment = expand_file(ROOT / "examples" / "fashion-mnist.toml", [], [0]).experiments["fedavg-seed0"]
    setup = make_setup(experiment)
    engine = LoopEngine(setup)
    loop, gradients = RoundLoop(setup, engine), Gradients(engine, setup)
    state, _ = loop.start()
    result: dict[str, Any] = {"command": "python evidence/run.py alignment", "lambda": LAM, "rounds": {}}
    for round in range(max(ROUNDS) + 1):
        if round in ROUNDS:
            task = TrainTask(state.round, state.weights, None, setup.sizes(0))
            trained = {update.client: update.weights for update in engine.train(task, CLIENTS)}
            result["rounds"][round] = {
                "at the global weights": mean_rows(gradients, lambda client: state.weights),  # noqa: B023
                "after local training": mean_rows(gradients, lambda client: trained[client]),  # noqa: B023
            }
            sys.stderr.write(f"round {round}: {json.dumps(result['rounds'][round], indent=1)}\n")
        if round < max(ROUNDS):
            state, _ = loop.round(state)
    path.write_text(json.dumps(result, indent=1) + "\n")
