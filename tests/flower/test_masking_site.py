"""Secure aggregation at a site: its checks of requests, and the result of a dishonest server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from flower_helpers import ALL, Nodes, federate, is_loops, nodes, refusals
from flower_sites import audit, site_files, write_peers
from flwr.app import Context, RecordDict
from helpers import slow_after_first
from test_masked_sum import asked, drop, is_sum_of

from fedblend.core.errors import FedblendError
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.flower.client_task import ClientTask, Memory
from fedblend.flower.credentials import make_site_key
from fedblend.flower.secure_aggregation import masking_site as at_site
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.secure_aggregation.masked_sum import MaskedSum, NoSum
from fedblend.flower.site import RefusedByPolicy, Site, describe_setup, read_site
from fedblend.flower.sites import Reply
from fedblend.methods.aggregators.mean import SecureMean

Tensors = dict[str, torch.Tensor]
NOTHING: Any = MappingProxyType({})


NOT_YET = "the masks of round 1 are not at this stage"
UNEQUAL = {"name": "dirichlet", "form": "client", "clients": 5, "alpha": 5.0}


def of_sites(sites: int) -> Any:
    return asked(partition={"name": "iid", "clients": sites}, train={**ALL, "cohort": sites})


class Round:
    """The sites of one round of a run, with one method for each stage of the protocol.

    With the same ``configs``, several rounds are those of several runs of the same sites.
    """

    def __init__(self, sites: int = 4, configs: list[dict[str, Any]] | None = None, **site: Any) -> None:
        setup = make_setup(of_sites(sites))
        engine = LoopEngine(setup)
        files = [read_site(config["site"]) for config in configs] if configs else [Site(**site)] * sites
        self.here = [
            ClientTask(engine, file, c, 0, Memory(Context(1, 1, {}, RecordDict(), {}))) for c, file in enumerate(files)
        ]
        self.start = setup.weights()
        self.upload = {name: t + 0.25 for name, t in self.start.items()}
        self.told = {"experiment": as_table(setup.experiment), "setup": describe_setup(setup), "quantity": "models"}
        self.told["total"] = int(setup.sizes(0).sum())

    def keys(self, *clients: int) -> Tensors:
        """The keys of some sites, or of all."""
        made = {c: at_site.make_keys(self.here[c], self.told, {})[1] for c in clients or range(len(self.here))}
        return {f"{c}/{name}": t for c, keys in made.items() for name, t in keys.items()}

    def share(self, client: int, keys: Tensors, threshold: int = 3) -> Tensors:
        return at_site.make_shares(self.here[client], {**self.told, "threshold": threshold}, keys)[1]

    def shares(self, keys: Tensors) -> dict[int, Tensors]:
        return {h.client: self.share(h.client, keys) for h in self.here}

    def sealed(self, shares: dict[int, Tensors], client: int, among: Any = range(5)) -> Tensors:
        return {f"sealed/{c}": table[str(client)] for c, table in shares.items() if c in among and c != client}

    def masked(self, client: int, sealed: Tensors, **otherwise: Any) -> torch.Tensor:
        beside = otherwise.pop("beside", {})
        here, told = self.here[client], {**self.told, **otherwise}
        aggregator = here.setup.experiment.method.aggregator
        with at_site.masking(here, "models", told, sealed) as taken:
            return at_site.masked_update(here, aggregator, self.upload, self.start, told, taken, beside)["masked"]

    def sign(self, client: int, present: list[int], dropped: list[int]) -> torch.Tensor:
        told = {"quantity": "models", "present": present, "dropped": dropped}
        return at_site.sign_sites(self.here[client], told, {})[1]["sign"]

    def reveal(self, client: int, present: Any, dropped: Any = (), signed: Any = NOTHING) -> Tensors:
        told = {"quantity": "models", "present": list(present), "dropped": list(dropped)}
        return at_site.reveal_shares(self.here[client], told, {f"sign/{site}": t for site, t in signed.items()})[1]

    def sum(
        self, keys: Tensors, shares: dict[int, Tensors], sites: Any, present: Any = range(4), told: Any = NOTHING
    ) -> torch.Tensor:
        """The server's sum of the sites that are ``present``, of which some may be told another context."""
        vectors = {c: self.masked(c, self.sealed(shares, c), **told.get(c, {})) for c in present}
        public = {c: {n: masks.tensor_to_bytes(keys[f"{c}/{n}"]) for n in ("mask", "box")} for c in range(4)}
        commits = {c: masks.tensor_to_bytes(table["commit"]) for c, table in shares.items()}
        digests = {c: digests_in(table["digests"]) for c, table in shares.items()}
        about = masks.sum_digest(self.told, 0, self.start, self.told["total"])
        sealed = {c: {} for c in range(4)}
        return MaskedSum(sites, 0, 3, public, sealed, commits, digests, context=about).sum(vectors)

    def expected(self, present: Any = range(4)) -> torch.Tensor:
        """The plain sum of their encoded models."""
        shares = [self.here[c].size / self.told["total"] for c in present]
        return torch.stack([SecureMean().encoded(self.upload, self.start, share) for share in shares]).sum(0).int()


