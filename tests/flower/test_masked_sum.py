"""Secure sums of models and of means over Flower: the loop engine's results, also with dropped sites, and sums only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flower_helpers import ALL, SECURE, Nodes, by_loop, experiment, federate, nodes
from flower_sites import audit, site_files, task_of
from flwr.app import Message
from helpers import same, slow_except
from sharing_helpers import server_side

from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.sharing import Payload, Pool, gather
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup
from fedblend.flower.messages import unpack
from fedblend.flower.secure_aggregation import masking_site as at_site
from fedblend.flower.secure_aggregation import masks
from fedblend.methods.aggregators.mean import COUNTS, LEVELS, SecureMean, Total, WeightedMean
from fedblend.runs.runner import FinishedRun


def asked(method: Any = None, **changes: Any) -> Any:
    return experiment(method or SECURE, **{"train": ALL, "rounds": 1, **changes})


def summands(one: Any, clients: list[int], cohort: list[int]) -> dict[int, torch.Tensor]:
    """Encoded changes of the clients of a cohort, from the loop engine."""
    setup = make_setup(one)
    task = TrainTask(0, setup.weights(), None, setup.sizes(0))
    sizes = [int(setup.sizes(0)[c]) for c in cohort]
    kind = one.method.aggregator
    return {
        t.client: kind.encoded(t.weights, task.weights, kind.share_of(t.samples, sizes))
        for t in LoopEngine(setup).train(task, clients)
    }


def is_sum_of(finished: FinishedRun, one: Any, left: list[int], cohort: list[int]) -> None:
    """Assert that a round's model is the plain sum of the clients ``left`` of a cohort."""
    setup, kind = make_setup(one), one.method.aggregator
    sizes = setup.sizes(0)
    share = sum(kind.share_of(int(sizes[c]), sizes.tolist()) for c in left)
    expected = kind.decoded(Total(sum(summands(one, left, cohort).values()), share), setup.weights())
    for name, tensor in expected.items():
        torch.testing.assert_close(finished.state.weights[name], tensor, rtol=0, atol=1e-7)


def hidden(seen: dict[int, torch.Tensor], real: dict[int, torch.Tensor], group: Iterable[int], rel: float) -> None:
    """Assert that no sum of some vectors tells of the numbers in them, and that differences cover the whole range.

    Sites' own masks hide even the sum of all vectors, until enough sites send shares.
    """
    for some in itertools.chain(*(itertools.combinations(group, n + 1) for n in range(len(seen)))):
        apart = sum(seen[c] for c in some) - sum(real[c] for c in some)
        assert int((apart == 0).sum()) <= 3
        assert float((apart.double() / 2**32).std()) == pytest.approx(12**-0.5, rel=rel)


