"""A round in pfl-research's simulator, in this process or in several that torchrun starts (gloo)."""

from __future__ import annotations

import one_thread  # noqa: F401  # isort: skip
from pfl_device import DEVICE  # isort: skip

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import chain

import torch
from jobs import Job, load
from outcome import check_rounds, options, report, wait_for

# The model's module comes first: importing it makes PyTorch pfl's backend.
from pfl.model.pytorch import PyTorchModel  # isort: skip
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from torch import nn


class Network(nn.Module):
    """A network with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        # pfl's examples set the mode in every step; that it is set already is cheaper to see.
        if self.training == eval:
            self.train(not eval)
        return nn.functional.cross_entropy(self.inner(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> Mapping[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y, eval=eval)) * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Seconds from the end of one round to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.last = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        wait_for(DEVICE)
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        return False, Metrics()


def train(job: Job, rounds: int, network: Network) -> list[float]:
    """Train for some rounds and return the seconds of each."""
    settings = job.settings
    # Every rank runs through the same list and takes its share of each cohort.
    drawn = chain.from_iterable(job.cohort(round) for round in range(rounds))
    users = FederatedDataset.from_slices(dict(enumerate(job.local)), drawn.__next__)
    nobody = FederatedDataset.from_slices({0: job.local[0]}, lambda: 0)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            # Round 0 is always evaluated: it is one of those that warm up.
            evaluation_frequency=rounds + 1,
            train_cohort_size=settings.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=nobody, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=settings.epochs, local_learning_rate=settings.lr, local_batch_size=settings.batch_size
        ),
        NNEvalHyperParams(local_batch_size=settings.samples),
        [clock],
        send_metrics_to_platform=False,
    )
    return clock.seconds


def start_ranks(ranks: int) -> int:
    """Start this command again as several ranks; returns their exit status."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *sys.argv]
    return subprocess.call([sys.executable, *command])


def main() -> None:
    """Time all rounds."""
    given = options("pfl", ranks=(1, 2, 4)).parse_args()
    if given.ranks > 1 and "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(given.ranks))
    job = load(given.job).on(DEVICE)
    check_rounds(given, job)
    if job.settings.cohort % given.ranks:
        raise SystemExit(f"a cohort of {job.settings.cohort} cannot be dealt equally to {given.ranks} ranks")
    network = Network(job.network())
    seconds = train(job, given.rounds, network)
    if os.environ.get("RANK", "0") == "0":
        report("pfl", ["pfl"], job, given, seconds, network.inner.state_dict())


if __name__ == "__main__":
    main()
