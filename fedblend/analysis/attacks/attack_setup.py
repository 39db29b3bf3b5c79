"""The setup of an attack: a client's update in one round, and the attacker's model of how it was computed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import torch
from torch import nn

from fedblend import engines
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.analysis.attacks.victim import Steps, Victim
from fedblend.core.engine import TrainTask, protected, terms_of
from fedblend.core.errors import FedblendError
from fedblend.core.module import train_mode
from fedblend.core.objective import Context, Plain
from fedblend.core.protection import changes
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.trees import Tensors
from fedblend.engines.assignment import Assignment
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.fields import Train
from fedblend.methods.protections import ClipAndNoise
from fedblend.runs.runner import one_thread

Attacker = Literal["guesses", "plain", "knows"]
"""What an attacker assumes about the random half of a client's objective.

"guesses": it has the objective and draws its own random numbers. "plain": it assumes the task's loss alone
(cross-entropy). "knows": it has the objective and the client's random numbers (a control). Where the objective has the
client's label counts (FedLC, FedRS), "guesses" and "knows" have these too, also where labels are inferred.
"""


@dataclass(frozen=True)
class AttackSetup:
    """A client's update in one round, and everything that an attack on it needs.

    ``observed`` is the update that the server received, by name. It was computed from the images ``x`` [B, C, H, W], on
    the model's scale, with labels ``y`` int64 [B].
    """

    snapshot: RoundSnapshot
    client: int
    attacker: Attacker
    victim: Victim
    observed: Mapping[str, torch.Tensor]
    x: torch.Tensor
    y: torch.Tensor

    @property
    def drawn(self) -> bool:
        """Whether the client was in the run's cohort of this round; otherwise its update is simulated."""
        return self.client in self.snapshot.cohort

    @property
    def steps(self) -> int:
        return self.victim.steps.count if self.victim.steps else 1


def prepare(
    snapshot: RoundSnapshot,
    client: int,
    *,
    images: int | None = None,
    steps: int | None = None,
    attacker: Attacker = "guesses",
    device: str | None = None,
) -> AttackSetup:
    """Compute a client's update in a round of a run, with the run's objective, terms, training and protection.

    With ``images``, the client trains on that many of its samples, all in each step, and with ``steps`` for that many
    steps (the Fed-AugMix paper: one batch of 4, and 5 steps). The default is the run's training. The attacker is
    assumed to have the composition of each batch.

    Raises :class:`FedblendError` for unknown clients, clients without samples, and too large ``images``.
    """
    if attacker not in get_args(Attacker):
        raise FedblendError(f"attacker: {attacker!r} is not valid; valid: {', '.join(get_args(Attacker))}")
    if not 0 <= client < len(snapshot.setup.population):
        last = len(snapshot.setup.population) - 1
        raise FedblendError(f"client: {client} is not valid: the run has clients 0 to {last}")
    method = snapshot.setup.experiment.method
    if snapshot.setup.own_layers or method.personal.objective(method.objective) is not method.objective:
        raise FedblendError(
            f"method.personal: clients of '{method.personal.name}' keep layers or have a loss of their own; attacks "
            "are built for updates of whole models by the method's objective; valid: another method"
        )
    setup, task = _limit_work(snapshot.setup, snapshot.task_of(client), client, images, steps)
    device = device or setup.experiment.device
    engines.require_device(device)
    with one_thread():
        engine = LoopEngine(setup, device)
        one = engine.assign(task, client)
        (trained,) = engine.train(task, [client])
        victim = _make_victim(engine, task, one, attacker)
        sent, _ = protected(setup, task, trained)
        observed = victim.update_of(sent)
    if setup.experiment.protection.name != "none":
        victim = replace(victim, protect=_repeated_protection(setup, task, client, sent, observed))
    x, y = (half.to(engine.device) for half in setup.samples(client, one.samples))
    return AttackSetup(snapshot, client, attacker, victim, observed, engine.scale(x), y)


def _limit_work(
    setup: Setup, task: TrainTask, client: int, images: int | None, steps: int | None
) -> tuple[Setup, TrainTask]:
    """Reduce the client's work to ``images`` samples, all of them in each of ``steps`` steps."""
    held = int(task.sizes[client])
    if not held:
        raise FedblendError(f"client: {client} has no samples in this round; valid: a client with samples")
    if images is None:
        if steps is not None:
            raise FedblendError(f"steps: {steps} is valid only with a number of images for each step; give images")
        return setup, task
    if not 1 <= images <= held:
        raise FedblendError(f"images: {images} is not valid: client {client} holds {held}; valid: 1 to {held}")
    if steps is not None and steps < 1:
        raise FedblendError(f"steps: {steps} is not valid; valid: 1 and more")
    settings = setup.experiment.train
    passes = steps or settings.steps or settings.epochs
    train = settings.model_copy(update={"batch_size": images, "epochs": passes, "steps": None})
    sizes = task.sizes.copy()
    sizes[client] = images
    return replace(setup, experiment=setup.experiment.model_copy(update={"train": train})), replace(task, sizes=sizes)