def dealt() -> tuple[Round, Tensors, dict[int, Tensors]]:
    """A round in which all sites have sent their keys and shares."""
    one = Round()
    keys = one.keys()
    return one, keys, one.shares(keys)


class Replying:
    """Sites that reply with ``shares(client, fields)``, which ``reveal`` may change; whom the server excludes."""

    def __init__(self, shares: Any, reveal: Any = lambda client, tensors: tensors) -> None:
        self.shares, self.reveal = shares, reveal
        self.excluded: dict[int, str] = {}

    def exclude(self, client: int, why: str) -> None:
        self.excluded[client] = why

    def exchange(self, kind: str, round: int, orders: Any) -> Any:
        said = {c: self.shares(c, order.fields) for c, order in orders.items()}
        return {c: Reply({}, self.reveal(c, tensors)) for c, tensors in said.items()}


def all_of(one: Round, *reveal: Any) -> Replying:
    """The sites of a round, all of which reply."""
    return Replying(lambda client, fields: at_site.reveal_shares(one.here[client], fields, {})[1], *reveal)


def digests_in(tensor: torch.Tensor) -> dict[tuple[int, str], bytes]:
    """The digests of a dealer's shares by receiver and secret."""
    digests = [row.numpy().tobytes() for row in tensor.reshape(-1, masks.DIGEST_BYTES)]
    return {(i // 2, masks.SECRETS[i % 2]): digest for i, digest in enumerate(digests)}


def test_a_site_masks_one_model_and_reveals_shares_once() -> None:
    one, _, shares = dealt()
    first = one.masked(0, one.sealed(shares, 0))
    with pytest.raises(FedblendError, match=NOT_YET):
        one.masked(0, one.sealed(shares, 0))
    kept = one.here[0].memory.recall(at_site.STATE, "0/models/masked")
    assert not {"own", "private/mask"} & set(kept)
    assert set(one.reveal(0, [0, 1, 2], [3])) == {"own/0", "own/1", "own/2", "pair/3"}
    with pytest.raises(FedblendError, match=NOT_YET):
        one.reveal(0, [0, 1, 3], [2])
    # With new keys the same model has another mask.
    again = one.shares(one.keys())
    assert int((one.masked(0, one.sealed(again, 0)) == first).sum()) <= 3


def test_a_site_reveals_no_shares_of_another_sum() -> None:
    one, _, shares = dealt()
    one.masked(0, one.sealed(shares, 0))
    for there, gone in (([0, 1, 2], [2, 3]), ([0, 1, 2], []), ([1, 2, 3], [0]), ([0, 1, 2, 3], [4])):
        with pytest.raises(RefusedByPolicy, match="for which the site has no masks"):
            one.reveal(0, there, gone)
    with pytest.raises(RefusedByPolicy, match="a sum of 2 sites; the least is 3"):
        one.reveal(0, [0, 1], [2, 3])


def test_a_site_checks_keys_and_the_size_of_the_sum() -> None:
    one = Round()
    keys = one.keys()
    # Another key in place of the site's own, or one key twice, is a man in the middle.
    new = masks.bytes_to_tensor(masks.new_key_pair()[1])
    for wrong in ({"0/mask": new}, {"0/box": new}, {"2/box": keys["1/box"]}, {"2/mask": keys["2/box"]}):
        with pytest.raises(RefusedByPolicy, match="are not those that the sites sent"):
            one.share(0, keys | wrong)
    for threshold in (2, 5):
        with pytest.raises(RefusedByPolicy, match=f"a sum of {threshold} of 4 sites"):
            one.share(0, keys, threshold)
    strict = Round(min_sum=4)
    with pytest.raises(RefusedByPolicy, match="a sum of 3 of 4 sites: the experiment and this site's policy want 4"):
        strict.shares(strict.keys())
    shares = one.shares(keys)
    for sealed in (dict(list(one.sealed(shares, 0).items())[:1]), {"sealed/7": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(RefusedByPolicy, match="are not those of this round"):
            one.masked(0, sealed)


def test_shares_changed_in_transit_are_left_out() -> None:
    one, _, shares = dealt()
    sealed = one.sealed(shares, 0)
    sealed["sealed/2"] = sealed["sealed/2"].flip(0)
    one.masked(0, sealed)
    assert set(one.reveal(0, range(4))) == {"own/0", "own/1", "own/3"}


def test_a_site_can_allow_only_masked_models(tmp_path: Path) -> None:
    allow = ["masked", "keys"]
    finished = federate(Nodes(site_files(tmp_path, 4, allow=allow)), asked(), tmp_path / "run")
    assert finished.state.round == 1
    assert [line["kind"] for line in audit(tmp_path, 0)] == ["keys", "keys", "masked", "masked", "keys"]
    assert [line.get("begun", False) for line in audit(tmp_path, 0)] == [False, False, True, False, False]
    assert [line.get("trained", False) for line in audit(tmp_path, 0)] == [False, False, True, True, False]
    with pytest.raises(FedblendError, match="lets no weights out"):
        federate(Nodes(site_files(tmp_path, 4, allow=allow)), asked("fedavg"), tmp_path / "other")


def test_the_server_removes_the_masks_of_dropped_sites() -> None:
    one, keys, shares = dealt()
    assert torch.equal(one.sum(keys, shares, all_of(one), (0, 1, 2)), one.expected((0, 1, 2)))


@pytest.mark.parametrize(
    "told",
    [
        {"total": 10**9},
        {"experiment": {"train": {"lr": 9.0}}},
        {"setup": {"scale": 2}},
        {"beside": {"x": torch.ones(1)}},
    ],
)
def test_a_server_that_sends_sites_different_contexts_gets_noise(told: dict[str, Any]) -> None:
    one, keys, shares = dealt()
    numbers = one.sum(keys, shares, all_of(one), (0, 1, 2), {1: told})
    # Noise: the standard deviation is that of uniform numbers of 32 bits.
    assert float((numbers.double() / 2**32).std()) == pytest.approx(12**-0.5, rel=0.1)


@pytest.mark.parametrize("total", [0, 1, None])
def test_a_site_checks_the_total_weight_of_the_sum(total: Any) -> None:
    one, _, shares = dealt()
    with pytest.raises(FedblendError, match=r"the total weight .* of the sum is not valid"):
        one.masked(0, one.sealed(shares, 0), total=total)


def test_a_secret_of_wrong_length_is_an_error() -> None:
    """A site may commit to a secret that is too short for a key."""
    secrets = {0: b"short", 1: bytes(32), 2: bytes(range(32))}
    parts = {client: masks.split_secret(secret, 3, 3) for client, secret in secrets.items()}

    sites = Replying(lambda client, fields: {f"own/{of}": masks.bytes_to_tensor(s[client]) for of, s in parts.items()})
    commits = {client: masks.commitment(secret) for client, secret in secrets.items()}
    digests = {
        of: {(c, "own"): masks.share_digest(of, c, "own", share) for c, share in enumerate(shares)}
        for of, shares in parts.items()
    }
    made = MaskedSum(sites, 0, 3, {}, {c: {} for c in secrets}, commits, digests)
    with pytest.raises(FedblendError, match="client 0 has split a secret into shares that do not restore it"):
        made.sum({client: torch.zeros(4, dtype=torch.int32) for client in secrets})
    assert set(sites.excluded) == {0}


def test_the_digest_of_a_sum_is_equal_at_server_and_site_and_differs_for_other_contexts() -> None:
    told = {"experiment": {"lr": 0.1, "sizes": (10, 2)}, "setup": {2: 1.5, 10: None}}
    as_read = json.loads(json.dumps(told))
    start = {"b": torch.ones(2), "a": torch.zeros(3)}
    one = masks.sum_digest(told, 3, start, 40)
    assert one == masks.sum_digest(as_read, 3, dict(reversed(start.items())), 40)
    others = [
        masks.sum_digest(told, 4, start, 40),
        masks.sum_digest(told, 3, start, 41),
        masks.sum_digest(told, 3, {**start, "a": torch.ones(3)}, 40),
        masks.sum_digest({**told, "experiment": {"lr": 0.2, "sizes": (10, 2)}}, 3, start, 40),
        masks.sum_digest(told, 3),
    ]
    assert len({one, *others}) == 6


def signing_sites(folder: Path, sites: int = 4, **fields: Any) -> list[dict[str, Any]]:
    """Node configurations of sites that sign their keys, and know all sites' public keys."""
    write_peers(folder, [f"site-{c}" for c in range(sites)])
    files = {c: {"key": f"site-{c}.key", "peers": "peers.toml", **fields} for c in range(sites)}
    return site_files(folder, sites, files)


@pytest.mark.parametrize(
    "method", slow_after_first([None, {"name": "fedmix", "sharing": "secure-means"}]), ids=["models", "means"]
)
def test_sites_that_sign_their_keys_make_the_same_sum(method: Any, tmp_path: Path) -> None:
    one = asked(method)
    finished = federate(Nodes(signing_sites(tmp_path)), one, tmp_path / "run")
    is_loops(finished, one)


def test_a_server_cannot_take_the_place_of_sites_that_sign_their_keys(tmp_path: Path) -> None:
    """The server gives site 0 keys of its own in place of all others', and so could unmask its model."""
    configs = signing_sites(tmp_path)
    make_site_key(tmp_path / "server")
    told = Round(configs=configs).told
    context = masks.sum_digest(told, 0)
    pairs = {c: {name: masks.new_key_pair()[1] for name in ("mask", "box")} for c in (1, 2, 3, 4)}

    def replies(swapped: dict[int, dict[str, bytes]], present: list[int]) -> str:
        one = Round(configs=configs)
        keys = one.keys(*(c for c in present if c < 4))
        keys |= {f"{c}/{n}": masks.bytes_to_tensor(k) for c, table in swapped.items() for n, k in table.items()}
        try:
            one.share(0, keys)
        except RefusedByPolicy as refusal:
            return str(refusal)
        return ""

    assert replies({}, [0, 1, 2, 3]) == ""
    not_signed = "the keys of site 1 are not signed with its own key (peers in the site file)"
    assert not_signed in replies({c: pairs[c] for c in (1, 2, 3)}, [0])
    server = str(tmp_path / "server.key")
    forged = {c: masks.sign(server, masks.keys_text(c, "models", context, pairs[c])) for c in (1, 2, 3)}
    assert not_signed in replies({c: pairs[c] | {"sign": forged[c]} for c in (1, 2, 3)}, [0])
    # A site's signature of other keys, of another quantity, round or experiment, or as another site.
    for text in (
        masks.keys_text(1, "models", context, pairs[2]),
        masks.keys_text(1, "means", context, pairs[1]),
        masks.keys_text(1, "models", masks.sum_digest(told, 1), pairs[1]),
        masks.keys_text(2, "models", context, pairs[1]),
    ):
        signed = masks.sign(str(tmp_path / "site-1.key"), text)
        assert not_signed in replies({1: pairs[1] | {"sign": signed}}, [0, 2, 3])
    assert "site 4 would be in the sum, and is not among this site's peers" in replies({4: pairs[4]}, [0, 1, 2, 3])


def test_a_site_opens_no_share_that_was_sealed_under_other_keys(tmp_path: Path) -> None:
    """A server gives site 0 keys that sites 1 to 3 signed in runs of their own, each with other keys of the rest."""
    configs = signing_sites(tmp_path)
    victim, run_of_1, others = (Round(configs=configs) for _ in range(3))
    keys_of_0, keys_of_1 = victim.keys(0), run_of_1.keys(1)
    here, there = (others.keys(2, 3) for _ in range(2))
    sealed_by_0 = victim.share(0, keys_of_0 | keys_of_1 | here)
    run_of_1.share(1, keys_of_0 | keys_of_1 | there)
    sealed = {f"sealed/{c}": torch.zeros(1, dtype=torch.uint8) for c in (2, 3)} | {"sealed/0": sealed_by_0["1"]}
    run_of_1.masked(1, sealed)
    present = [0, 1, 2, 3]
    state = run_of_1.here[1].memory.recall(at_site.STATE, "0/models/masked")
    texts = {c: masks.sites_text(c, "models", masks.tensor_to_bytes(state["table"]), present, []) for c in present}
    signed = {c: masks.bytes_to_tensor(masks.sign(str(tmp_path / f"site-{c}.key"), texts[c])) for c in (0, 2, 3)}
    run_of_1.sign(1, present, [])
    assert set(run_of_1.reveal(1, present, [], signed)) == {"own/1"}


def test_sites_unmask_a_sum_of_the_sites_that_most_of_them_have_signed(tmp_path: Path) -> None:
    """Of five sites the server names three to site 0, and tells each what it needs for the masks of site 0's model."""
    one = Round(5, signing_sites(tmp_path, 5))
    shares = one.shares(one.keys())
    for c in range(5):
        one.masked(c, one.sealed(shares, c, (0, 1, 2) if c == 0 else range(5)))
    # Sites 0, 3 and 4 would give shares of the secret of site 0, and three sites those of the keys of 1 and of 2.
    lists = {0: ([0, 1, 2], []), 1: ([0, 1, 3, 4], [2]), 2: ([0, 2, 3, 4], [1])}
    lists |= dict.fromkeys((3, 4), ([0, 3, 4], [1, 2]))
    for c in range(5):
        with pytest.raises(FedblendError, match=NOT_YET):
            one.reveal(c, *lists[c])
    signed = {c: one.sign(c, *lists[c]) for c in range(5)}
    for c in range(5):
        with pytest.raises(RefusedByPolicy, match=r"[12] sites have signed that the sum is of .*; 3 must"):
            one.reveal(c, *lists[c], signed)
        with pytest.raises(FedblendError, match=NOT_YET):
            one.sign(c, [0, 1, 2, 3, 4], [])
    # A site that is not in the sum does not count, whatever it signs.
    table = masks.tensor_to_bytes(one.here[0].memory.recall(at_site.STATE, "0/models/signed")["table"])
    for c in (3, 4):
        text = masks.sites_text(c, "models", table, {0, 1, 2}, set())
        signed[c] = masks.bytes_to_tensor(masks.sign(str(tmp_path / f"site-{c}.key"), text))
    with pytest.raises(RefusedByPolicy, match="1 sites have signed"):
        one.reveal(0, *lists[0], {c: signed[c] for c in (0, 3, 4)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signed", "when", "left"),
    [
        (False, {1: "query.keys"}, [0, 2, 3, 4]),
        (False, {1: "query.shares"}, [0, 2, 3, 4]),
        (False, {1: "train"}, [0, 2, 3, 4]),
        (False, {0: "train", 4: "train"}, [1, 2, 3]),
        (False, {0: "query.keys", 3: "train"}, [1, 2, 4]),
        (False, {1: "query.unmask", 2: "query.unmask"}, [0, 1, 2, 3, 4]),
        (True, {1: "query.shares"}, [0, 2, 3, 4]),
        (True, {0: "train", 4: "train"}, [1, 2, 3]),
        (True, {1: "query.sign"}, [0, 1, 2, 3, 4]),
    ],
)
def test_the_sum_covers_the_sites_that_did_not_drop_out(
    signed: bool, when: dict[int, str], left: list[int], tmp_path: Path
) -> None:
    one = asked(partition=UNEQUAL, train={**ALL, "cohort": 5})
    grid = Nodes(signing_sites(tmp_path, 5)) if signed else nodes(5)
    finished = federate(drop(grid, when), one, tmp_path / "run")
    is_sum_of(finished, one, left, list(range(5)))
    assert list(refusals(finished)) == [c for c in range(5) if c not in left]


def test_a_signature_is_of_one_run_node_and_sum_and_of_one_kind_of_text() -> None:
    """Else what a site signed once would serve a server for something else."""
    node, site, about = b"\3\0\0\0run\1\0\0\0007", b"\1\0\0\0002", b"\6\0\0\0models\3\0\0\0sum"
    keys, lists = b"\1\0\0\0m\2\0\0\0bb", b"\r\0\0\0[[0, 2], [1]]"
    signed = masks.keys_text(2, "models", b"sum", {"mask": b"m", "box": b"bb"})
    assert masks.hello_text("run", 7, 2) == b"fedblend client of a node\0" + node + site
    assert signed == b"fedblend keys of a masked sum\0" + site + about + keys
    signed = masks.sites_text(2, "models", b"sum", {2, 0}, {1})
    assert signed == b"fedblend sites of a masked sum\0" + site + about + lists


def test_a_key_that_cannot_sign_is_one_message(tmp_path: Path) -> None:
    assert not masks.is_signed("ecdsa-sha2-nistp384 AAAA", b"text", b"signature")
    (tmp_path / "key").write_text("none")
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        ("key", "cannot sign with it: .*; valid: ssh-keygen -t ecdsa -b 384"),
        ("missing", "no such file; key: give this site's private key in OpenSSH's format"),
        ("pipe", "is no regular file; key: give"),
    ):
        with pytest.raises(FedblendError, match=why):
            masks.sign(str(tmp_path / path), b"text")


# A dishonest site is named and excluded -------------------------------------------------------------------


Reveal = Callable[[int, Tensors], Tensors]


def flipped(share: torch.Tensor) -> torch.Tensor:
    """A share of the same index with other numbers."""
    return torch.cat([share[:4], share[4:] ^ 255])


def the_sum(one: Round, keys: Tensors, shares: dict[int, Tensors], *reveal: Reveal) -> dict[int, str]:
    """Whom the server excludes, after a sum that must be that of all four sites."""
    sites = all_of(one, *reveal)
    assert torch.equal(one.sum(keys, shares, sites), one.expected())
    return sites.excluded


@pytest.mark.parametrize(
    ("liar", "wrong"),
    [
        (None, flipped),
        (0, flipped),
        (3, flipped),
        (3, lambda share: share.repeat(10_000)),
        (0, lambda share: share[:2]),
    ],
)
def test_a_site_that_sends_wrong_shares_is_named(liar: int, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def reveal(client: int, tensors: Tensors) -> Tensors:
        return {name: wrong(t) for name, t in tensors.items()} if client == liar else tensors

    excluded = the_sum(*dealt(), reveal)
    assert set(excluded) == {liar} - {None}
    assert all(why.startswith("excluded since round 1: its shares with clients") for why in excluded.values())


def test_of_one_wrong_share_both_sites_are_named_and_none_is_excluded(caplog: Any) -> None:
    def reveal(client: int, tensors: Tensors) -> Tensors:
        return {**tensors, "own/1": flipped(tensors["own/1"])} if client == 0 else tensors

    assert the_sum(*dealt(), reveal) == {}
    assert "client 0 has sent no share of client 1's secret, or one that client 1 did not commit to" in caplog.text


def test_a_site_that_commits_to_other_shares_than_it_deals_is_named() -> None:
    one, keys, shares = dealt()
    shares[2]["digests"] = shares[2]["digests"] ^ 255
    assert set(the_sum(one, keys, shares)) == {2}


def dealt_by(client: int, change: Callable[[list[bytes]], list[bytes]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A round in which one site splits its secrets dishonestly, and commits to what it deals."""
    one, split = Round(), masks.split_secret
    keys = one.keys()
    shares = {}
    for c in range(4):
        with monkeypatch.context() as patched:
            if c == client:
                patched.setattr(masks, "split_secret", lambda *a: change(split(*a)))
            shares[c] = one.share(c, keys)
    return one, keys, shares


def test_a_site_whose_shares_do_not_fit_together_is_named_and_another_set_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(shares: list[bytes]) -> list[bytes]:
        return [shares[0][:4] + bytes(len(shares[0]) - 4), *shares[1:]]

    excluded = the_sum(*dealt_by(2, change, monkeypatch))
    assert excluded == {2: "excluded since round 1: the shares of its secret do not fit together"}


def test_a_site_whose_shares_restore_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dealt_by(2, lambda shares: [s[:4] + bytes([i]) * (len(s) - 4) for i, s in enumerate(shares)], monkeypatch)
    with pytest.raises(FedblendError, match=r"client 2 has split a secret into shares that do not restore it\. Remove"):
        the_sum(*made)


def test_with_too_few_valid_shares_those_concerned_are_named() -> None:
    def reveal(client: int, tensors: Tensors) -> Tensors:
        return {**tensors, "own/1": flipped(tensors["own/1"])} if client in (0, 3) else tensors

    with pytest.raises(
        FedblendError, match=r"2 shares are valid, and 3 are needed\. Client 1, or those .* \(client 0, client 3\)"
    ):
        the_sum(*dealt(), reveal)


def withheld(dealer: int, receivers: set[int]) -> tuple[Round, Tensors, dict[int, Tensors]]:
    """A round in which a dealer seals what its receivers cannot open."""
    one, keys, shares = dealt()
    for receiver in receivers:
        shares[dealer][str(receiver)] = shares[dealer][str(receiver)].flip(0)
    return one, keys, shares


def test_of_one_share_that_cannot_be_opened_both_sites_are_named(caplog: Any) -> None:
    assert the_sum(*withheld(2, {0})) == {}
    assert "client 0 has sent no share of client 2's secret, or one that client 2 did not commit to" in caplog.text


def test_a_dealer_whose_shares_nobody_can_open_is_named() -> None:
    told = (
        r"of 'own/2', a secret of client 2, 1 shares are valid, and 3 are needed\. Client 2, or those whose shares are "
    )
    told += r"missing or differ \(client 0, client 1, client 3\), are dishonest; client 2 is excluded"
    with pytest.raises(NoSum, match=told):
        the_sum(*withheld(2, {0, 1, 3}))


@pytest.mark.slow
def test_a_run_goes_on_without_a_site_that_sent_wrong_shares(tmp_path: Path) -> None:
    one = asked(rounds=2)
    grid = nodes(4).changing("query.unmask", {0}, lambda t: {name: flipped(share) for name, share in t.items()})
    finished = federate(grid, one, tmp_path / "liar")
    assert finished.state.round == 2
    first, second = finished.directory.metrics()[1:]
    assert first.get("refused", []) == []
    (refused,) = second["refused"]
    assert (refused["client"], refused["reason"].startswith("excluded since round 1: its shares with")) == (0, True)
    honest = federate(nodes(4), asked(), tmp_path / "honest")
    assert first["loss"] == honest.directory.metrics()[1]["loss"], "the first round's sum is that of all sites"


def sealing_garbage(drops: bool) -> Nodes:
    """Four nodes, of which client 2 seals shares that nobody can open, and may then drop out of the round."""

    def seal(tensors: Tensors) -> Tensors:
        return {n: t if n in ("commit", "digests") else t.flip(0) for n, t in tensors.items()}

    return drop(nodes(4).changing("query.shares", {2}, seal), {2: "train"} if drops else {})


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True])
def test_a_run_goes_on_after_a_round_whose_sum_a_dealer_prevents(drops: bool, tmp_path: Path) -> None:
    name = "pair/2" if drops else "own/2"
    told = (
        f"the sum cannot be unmasked: of '{name}', a secret of client 2, {int(not drops)} shares are valid, and 3 are"
    )
    with pytest.raises(
        FedblendError, match=rf"round 1: 0 good uploads of 4.*{told}.*client 2 is excluded since round 1"
    ):
        federate(sealing_garbage(drops), asked(), tmp_path / "ends")
    finished = federate(sealing_garbage(drops), asked(rounds=2, min_uploads=0), tmp_path / "goes-on")
    first, second = finished.directory.metrics()[1:]
    assert (first["uploads"], second["uploads"]) == (0, 3)
    assert [one["client"] for one in first["refused"]] == [0, 1, 2, 3]
    (refused,) = second["refused"]
    assert (refused["client"], refused["reason"].startswith("excluded since round 1: its shares")) == (2, True)


@pytest.mark.slow
def test_a_wrong_share_of_a_dropped_sites_key_is_replaced(tmp_path: Path) -> None:
    one = asked(partition=UNEQUAL, train={**ALL, "cohort": 5})
    grid = nodes(5).changing("query.unmask", {0}, lambda t: {n: flipped(s) if "pair" in n else s for n, s in t.items()})
    finished = federate(drop(grid, {1: "train"}), one, tmp_path)
    is_sum_of(finished, one, [0, 2, 3, 4], list(range(5)))
