"""A round in FedLab's standalone pipeline: its synchronous server and its serial SGD trainer."""

from __future__ import annotations

import one_thread  # noqa: F401  # isort: skip

import logging
import sys
import time
from collections.abc import Iterable
from types import ModuleType

import torch
from jobs import Job, load
from outcome import check_rounds, options, report

# FedLab's package imports torchvision for data sets that are not used here, and its wish for it is for another
# build of torch than the one that all contestants run on.
sys.modules["torchvision"] = torchvision = ModuleType("torchvision")
torchvision.transforms = ModuleType("torchvision.transforms")

from fedlab.contrib.algorithm import SGDSerialClientTrainer, SyncServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Clients(FedDataset):
    """The job's clients as FedLab asks for them.

    With ``loader`` it hands out DataLoaders, as FedLab's own data sets do; else a list of ready batches, which
    takes no time to collate.
    """

    def __init__(self, job: Job, loader: bool) -> None:
        self.job = job
        self.loader = loader

    def get_dataloader(self, id: int, batch_size: int, train: bool = True) -> Batches:
        if not self.loader:
            return list(self.job.batches(id))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*self.job.local[id]), batch_size)


class Server(SyncServerHandler):
    """FedLab's server that asks for the job's cohorts instead of drawing its own."""

    def __init__(self, job: Job, rounds: int) -> None:
        super().__init__(job.network(), rounds, job.settings.cohort / job.settings.clients)
        self.job = job

    @property
    def num_clients_per_round(self) -> int:
        # Its own int(ratio * clients) may round down.
        return self.job.settings.cohort

    def sample_clients(self) -> list[int]:
        return self.job.cohort(self.round)


class Timed(StandalonePipeline):
    """FedLab's pipeline with a clock where it evaluates."""

    def __init__(self, handler: Server, trainer: SGDSerialClientTrainer) -> None:
        super().__init__(handler, trainer)
        self.seconds: list[float] = []
        self.last = time.perf_counter()

    def evaluate(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


def main() -> None:
    """Time all rounds."""
    parser = options("FedLab")
    parser.add_argument("--loader", action="store_true", help="DataLoaders as in FedLab's own data sets; slower")
    given = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    job = load(given.job)
    check_rounds(given, job)
    trainer = SGDSerialClientTrainer(job.network(), job.settings.clients)
    trainer.setup_dataset(Clients(job, given.loader))
    trainer.setup_optim(job.settings.epochs, job.settings.batch_size, job.settings.lr)
    server = Server(job, given.rounds)
    _ = job.local
    pipeline = Timed(server, trainer)
    pipeline.main()
    report("fedlab", ["fedlab"], job, given, pipeline.seconds, server.model.state_dict(), loader=given.loader)


if __name__ == "__main__":
    main()
