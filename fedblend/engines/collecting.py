"""From trained clients to what the aggregator needs of them, in the process that trained them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator

import torch

from fedblend.engines.base import Collected, Trained, TrainTask
from fedblend.random import stream
from fedblend.world import World


def collect(world: World, task: TrainTask, results: Iterable[Trained], lost: Collection[int]) -> Collected:
    """Protect, count and check each upload, and hand the good ones to the aggregator as they come.

    ``lost`` are clients whose upload never arrives.
    """
    experiment = world.experiment
    kind = experiment.method.upload
    collected = Collected()

    def uploads() -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        for result in _timed(results, collected):
            upload = leaving(world, task, result)
            collected.sent += experiment.protection.sent_bytes(upload, task.weights)
            if experiment.keeps_weights:
                collected.own[result.client] = result.weights
            if result.client in lost:
                continue
            fault = kind.fault(upload, task.weights, world.task)
            if fault:
                collected.refused.append({"client": result.client, "reason": fault})
                continue
            collected.good.append((result.client, result.samples, result.loss))
            if experiment.method.server_step.looks_at_uploads:
                collected.held[result.client] = upload
            yield upload, float(result.samples)

    collected.partial = kind.aggregator(experiment.method.aggregator).partial(uploads())
    return collected


def leaving(world: World, task: TrainTask, result: Trained) -> dict[str, torch.Tensor]:
    """What a client sends: its upload with the protection on it, or what an adversary makes of it."""
    experiment, client = world.experiment, result.client
    payload = experiment.method.upload.payload(result.weights, result.outputs)
    if world.adversaries[client]:
        rng = stream(experiment.seed, "adversary", task.round, client)
        return experiment.adversary.corrupt(payload, task.weights, rng)
    rng = stream(experiment.seed, "protection", task.round, client)
    return experiment.protection.protect(payload, task.weights, experiment.train.lr_in(task.round), rng)


def _timed(results: Iterable[Trained], collected: Collected) -> Iterator[Trained]:
    """Pass results on, adding up the time that making each one took."""
    waiting = iter(results)
    while True:
        start = time.perf_counter()
        result = next(waiting, None)
        collected.seconds += time.perf_counter() - start
        if result is None:
            return
        yield result
