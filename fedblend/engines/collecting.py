"""From trained clients to what the aggregator needs of them, in the process that trained them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator

import torch

from fedblend.engines.base import Collected, Trained, TrainTask
from fedblend.random import stream
from fedblend.uploads import bytes_of, fault_of
from fedblend.world import World


def collect(world: World, task: TrainTask, results: Iterable[Trained], lost: Collection[int]) -> Collected:
    """Protect, count and check each upload, and hand the good ones to the aggregator as they come.

    ``lost`` are clients whose upload never arrives.
    """
    experiment = world.experiment
    collected = Collected()

    def uploads() -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        for result in _timed(results, collected):
            rng = stream(experiment.seed, "protection", task.round, result.client)
            upload = experiment.protection.protect(result.upload, task.weights, rng)
            collected.sent += bytes_of(upload)
            if result.client in lost:
                continue
            fault = fault_of(upload, task.weights)
            if fault:
                collected.refused.append({"client": result.client, "reason": fault})
                continue
            collected.good.append((result.client, result.samples, result.loss))
            if experiment.method.server_step.needs_uploads:
                collected.uploads.append((upload, float(result.samples)))
            yield upload, float(result.samples)

    collected.partial = experiment.method.aggregator.partial(uploads())
    return collected


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
