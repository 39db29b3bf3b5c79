"""Masked means over Flower: the server learns sums only, and weights are the loop engine's, also with dropped sites."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_helpers import Counting, Nodes, by_loop, experiment, federate, nodes
from flower_sites import audit, site_files, task_of
from helpers import same, slow_except
from sharing_helpers import server_side
from test_masked_sum import drop

from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.sharing import Payload, Pool, gather
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.messages import unpack
from fedblend.flower.secure_aggregation import masking_site as at_site
from fedblend.flower.server import run

pytestmark = pytest.mark.usefixtures("no_waits")

CLIENTS = 7
"""Two groups: one of three, one of four."""

TERMS = FederationLimits(min_sites=2, deadline=0.5)


def asked(aggregator: str = "mean", **sharing: Any) -> Experiment:
    method = {"name": "fedmix", "sharing": {"name": "secure-means", **sharing}, "aggregator": aggregator}
    partition = {"name": "dirichlet", "form": "client", "clients": CLIENTS, "alpha": 5.0}
    train = {"cohort": 3, "epochs": 1, "batch_size": 50, "lr": 0.1}
    return experiment(method, partition=partition, train=train, rounds=1)


def shared_by(one: Experiment) -> dict[int, Payload]:
    """What each client shares, as the loop engine makes it."""
    setup = make_setup(one)
    return dict(LoopEngine(setup).share(0, setup.weights(), range(CLIENTS), setup.sizes(0)))


def groups(one: Experiment) -> list[list[int]]:
    group = one.method.sharing.groups(np.arange(CLIENTS), stream(one.seed, "pool", 0))
    return sorted((np.flatnonzero(group == g).tolist() for g in range(2)), key=len)


def pool_of(one: Experiment, entries: Pool) -> Pool:
    return one.method.sharing.make_pool(entries, server_side(stream(one.seed, "pool", 0), np.arange(CLIENTS)))


def same_pools(pool: Pool, other: Pool) -> bool:
    return all(torch.equal(pool.tensors[name], tensor) for name, tensor in other.tensors.items()) and bool(len(other))


@pytest.mark.parametrize("aggregator", ["mean", "secure-mean"])
def test_masked_means_equal_the_loops_to_the_last_bit_and_no_mean_leaves(aggregator: str, tmp_path: Path) -> None:
    one = asked(aggregator)
    grid = nodes(CLIENTS, Counting)

    finished = federate(grid, one, tmp_path)

    state, records = by_loop(one)
    assert same(finished.state.weights, state.weights)
    assert same_pools(pool_of(one, finished.state.entries), pool_of(one, state.entries))
    record = finished.directory.metrics()[1]
    assert record["shared"] == records[1]["shared"]
    for way in ("bytes_up", "bytes_down"):
        assert record[way]["means"] == records[1][way]["means"]
    assert [sum(record[way].values()) for way in ("bytes_down", "bytes_up")] == grid.exchanged()
    # With their masks, no subset of a group's vectors sums to its clients' means.
    seen = {c: unpack(o.content)[1] for c, kind, _, o in grid.kept if kind == "query.share"}
    assert [set(tensors) for tensors in seen.values()] == [{"masked"}] * CLIENTS
    real = {c: torch.cat([p[n].flatten() for n in ("whole-x", "whole-y")]) for c, p in shared_by(one).items()}
    for group in groups(one):
        for size in range(1, len(group) + 1):
            for some in itertools.combinations(group, size):
                apart = sum(seen[c]["masked"] for c in some) - sum(real[c] for c in some)
                assert int((apart == 0).sum()) <= 3
                assert float((apart.double() / 2**32).std()) == pytest.approx(12**-0.5, rel=0.35)


def test_masked_sums_of_features_equal_the_loops_to_the_last_bit(tmp_path: Path) -> None:
    method = {"name": "fed3r", "sharing": {"name": "secure-moments", "clients": CLIENTS, "range": 1e4}}
    one = experiment(method, partition={"name": "iid", "clients": CLIENTS}, model={"name": "mlp", "hidden": [4]})
    grid = nodes(CLIENTS, Counting)

    finished = federate(grid, one, tmp_path)

    assert same(finished.state.weights, by_loop(one)[0].weights)
    seen = [unpack(o.content)[1] for _, kind, _, o in grid.kept if kind == "query.share"]
    assert [set(tensors) for tensors in seen] == [{"masked"}] * CLIENTS


STAGES = ["query.keys", "query.shares", "query.share", "query.unmask"]


@pytest.mark.parametrize("stage", slow_except(["query.share"], STAGES))
def test_a_dropped_site_is_in_no_sum(stage: str, tmp_path: Path) -> None:
    one = asked()
    small, large = groups(one)
    gone = large[1]
    finished = run(drop(nodes(CLIENTS), {gone: stage}), one, tmp_path, TERMS)

    # A site that does not help to unmask has shared all the same.
    left = [c for c in range(CLIENTS) if c != gone or stage == "query.unmask"]
    payloads = shared_by(one)
    expected = gather({c: payloads[c] for c in left})
    assert same_pools(pool_of(one, finished.state.entries), pool_of(one, expected))
    assert finished.state.entries.owner.tolist() == left
    # Each group's sum is at its first client; all other entries are zeros.
    numbers = finished.state.entries.tensors["whole-x"]
    firsts = {min(c for c in group if c in left) for group in (small, large)}
    assert {c for c, row in zip(left, numbers, strict=True) if bool(row.any())} == firsts


def test_a_group_of_too_few_sites_has_no_sum(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = asked()
    small, large = groups(one)
    finished = run(drop(nodes(CLIENTS), {small[0]: "query.share"}), one, tmp_path / "one", TERMS)

    payloads = shared_by(one)
    assert finished.state.entries.owner.tolist() == large
    assert same_pools(pool_of(one, finished.state.entries), pool_of(one, gather({c: payloads[c] for c in large})))
    assert f"client {small[0]} shares nothing: no answer within 0.5 seconds" in caplog.text
    told = (
        f"client {small[1]} shares nothing: its group has no sum: round 1: 2 sites sent means, and a masked sum needs"
    )
    assert told in caplog.text
    with pytest.raises(FedblendError, match=r"no site shares anything .*2 sites sent keys, and a masked sum needs 3"):
        run(
            drop(nodes(CLIENTS), {small[0]: "query.keys", large[0]: "query.keys", large[1]: "query.keys"}),
            one,
            tmp_path / "two",
            TERMS,
        )


def test_a_wrong_vector_is_left_out_and_a_site_with_wrong_shares_is_excluded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = asked()
    _, large = groups(one)

    short = run(
        nodes(CLIENTS).changing("query.share", {large[0]}, lambda t: {"masked": t["masked"][:-1]}),
        one,
        tmp_path / "a",
        TERMS,
    )
    assert short.state.entries.owner.tolist() == [c for c in range(CLIENTS) if c != large[0]]
    flipped = nodes(CLIENTS).changing(
        "query.unmask", {large[0]}, lambda t: {name: torch.flip(x, [0]) for name, x in t.items()}
    )
    other = run(flipped, one, tmp_path / "b", TERMS)
    assert other.state.entries.owner.tolist() == list(range(CLIENTS)), "the others' shares suffice"
    assert f"client {large[0]} is excluded since round 1: its shares with clients" in caplog.text
    assert caplog.text.count("is excluded") == 1


def test_a_site_can_allow_only_masked_means(tmp_path: Path) -> None:
    one = asked()
    small, large = groups(one)
    configs = site_files(tmp_path, CLIENTS, allow=["masked", "keys", "weights"])
    (tmp_path / f"site-{large[2]}.toml").write_text(f'min_sum = 4\naudit = "audit-{large[2]}.jsonl"\n')
    (tmp_path / f"site-{large[3]}.toml").write_text(f'allow = ["weights", "means"]\naudit = "audit-{large[3]}.jsonl"\n')
    finished = run(Nodes(configs), one, tmp_path / "run", TERMS)

    # Of four, one wants all four, and another lets no keys out.
    assert finished.state.entries.owner.tolist() == small
    kinds = [line["kind"] for line in audit(tmp_path, small[0])]
    assert kinds[:5] == ["keys", "keys", "masked", "masked", "keys"]
    assert set(kinds[5:]) <= {"weights"}
    assert "this site's policy want 4 (min_sum" in audit(tmp_path, large[2])[1]["refused"]
    assert "lets no keys out" in audit(tmp_path, large[3])[0]["refused"]


@pytest.mark.slow
def test_a_site_with_too_few_samples_is_in_no_sum(tmp_path: Path) -> None:
    one = asked()
    _, large = groups(one)
    configs = site_files(tmp_path, CLIENTS)
    (tmp_path / f"site-{large[0]}.toml").write_text(f'min_mean = 100000\naudit = "audit-{large[0]}.jsonl"\n')
    finished = run(Nodes(configs), one, tmp_path / "run", TERMS)
    assert finished.state.entries.owner.tolist() == [c for c in range(CLIENTS) if c != large[0]]


def test_keys_for_means_mask_no_model() -> None:
    setup = make_setup(asked("secure-mean"))
    here = task_of(LoopEngine(setup))
    at_site.make_keys(here, {"quantity": "means"}, {})
    for of in ("models", "means"):
        with pytest.raises(FedblendError, match="the masks of round 1 are not at this stage"):
            at_site.reveal_shares(here, {"quantity": of, "present": [0, 1, 2], "dropped": []}, {})
    with pytest.raises(FedblendError, match="the masks of round 1 are not at this stage"):
        at_site.make_shares(here, {"quantity": "models", "threshold": 3}, {})
    with pytest.raises(FedblendError, match="this experiment sums no 'others' under masks"):
        at_site.make_keys(here, {"quantity": "others"}, {})
    plain = task_of(experiment("fedmix"))
    for of in ("models", "means"):
        with pytest.raises(FedblendError, match=f"this experiment sums no '{of}' under masks"):
            at_site.make_keys(plain, {"quantity": of}, {})
