"""A round as one would write it by hand in PyTorch: the base that the other contestants are measured against."""

from __future__ import annotations

import one_thread  # noqa: F401  # isort: skip

import time

import torch
from jobs import Job, load
from outcome import check_rounds, options, report, wait_for
from torch import nn

Weights = dict[str, torch.Tensor]


def train(model: nn.Module, job: Job, client: int, weights: Weights) -> None:
    """Train ``model`` on one client from ``weights``."""
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.settings.lr)
    for _ in range(job.settings.epochs):
        for x, y in job.batches(client):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def one_round(model: nn.Module, job: Job, round: int, weights: Weights) -> Weights:
    """Train the round's clients in turn and average their weights."""
    total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    cohort = job.cohort(round)
    for client in cohort:
        train(model, job, client, weights)
        for name, tensor in model.state_dict().items():
            total[name] += tensor
    return {name: tensor / len(cohort) for name, tensor in total.items()}


def main() -> None:
    """Time all rounds."""
    given = options("a bare loop").parse_args()
    job = load(given.job).on(given.device)
    check_rounds(given, job)
    model, seconds = job.network().to(given.device).train(), []
    weights = {name: tensor.to(given.device) for name, tensor in job.start.items()}
    _ = job.local
    for round in range(given.rounds):
        begun = time.perf_counter()
        weights = one_round(model, job, round, weights)
        wait_for(given.device)
        seconds.append(time.perf_counter() - begun)
    report("bare", [], job, given, seconds, weights)


if __name__ == "__main__":
    main()
