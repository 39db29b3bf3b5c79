"""A round in Flower's simulation: FedAvg's strategy, and Ray actors of one processor each as clients."""

from __future__ import annotations

import one_thread  # noqa: F401  # isort: skip

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path

from jobs import Job, load
from outcome import check_rounds, options, report

# Before Flower and Ray are imported: no telemetry, no look for newer versions.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import flower_client
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class Timed(FedAvg):
    """FedAvg with the job's cohorts and a clock from the making of a round's messages to its average."""

    def __init__(self, job: Job, path: Path) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.job = job
        self.path = str(path.resolve())
        self.seconds: list[float] = []
        self.begun = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.begun = time.perf_counter()
        nodes, cohort = sorted(grid.get_node_ids()), self.job.cohort(server_round - 1)
        # A node for every client of the job, or only as many nodes as train in a round.
        chosen = [nodes[c] for c in cohort] if len(nodes) == self.job.settings.clients else nodes
        return [self.message(arrays, node, client) for node, client in zip(chosen, cohort, strict=True)]

    def message(self, arrays: ArrayRecord, node: int, client: int) -> Message:
        """What one node is asked to do."""
        content = {"arrays": arrays, "config": ConfigRecord({"client": client, "job": self.path})}
        return Message(content=RecordDict(content), message_type=MessageType.TRAIN, dst_node_id=node)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if len(replies) != self.job.settings.cohort or any(reply.has_error() for reply in replies):
            raise RuntimeError(f"round {server_round}: not all clients answered")
        result = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.begun)
        return result


def simulate(strategy: Timed, given: argparse.Namespace) -> ArrayRecord:
    """Run the strategy for some rounds on simulated nodes; returns the last weights."""
    server, last = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        # Nodes are made while this is started: all must be there, for the cohorts are chosen from their list.
        while len(list(grid.get_node_ids())) < given.nodes:
            time.sleep(0.1)
        result = strategy.start(grid, ArrayRecord(strategy.job.network().state_dict()), num_rounds=given.rounds)
        last.append(result.arrays)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": given.ranks}}
    run_simulation(server, flower_client.app, num_supernodes=given.nodes, backend_config=resources)
    return last[0]


def main() -> None:
    """Time all rounds."""
    parser = options("Flower", ranks=(2, 1, 4))
    parser.add_argument("--nodes", type=int, help="simulated nodes: as many as clients (default) or as in a cohort")
    given = parser.parse_args()
    job = load(given.job)
    check_rounds(given, job)
    given.nodes = given.nodes or job.settings.clients
    if given.nodes not in (job.settings.clients, job.settings.cohort):
        parser.error(f"--nodes must be {job.settings.clients} or {job.settings.cohort}")
    strategy = Timed(job, given.job)
    weights = simulate(strategy, given).to_torch_state_dict()
    report("flwr", ["flwr", "ray"], job, given, strategy.seconds, weights, nodes=given.nodes)


if __name__ == "__main__":
    main()