@pytest.mark.slow
def test_a_change_in_steps_of_range_and_share() -> None:
    kind = SecureMean(range=8.0)
    start = {"b": torch.tensor([1.0, -2.0]), "a": torch.tensor(5)}
    upload = {"b": torch.tensor([1.5, -4.0]), "a": torch.tensor(9)}
    # In order of name: a, then b.
    expected = [round(4 * 0.25 * LEVELS / COUNTS), round(0.5 * 0.25 * LEVELS / 8), round(-2 * 0.25 * LEVELS / 8)]
    numbers = kind.encoded(upload, start, 0.25)
    assert (numbers.tolist(), numbers.dtype) == (expected, torch.int32)
    back = kind.decoded(Total(numbers, 0.25), start)
    assert list(back) == ["b", "a"]
    assert (back["a"].item(), back["a"].dtype) == (9, torch.int64)
    torch.testing.assert_close(back["b"], upload["b"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("by", ["samples", "clients"])
def test_the_mean_is_the_plain_one_within_half_a_step_a_client(by: str) -> None:
    rng = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(1000, generator=rng, dtype=torch.float64), "n": torch.tensor(3)}
    uploads = [
        ({"w": start["w"] + torch.randn(1000, generator=rng, dtype=torch.float64), "n": torch.tensor(3 + k)}, float(w))
        for k, w in enumerate([10, 0, 30, 17, 5])
    ]
    kind, plain = SecureMean(by=by, range=8.0), WeightedMean(by=by)
    made, expected = kind.finish(kind.partial(uploads), start), plain.aggregate(uploads)
    assert float((made["w"] - expected["w"]).abs().max()) <= 4 * 0.5 * 8 / LEVELS * (1 + 1e-9)
    assert torch.equal(made["n"], expected["n"])
    assert not kind.is_plain_mean


def test_the_largest_changes_of_all_clients_do_not_wrap_round() -> None:
    kind, start = SecureMean(range=2.0), {"w": torch.zeros(2)}
    uploads = [({"w": torch.tensor([2.0, -2.0])}, 1.0)] * 1000
    torch.testing.assert_close(kind.finish(uploads, start)["w"], torch.tensor([2.0, -2.0]), rtol=0, atol=1e-6)


def test_unsupported_methods_are_refused() -> None:
    start = {"w": torch.zeros(2)}
    for bad in (2.1, -2.1, float("nan"), float("inf")):
        with pytest.raises(FedblendError, match="a number of 'w' changed by more than 2"):
            SecureMean(range=2.0).encoded({"w": torch.tensor([0.0, bad])}, start, 0.1)
    with pytest.raises(FedblendError, match=r"method\.aggregator\.fewest: 3 clients to a sum, but train\.cohort is 2"):
        SecureMean().require_possible(2)
    assert [SecureMean(fewest=2).threshold(n) for n in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]
    for method, told in (
        (
            {"name": "fd", "aggregator": "secure-mean"},
            "'secure-mean' aggregates models, but method.upload 'outputs' sends",
        ),
        ({"name": "aggenhance", "aggregator": "secure-mean"}, "needs single uploads, which 'secure-mean' hides"),
    ):
        with pytest.raises(FedblendError, match=told):
            experiment(method)


def test_a_mask_is_the_key_stream_of_aes_256_in_counter_mode() -> None:
    key = bytes(range(32))
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    blocks = b"".join(block.update(i.to_bytes(16, "big")) for i in range(3))
    assert masks.mask_from_key(key, 11).tolist() == np.frombuffer(blocks, "<u4")[:11].tolist()


def test_two_sites_share_a_mask_and_sealed_shares_have_one_receiver() -> None:
    (a, to_a), (b, to_b), (c, _) = (masks.new_key_pair() for _ in range(3))
    assert masks.shared_mask(a, to_b, b"sum", 5).tolist() == masks.shared_mask(b, to_a, b"sum", 5).tolist()
    assert masks.shared_mask(a, to_b, b"sum", 5).tolist() != masks.shared_mask(c, to_b, b"sum", 5).tolist()
    assert masks.shared_mask(a, to_b, b"sum", 5).tolist() != masks.shared_mask(b, to_a, b"another", 5).tolist()
    sealed = masks.seal(a, to_b, b"table", 1, 2, b"own", b"pair")
    assert masks.unseal(b, to_a, b"table", 1, 2, sealed) == (b"own", b"pair")
    for private, sender, table in ((c, 1, b"table"), (b, 3, b"table"), (b, 1, b"another")):
        with pytest.raises(masks.CRYPTO_ERRORS):
            masks.unseal(private, to_a, table, sender, 2, sealed)
    shares = masks.split_secret(b"secret", 3, 5)
    assert {masks.join_shares(list(some)) for some in itertools.combinations(shares, 3)} == {b"secret"}
    assert masks.public_key_of(a) == to_a
    assert [masks.is_public_key(key) for key in (to_a, b"", a, b"no key")] == [True, False, False, False]


@pytest.mark.parametrize("method", slow_except(["fedavg"], ["fedavg", "aggenhance-secure"]))
def test_masked_sums_equal_the_loops_to_the_last_bit_and_no_model_leaves(method: str, tmp_path: Path) -> None:
    step = {"server_step": {"steps": 2}} if method != "fedavg" else {}
    one = asked({**SECURE, "name": method, **step})
    grid = nodes()

    finished = federate(grid, one, tmp_path)

    state, _ = by_loop(one)
    assert same(finished.state.weights, state.weights)
    record = finished.directory.metrics()[1]
    assert [sum(record[way].values()) for way in ("bytes_down", "bytes_up")] == grid.exchanged()
    assert record["bytes_up"]["weights"] == 4 * sum(4 * t.numel() for t in state.weights.values())
    # The server receives public keys, sealed shares, one vector a site, and shares of secrets.
    up = {kind: [unpack(o[3].content)[1] for o in grid.kept if o[1] == kind] for kind in {o[1] for o in grid.kept}}
    assert [set(t) for t in up["train"]] == [{"masked"}] * 4
    seen = {c: unpack(o.content)[1]["masked"] for c, kind, _, o in grid.kept if kind == "train"}
    hidden(seen, summands(one, [0, 1, 2, 3], [0, 1, 2, 3]), range(4), rel=0.1)
    secrets = torch.cat([t.flatten() for answer in up["query.unmask"] for t in answer.values()])
    assert not any(name.startswith("pair/") for answer in up["query.unmask"] for name in answer)
    assert secrets.dtype == torch.uint8


def drop(grid: Nodes, when: dict[int, str]) -> Nodes:
    """Sites that do not reply from one kind of message on."""
    gone: set[int] = set()

    def leave(client: int, message: Message, reply: Message) -> Message | None:
        if when.get(client) == message.metadata.message_type:
            gone.add(client)
        return None if client in gone else reply

    return grid.spoiled(leave)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({0: "query.keys", 1: "query.keys"}, "round 1: 2 sites sent keys, and a masked sum needs 3"),
        ({0: "query.shares", 1: "query.keys"}, "round 1: 2 sites sent shares, and a masked sum needs 3"),
        ({0: "train", 1: "train"}, "round 1: 2 sites sent models, and a masked sum needs 3"),
        (
            {0: "query.unmask", 1: "query.unmask"},
            "of 'own/0', a secret of client 0, 2 shares are valid, and 3 are needed",
        ),
    ],
)
def test_too_few_sites_have_no_sum(when: dict[int, str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(FedblendError, match=expected):
        federate(drop(nodes(), when), asked(), tmp_path)


def test_a_wrong_vector_and_wrong_keys_are_refused(tmp_path: Path) -> None:
    for number, (kind, change, reason) in enumerate(
        (
            ("train", lambda t: {"masked": t["masked"][:-1]}, "is of shape"),
            ("query.keys", lambda t: {**t, "box": t["box"][:9]}, "it sent no keys"),
            ("query.keys", lambda t: {**t, "box": t["mask"]}, "its keys are not its own two"),
        )
    ):
        made = federate(nodes().changing(kind, {2}, change), asked(), tmp_path / str(number))
        (refused,) = made.directory.metrics()[1]["refused"]
        assert (refused["client"], reason in refused["reason"]) == (2, True), reason


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("query.keys", "sign", 1025),
        ("query.keys", "mask", 20_000_000),
        ("query.shares", "commit", 1025),
        ("query.shares", "0", 1025),
    ],
)
def test_what_the_server_sends_on_to_all_sites_has_a_bound(kind: str, name: str, size: int, tmp_path: Path) -> None:
    grid = nodes().changing(kind, {2}, lambda t: {**t, name: torch.zeros(size, dtype=torch.uint8)})
    made = federate(grid, asked(), tmp_path)
    reason = f"it sent {size:,} bytes as '{name}'; valid: 1,024 at most"
    assert made.directory.metrics()[1]["refused"] == [{"client": 2, "reason": reason}]
    assert max(size for client, _, size, _ in grid.sent if client != 2) < 100_000