def _require_plain_steps(settings: Train) -> None:
    """Raise :class:`FedblendError` for training whose steps the attack does not repeat."""
    steps = "the attack repeats steps of SGD with one learning rate in a round and one batch a step"
    refused = {
        "optimizer": (settings.optimizer.steps != "sgd", f"{steps}; valid: sgd"),
        "schedule_in_round": (settings.schedule_in_round is not None, f"{steps}; valid: a run without it"),
        "accumulate": (settings.accumulate > 1, f"{steps}; valid: 1"),
        "augment": (settings.augment, "the attack repeats steps on pictures as they are; valid: a run without it"),
        "optimizer_state": (settings.optimizer_state == "keep", "the attack begins without momentum; valid: reset"),
    }
    for field, (is_set, reason) in refused.items():
        if is_set:
            raise FedblendError(f"train.{field}: {reason}")


def _make_victim(engine: LoopEngine, task: TrainTask, one: Assignment, attacker: Attacker) -> Victim:
    setup, device, settings = engine.setup, engine.device, engine.setup.experiment.train
    method = setup.experiment.method
    _require_plain_steps(settings)
    rows = [one.order[a:b].tolist() for a, b in pairwise(one.bounds.tolist())]
    steps = Steps(settings.lr_in(task.round), rows, settings.momentum, settings.weight_decay, settings.clip_norm)
    begun = {name: t.to(device) for name, t in task.start_of(one.client).items()}
    objective = method.objective.fallback() if one.plain else method.objective
    context = Context(
        setup.task,
        engine.scale,
        {name: t.to(device) for name, t in one.pool.tensors.items()},
        begun if method.terms or objective.reads_start else {},
        {name: t.to(device) for name, t in task.outputs_of(one.client).items()},
        {name: t.to(device) for name, t in task.state_of(one.client).parts.items()},
        {name: t.to(device) for name, t in task.server_state.items()},
        pool_stored=method.sharing.plan.is_stored,
    )
    drawn = {} if attacker == "plain" else _random_numbers(setup, task, one, attacker)
    return Victim(
        _without_dropout(engine.model),
        context,
        Plain() if attacker == "plain" else objective,
        terms_of(method, task),
        {name: torch.from_numpy(array).to(device) for name, array in drawn.items()},
        steps,
        begun,
    )


def _random_numbers(setup: Setup, task: TrainTask, one: Assignment, attacker: Attacker) -> dict[str, np.ndarray]:
    """Return the random half of the objective: the client's, or the attacker's own draw by the same rules."""
    if attacker == "knows":
        return one.drawn
    experiment = setup.experiment
    other = int(stream(experiment.seed, "attacker", task.round, one.client).integers(1 << 31))
    attacker_setup = replace(setup, experiment=experiment.model_copy(update={"seed": other}))
    return LoopEngine(attacker_setup).assign(task, one.client).drawn


def _without_dropout(model: nn.Module) -> nn.Module:
    """Return a copy in training mode without dropout: no attacker has the client's dropped units."""
    attacked = train_mode(copy.deepcopy(model))
    for layer in attacked.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.eval()
    return attacked


def _repeated_protection(
    setup: Setup, task: TrainTask, client: int, sent: Tensors, observed: Tensors
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return the part of the protection that an attacker can repeat.

    It scales an update as the client's clipping did, and sets entries to 0 where the protection did, so that the
    attacker's costs ignore them. The clipped norm is of all that was sent. What is no trained weight (batch norm's
    means) the attacker has seen, so it knows what norm was left for the others.
    """
    protection, nonzero = setup.experiment.protection, {name: tensor != 0 for name, tensor in observed.items()}
    order, bound = 2, math.inf
    if isinstance(protection, ClipAndNoise) and protection.clip and not setup.adversaries[client]:
        order = 2 if protection.distribution == "gaussian" else 1
        bound = protection.clip * (setup.experiment.train.lr_in(task.round) if protection.on == "gradients" else 1.0)
        seen = {n: t for n, t in changes(sent, setup.shared(task.weights)).items() if n not in observed}
        # Noise on what the attacker has seen hides its norm.
        if seen and not (protection.size and protection.side == "client"):
            left = max(0.0, bound**order - float(_norm(seen, order)) ** order) ** (1 / order)
            bound = max(left, float(_norm(observed, order)))  # where these differ, numbers were rounded

    def protect(update: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scaled: torch.Tensor | float = 1.0
        if bound < math.inf:
            norm = _norm(update, order)
            scaled = (bound / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
        return {name: torch.where(nonzero[name], scaled * t, torch.zeros_like(t)) for name, t in update.items()}

    return protect


def _norm(tensors: Tensors, order: int) -> torch.Tensor:
    norms = torch.stack([torch.linalg.vector_norm(t, order) for t in tensors.values()])
    return torch.linalg.vector_norm(norms, order)
