"""Runs on several ranks through the command line: results equal one rank's, also after kills and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import (
    CHECKPOINT,
    PATIENCE_S,
    alive,
    call,
    here,
    kill_alone,
    lines_of,
    records,
    refused,
    start,
    stop,
    succeeded,
    wait_until,
    write,
)
from helpers import same_up_to_rounding
from safetensors.torch import load_file

from fedblend.engines.distributed.processes import free_address
from fedblend.engines.distributed.ranks import Ranks, keep_alive

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

METHOD = {"name": "fedmix", "objective": {"lambda": 0.1}}
SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "method": METHOD,
    "partition": {"name": "dirichlet", "clients": 7, "alpha": 0.5},
    "train": {"cohort": 5},
}
SLUG = "fedmix-seed0"

BAD_PART = '''
from fedblend.core.objective import Objective
from fedblend import part


@part("objective", "fails-on-three")
class FailsOnThree(Objective):
    """Fails on a batch of three samples."""

    def loss(self, net, batch, drawn, context):
        if len(batch.y) == 3:
            raise ZeroDivisionError("nothing to divide by")
        return context.task.loss(net(batch.x), batch.y)
'''


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {n: t for n, t in load_file(run / CHECKPOINT).items() if n.startswith("weights/")}


def same_weights(a: Path, b: Path) -> None:
    """Assert equal weights up to rounding: ranks add sums in another order, and have other stacks."""
    same_up_to_rounding(weights(a), weights(b), steps=100)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process; the experiment's file is in the folder above ``out``."""
    folder = tmp_path_factory.mktemp("one")
    file = write(folder / "file.toml", SETTINGS)
    succeeded(here("run", file, "--out", folder / "out"))
    return folder / "out" / SLUG


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_two_ranks_give_what_one_gives(one_rank: Path, tmp_path: Path, engine: str) -> None:
    file = one_rank.parent.parent / "file.toml"
    succeeded(here("run", file, "--ranks", 2, "--engine", engine, "--out", tmp_path / "out"))
    same_weights(tmp_path / "out" / SLUG, one_rank)
    if engine == "loop":
        assert records(tmp_path / "out" / SLUG) == records(one_rank)


def two_and_one(folder: Path, fields: dict[str, Any], slug: str = "one-seed0") -> tuple[Path, Path]:
    """The folders of an experiment's runs on two ranks, or as many as it says, and on one."""
    file = write(folder / "file.toml", {**SETTINGS, "rounds": 2, "ranks": 2, **fields})
    succeeded(here("run", file, "--out", folder / "two"))
    succeeded(here("run", file, "--ranks", 1, "--out", folder / "one"))
    return folder / "two" / slug, folder / "one" / slug