# Means -----------------------------------------------------------------------------------------------------

CLIENTS = 7
"""Two groups: one of three, one of four."""


def sharing_means(aggregator: str = "mean", **sharing: Any) -> Experiment:
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
    one = sharing_means(aggregator).model_copy(update={"rounds": 2})
    grid = nodes(CLIENTS)

    finished = federate(grid, one, tmp_path)

    state, records = by_loop(one)
    assert same(finished.state.weights, state.weights)
    assert same_pools(pool_of(one, finished.state.entries), pool_of(one, state.entries))
    record, later = finished.directory.metrics()[1:]
    assert record["shared"] == records[1]["shared"]
    for way in ("bytes_up", "bytes_down"):
        assert record[way]["means"] == records[1][way]["means"]
    sent = [sum(record[way].values()) + sum(later[way].values()) for way in ("bytes_down", "bytes_up")]
    assert sent == grid.exchanged()
    # With their masks, no subset of a group's vectors sums to its clients' means.
    seen = {c: unpack(o.content)[1] for c, kind, _, o in grid.kept if kind == "query.share"}
    assert [set(tensors) for tensors in seen.values()] == [{"masked"}] * CLIENTS
    real = {c: torch.cat([p[n].flatten() for n in ("whole-x", "whole-y")]) for c, p in shared_by(one).items()}
    for group in groups(one):
        hidden({c: seen[c]["masked"] for c in group}, real, group, rel=0.35)


def test_masked_sums_of_features_equal_the_loops_to_the_last_bit(tmp_path: Path) -> None:
    method = {"name": "fed3r", "sharing": {"name": "secure-moments", "clients": CLIENTS, "range": 1e4}}
    one = experiment(method, partition={"name": "iid", "clients": CLIENTS}, model={"name": "mlp", "hidden": [4]})
    grid = nodes(CLIENTS)

    finished = federate(grid, one, tmp_path)

    assert same(finished.state.weights, by_loop(one)[0].weights)
    seen = [unpack(o.content)[1] for _, kind, _, o in grid.kept if kind == "query.share"]
    assert [set(tensors) for tensors in seen] == [{"masked"}] * CLIENTS


STAGES = ["query.keys", "query.shares", "query.share", "query.unmask"]


@pytest.mark.parametrize("stage", slow_except(["query.share"], STAGES))
def test_a_dropped_site_is_in_no_sum(stage: str, tmp_path: Path) -> None:
    one = sharing_means()
    small, large = groups(one)
    gone = large[1]
    finished = federate(drop(nodes(CLIENTS), {gone: stage}), one, tmp_path)

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


def test_a_group_of_too_few_sites_has_no_sum(tmp_path: Path, caplog: Any) -> None:
    one = sharing_means()
    small, large = groups(one)
    finished = federate(drop(nodes(CLIENTS), {small[0]: "query.share"}), one, tmp_path / "one")

    payloads = shared_by(one)
    assert finished.state.entries.owner.tolist() == large
    assert same_pools(pool_of(one, finished.state.entries), pool_of(one, gather({c: payloads[c] for c in large})))
    assert f"client {small[0]} shares nothing: no answer within 0.4 seconds" in caplog.text
    told = (
        f"client {small[1]} shares nothing: its group has no sum: round 1: 2 sites sent means, and a masked sum needs"
    )
    assert told in caplog.text
    few = drop(nodes(CLIENTS), dict.fromkeys([small[0], *large[:2]], "query.keys"))
    with pytest.raises(FedblendError, match=r"no site shares anything .*2 sites sent keys, and a masked sum needs 3"):
        federate(few, one, tmp_path / "two")


def test_a_wrong_vector_is_left_out_and_a_site_with_wrong_shares_is_excluded(tmp_path: Path, caplog: Any) -> None:
    one = sharing_means()
    _, large = groups(one)

    cut = nodes(CLIENTS).changing("query.share", {large[0]}, lambda t: {"masked": t["masked"][:-1]})
    short = federate(cut, one, tmp_path / "a")
    assert short.state.entries.owner.tolist() == [c for c in range(CLIENTS) if c != large[0]]
    flipped = nodes(CLIENTS).changing(
        "query.unmask", {large[0]}, lambda t: {name: torch.flip(x, [0]) for name, x in t.items()}
    )
    other = federate(flipped, one, tmp_path / "b")
    assert other.state.entries.owner.tolist() == list(range(CLIENTS)), "the others' shares suffice"
    assert f"client {large[0]} is excluded since round 1: its shares with clients" in caplog.text
    assert caplog.text.count("is excluded") == 1


def test_a_site_can_allow_only_masked_means(tmp_path: Path) -> None:
    one = sharing_means()
    small, large = groups(one)
    configs = site_files(tmp_path, CLIENTS, allow=["masked", "keys", "weights"])
    (tmp_path / f"site-{large[2]}.toml").write_text(f'min_sum = 4\naudit = "audit-{large[2]}.jsonl"\n')
    (tmp_path / f"site-{large[3]}.toml").write_text(f'allow = ["weights", "means"]\naudit = "audit-{large[3]}.jsonl"\n')
    finished = federate(Nodes(configs), one, tmp_path / "run")

    # Of four, one wants all four, and another lets no keys out.
    assert finished.state.entries.owner.tolist() == small
    kinds = [line["kind"] for line in audit(tmp_path, small[0])]
    assert kinds[:5] == ["keys", "keys", "masked", "masked", "keys"]
    assert set(kinds[5:]) <= {"weights"}
    assert "this site's policy want 4 (min_sum" in audit(tmp_path, large[2])[1]["refused"]
    assert "lets no keys out" in audit(tmp_path, large[3])[0]["refused"]


@pytest.mark.slow
def test_a_site_with_too_few_samples_is_in_no_sum(tmp_path: Path) -> None:
    one = sharing_means()
    _, large = groups(one)
    configs = site_files(tmp_path, CLIENTS)
    (tmp_path / f"site-{large[0]}.toml").write_text(f'min_mean = 100000\naudit = "audit-{large[0]}.jsonl"\n')
    finished = federate(Nodes(configs), one, tmp_path / "run")
    assert finished.state.entries.owner.tolist() == [c for c in range(CLIENTS) if c != large[0]]


def test_keys_for_means_mask_no_model() -> None:
    setup = make_setup(sharing_means("secure-mean"))
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