SLOW = {"epochs": [2, 1, 2, 1, 2, 1, 2]}
CASES: dict[str, dict[str, Any]] = {
    "aggenhance": {"method": {"name": "aggenhance", "server_step": {"steps": 5, "epochs": 2}}},
    "fd": {"method": {"name": "fd", "terms": [{"name": "distill", "beta": 0.5}]}},
    "scaffold and ditto": {"method": {"name": "scaffold", "personal": "ditto"}},
    "scaffold by the median": {"method": {"name": "scaffold", "aggregator": "median"}},
    "fedrep and fednova": {"method": {"name": "fedmix", "personal": "fedrep", "aggregator": "fednova"}},
    "pfedme and fedlc": {"method": {"name": "pfedme", "objective": "fedlc"}},
    "fedproto": {"method": {"name": "fedproto"}},
    "silent": {"method": {"upload": "silent", "stateful_clients": True}},
    "power of choice": {"selection": {"name": "power-of-choice", "candidates": 6}, "train": {"cohort": 4, "epochs": 2}},
    "late uploads": {"slow": {**SLOW, "late": "next-round"}, "train": {"cohort": 5, "epochs": 2}},
    "fednova of slow clients": {"method": {"name": "fednova"}, "slow": SLOW, "train": {"cohort": 5, "epochs": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_queries_and_client_states_are_the_same_on_two_ranks(case: str, tmp_path: Path) -> None:
    method = {**CASES[case].get("method", {}), "label": "one"}
    folders = two_and_one(tmp_path, {"holdout": 0.2, "engine": "loop", **CASES[case], "method": method})

    two, one = (load_file(folder / CHECKPOINT) for folder in folders)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-4)
    sent = [json.loads(records(folder)[-1])["bytes_up"] for folder in folders]
    assert sent[0] == sent[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "changes"),
    [
        ("server", {"method": {"name": "fedavg", "label": "one"}}),
        ("clients", {"method": {"name": "ditto", "label": "one"}, "evaluate_model": "each"}),
    ],
    ids=["one model", "personal models"],
)
def test_metrics_on_two_ranks_are_those_of_one(split: str, changes: dict[str, Any], tmp_path: Path) -> None:
    fields = {
        "holdout": 0.2,
        "engine": "loop",
        "metrics": ["f1", "auc", "ece", {"name": "top-k", "k": 2}],
        "validation": {split: 0.1, "metric": "f1"},
    }
    two, one = map(records, two_and_one(tmp_path, {**fields, **changes}))

    assert one == two
    last = json.loads(one[-1])
    for found in (last, last["validation"][split]):
        assert found["metrics"].keys() == {"f1", "auc", "ece", "top-2"}
    assert last["client_metrics"].keys() == last["metrics"].keys()


@pytest.mark.slow
def test_more_ranks_than_clients_in_a_round(tmp_path: Path) -> None:
    three, one = two_and_one(tmp_path, {"train": {"cohort": 1}, "ranks": 3}, SLUG)
    same_weights(three, one)
    assert records(three) == records(one)


@pytest.mark.slow
def test_a_run_killed_on_two_ranks_resumes_on_one(one_rank: Path, tmp_path: Path) -> None:
    file, run = one_rank.parent.parent / "file.toml", tmp_path / "out" / SLUG
    process = start("run", file, "--ranks", 2, "--set", "rounds=100000", "--out", tmp_path / "out")
    try:
        wait_until(lambda: lines_of(run) >= 3, process)
        left = kill_alone(process)
    finally:
        stop(process)
    assert not left, "the other rank still runs"
    made = lines_of(run)

    rounds = made + 2
    succeeded(here("run", file, "--resume", "--ranks", 2, "--set", f"rounds={made}", "--out", tmp_path / "out"))
    config = run / "config.toml"
    config.write_text(config.read_text().replace(f"rounds = {made}", f"rounds = {rounds}"))
    succeeded(here("resume", run, "--ranks", 1))
    assert json.loads((run / "facts.json").read_text())["engine"]["ranks"] == 1
    succeeded(here("run", file, "--set", f"rounds={rounds}", "--out", tmp_path / "whole"))

    same_weights(run, tmp_path / "whole" / SLUG)
    assert records(run) == records(tmp_path / "whole" / SLUG)


@pytest.mark.slow
def test_a_dead_rank_ends_the_run_with_a_message_and_the_run_resumes_on_two(one_rank: Path, tmp_path: Path) -> None:
    file, run = one_rank.parent.parent / "file.toml", tmp_path / "out" / SLUG
    process = start("run", file, "--ranks", 2, "--set", "rounds=100000", "--out", tmp_path / "out")
    try:
        wait_until(lambda: lines_of(run) >= 3, process)
        (other,) = {*alive(process)} - {process.pid}
        os.kill(other, signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        stop(process)
    assert process.returncode == 2, err
    assert "rank 1 was killed by signal 9" in err
    assert "Traceback" not in err
    rounds = lines_of(run) + 1

    changed = ("--set", f"rounds={rounds}")
    succeeded(here("run", file, "--resume", "--ranks", 2, *changed, "--out", tmp_path / "out"))
    succeeded(here("run", file, *changed, "--out", tmp_path / "whole"))

    same_weights(run, tmp_path / "whole" / SLUG)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failing_client_is_named_with_round_and_batch(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "failing.py").write_text(BAD_PART, encoding="utf-8")
    # Two clients of 719 samples: the third batch of an epoch has three.
    settings = {
        "method": {"objective": {"name": "failing:FailsOnThree"}},
        "partition": {"name": "iid", "clients": 2},
        "train": {"cohort": 2, "batch_size": 358},
    }
    file = write(tmp_path / "file.toml", settings)

    outcome = call("run", file, "--ranks", ranks, "--out", tmp_path / "out")

    assert outcome.code == 2
    assert "ZeroDivisionError: nothing to divide by" in outcome.err
    assert re.search(r"while training client [01] in round 1, batch 3", outcome.err)


def as_torchrun_does(*command: Any) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of a command on two ranks, without torchrun's start-up of several seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [start(*command, environment={**environment, "RANK": str(rank)}) for rank in (0, 1)]
    try:
        texts = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            stop(rank)
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, texts, strict=True)]


@pytest.mark.slow
def test_torchrun_starts_the_ranks_as_well(one_rank: Path, tmp_path: Path) -> None:
    first, second = as_torchrun_does("run", one_rank.parent.parent / "file.toml", "--out", tmp_path / "out")

    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "fedmix" in first[1]
    assert second[1] == ""
    same_weights(tmp_path / "out" / SLUG, one_rank)


@pytest.mark.slow
def test_ranks_of_torchrun_end_with_rank_0(tmp_path: Path) -> None:
    first, second = as_torchrun_does("run", tmp_path / "absent.toml", "--out", tmp_path / "out")

    assert (first[0], second[0]) == (2, 2)
    assert "absent.toml" in first[2]
    assert second[2].endswith("fedblend: error: rank 0 ended (see its own output)\n")


def test_connections_of_ranks_are_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[int] = []
    monkeypatch.setattr("fedblend.engines.distributed.ranks.keep_alive", found.append)
    Ranks(0, 1, free_address()).leave()
    assert found

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        keep_alive(client.fileno())
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        server.accept()[0].sendall(b"open")
        assert client.recv(4) == b"open"
    with open(tmp_path / "file", "w", encoding="utf-8") as file:
        keep_alive(file.fileno())
        file.write("open")


def test_an_invalid_number_of_ranks_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "file.toml", {**SETTINGS, "ranks": 0})
    refused(here("run", file, "--out", tmp_path / "out"), "ranks", "greater than or equal to 1")


def test_more_ranks_than_clients_are_refused_before_any_is_started(tmp_path: Path) -> None:
    file = write(tmp_path / "file.toml", {**SETTINGS, "engine": "loop"})
    refused(here("run", file, "--ranks", 8, "--out", tmp_path / "out"), "ranks", "8 processes", "1 to 7")
    assert not (tmp_path / "out" / SLUG).exists()
