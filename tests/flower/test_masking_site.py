"""Secure aggregation at a site: its checks of requests, and the result of a dishonest server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from flower_helpers import ALL, Nodes, federate, is_loops
from flower_sites import audit, site_files
from flwr.app import Context, RecordDict
from helpers import slow_after_first
from test_masked_sum import asked, drop, summands

from fedblend.core.errors import FedblendError
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.toml_tables import write_toml
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.client_task import ClientTask, Memory
from fedblend.flower.credentials import make_site_key
from fedblend.flower.secure_aggregation import masking_site as at_site
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.secure_aggregation.masked_sum import MaskedSum
from fedblend.flower.server import run
from fedblend.flower.site import RefusedByPolicy, Site, describe_setup, read_site
from fedblend.flower.sites import Reply
from fedblend.methods.aggregators.mean import SecureMean, Total

pytestmark = pytest.mark.usefixtures("no_waits")

Tensors = dict[str, torch.Tensor]


class Round:
    """The sites of one round, with one method for each stage of the protocol."""

    def __init__(self, sites: int = 4, **site: Any) -> None:
        setup = make_setup(asked())
        engine = LoopEngine(setup)
        self.here = [
            ClientTask(engine, Site(**site), c, 0, Memory(Context(1, 1, {}, RecordDict(), {}))) for c in range(sites)
        ]
        self.start = setup.weights()
        self.upload = {name: t + 0.25 for name, t in self.start.items()}
        self.told = {"experiment": {}, "setup": {}, "total": int(setup.sizes(0).sum())}

    def keys(self) -> dict[str, torch.Tensor]:
        return {
            f"{h.client}/{name}": t
            for h in self.here
            for name, t in at_site.make_keys(h, {"quantity": "models"}, {})[1].items()
        }

    def shares(self, keys: dict[str, torch.Tensor], threshold: int = 3) -> dict[int, dict[str, torch.Tensor]]:
        return {
            h.client: at_site.make_shares(h, {"quantity": "models", "threshold": threshold}, keys)[1] for h in self.here
        }

    def sealed(self, shares: dict[int, dict[str, torch.Tensor]], client: int) -> dict[str, torch.Tensor]:
        return {f"sealed/{c}": table[str(client)] for c, table in shares.items() if c != client}

    def masked(self, client: int, sealed: dict[str, torch.Tensor], **otherwise: Any) -> torch.Tensor:
        beside = otherwise.pop("beside", {})
        here, told = self.here[client], {**self.told, **otherwise}
        aggregator = here.setup.experiment.method.aggregator
        with at_site.masking(here, "models", told, sealed) as taken:
            return at_site.masked_update(here, aggregator, self.upload, self.start, told, taken, beside)["masked"]

    def sum(
        self,
        keys: Tensors,
        shares: dict[int, Tensors],
        sites: Any,
        present: Any = range(4),
        told: Any = MappingProxyType({}),
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
    """The sites of a round, all of which reply; ``reveal`` may change their shares."""

    def __init__(self, one: Round, reveal: Any = lambda client, tensors: tensors) -> None:
        self.one, self.reveal = one, reveal
        self.excluded: dict[int, str] = {}

    def exclude(self, client: int, why: str) -> None:
        self.excluded[client] = why

    def exchange(self, kind: str, round: int, orders: Any) -> Any:
        said = {c: at_site.reveal_shares(self.one.here[c], order.fields, {})[1] for c, order in orders.items()}
        return {c: Reply({}, self.reveal(c, tensors)) for c, tensors in said.items()}


def digests_in(tensor: torch.Tensor) -> dict[tuple[int, str], bytes]:
    """The digests of a dealer's shares by receiver and secret."""
    digests = [row.numpy().tobytes() for row in tensor.reshape(-1, masks.DIGEST_BYTES)]
    return {(i // 2, masks.SECRETS[i % 2]): digest for i, digest in enumerate(digests)}


def test_a_site_masks_one_model_and_reveals_shares_once() -> None:
    one, _, shares = dealt()
    first = one.masked(0, one.sealed(shares, 0))
    with pytest.raises(FedblendError, match="the masks of round 1 are not at this stage"):
        one.masked(0, one.sealed(shares, 0))
    kept = one.here[0].memory.recall(at_site.STATE, "0/models/masked")
    assert not {"own", "private/mask"} & set(kept)
    fields = {"quantity": "models", "present": [0, 1, 2], "dropped": [3]}
    said = at_site.reveal_shares(one.here[0], fields, {})[1]
    assert set(said) == {"own/0", "own/1", "own/2", "pair/3"}
    with pytest.raises(FedblendError, match="the masks of round 1 are not at this stage"):
        at_site.reveal_shares(one.here[0], {"quantity": "models", "present": [0, 1, 3], "dropped": [2]}, {})
    # With new keys the same model has another mask.
    again = one.shares(one.keys())
    assert int((one.masked(0, one.sealed(again, 0)) == first).sum()) <= 3


def test_a_site_reveals_no_shares_of_another_sum() -> None:
    one, _, shares = dealt()
    one.masked(0, one.sealed(shares, 0))
    for there, gone in (([0, 1, 2], [2, 3]), ([0, 1, 2], []), ([1, 2, 3], [0]), ([0, 1, 2, 3], [4])):
        with pytest.raises(RefusedByPolicy, match="for which the site has no masks"):
            at_site.reveal_shares(one.here[0], {"quantity": "models", "present": there, "dropped": gone}, {})
    with pytest.raises(RefusedByPolicy, match="a sum of 2 sites; the least is 3"):
        at_site.reveal_shares(one.here[0], {"quantity": "models", "present": [0, 1], "dropped": [2, 3]}, {})


def test_a_site_checks_keys_and_the_size_of_the_sum() -> None:
    one = Round()
    keys = one.keys()
    # Another key in place of the site's own, or one key twice, is a man in the middle.
    new = masks.bytes_to_tensor(masks.new_key_pair()[1])
    for wrong in ({"0/mask": new}, {"0/box": new}, {"2/box": keys["1/box"]}, {"2/mask": keys["2/box"]}):
        with pytest.raises(RefusedByPolicy, match="are not those that the sites sent"):
            at_site.make_shares(one.here[0], {"quantity": "models", "threshold": 3}, keys | wrong)
    for threshold in (2, 5):
        with pytest.raises(RefusedByPolicy, match=f"a sum of {threshold} of 4 sites"):
            at_site.make_shares(one.here[0], {"quantity": "models", "threshold": threshold}, keys)
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
    assert set(
        at_site.reveal_shares(one.here[0], {"quantity": "models", "present": [0, 1, 2, 3], "dropped": []}, {})[1]
    ) == {"own/0", "own/1", "own/3"}


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
    assert torch.equal(one.sum(keys, shares, Replying(one), (0, 1, 2)), one.expected((0, 1, 2)))


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
    numbers = one.sum(keys, shares, Replying(one), (0, 1, 2), {1: told})
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

    class Asked:
        def __init__(self) -> None:
            self.excluded: dict[int, str] = {}

        def exclude(self, client: int, why: str) -> None:
            self.excluded[client] = why

        def exchange(self, kind: str, round: int, orders: Any) -> Any:
            return {
                c: Reply({}, {f"own/{of}": masks.bytes_to_tensor(shares[c]) for of, shares in parts.items()})
                for c in orders
            }

    commits = {client: masks.commitment(secret) for client, secret in secrets.items()}
    digests = {
        of: {(c, "own"): masks.share_digest(of, c, "own", share) for c, share in enumerate(shares)}
        for of, shares in parts.items()
    }
    made = MaskedSum(Asked(), 0, 3, {}, {c: {} for c in secrets}, commits, digests)
    with pytest.raises(FedblendError, match="client 0 has split a secret into shares that do not restore it"):
        made.sum({client: torch.zeros(4, dtype=torch.int32) for client in secrets})
    assert set(made.sites.excluded) == {0}


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
    for site in range(sites):
        make_site_key(folder / f"site-{site}")
    peers = {str(site): (folder / f"site-{site}.pub").read_text().strip() for site in range(sites)}
    (folder / "peers.toml").write_text(write_toml(peers))
    configs = site_files(folder, sites)
    for site in range(sites):
        table = {"audit": f"audit-{site}.jsonl", "key": f"site-{site}.key", "peers": "peers.toml", **fields}
        (folder / f"site-{site}.toml").write_text(write_toml(table))
    return configs


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
    setup = make_setup(asked())
    make_site_key(tmp_path / "server")
    told = {"experiment": as_table(asked()), "setup": describe_setup(setup), "quantity": "models", "threshold": 3}
    context = masks.sum_digest(told, 0)
    pairs = {c: {name: masks.new_key_pair()[1] for name in ("mask", "box")} for c in (1, 2, 3, 4)}

    def replies(swapped: dict[int, dict[str, bytes]], present: list[int]) -> str:
        engine = LoopEngine(setup)
        here = [
            ClientTask(engine, read_site(config["site"]), c, 0, Memory(Context(1, 1, {}, RecordDict(), {})))
            for c, config in enumerate(configs)
        ]
        keys = {c: at_site.make_keys(here[c], told, {})[1] for c in present if c < 4}
        keys |= {c: {n: masks.bytes_to_tensor(k) for n, k in table.items()} for c, table in swapped.items()}
        table = {f"{c}/{name}": t for c, made in keys.items() for name, t in made.items()}
        try:
            at_site.make_shares(here[0], told, table)
        except RefusedByPolicy as refusal:
            return str(refusal)
        return ""

    assert replies({}, [0, 1, 2, 3]) == ""
    not_signed = "the keys of site 1 are not signed with its own key (peers in the site file)"
    assert not_signed in replies({c: pairs[c] for c in (1, 2, 3)}, [0])
    forged = {c: masks.sign_keys(str(tmp_path / "server.key"), c, "models", context, pairs[c]) for c in (1, 2, 3)}
    assert not_signed in replies({c: pairs[c] | {"sign": forged[c]} for c in (1, 2, 3)}, [0])
    # A site's signature of other keys, of another quantity, round or experiment, or as another site.
    own = str(tmp_path / "site-1.key")
    for signed in (
        masks.sign_keys(own, 1, "models", context, pairs[2]),
        masks.sign_keys(own, 1, "means", context, pairs[1]),
        masks.sign_keys(own, 1, "models", masks.sum_digest(told, 1), pairs[1]),
        masks.sign_keys(own, 2, "models", context, pairs[1]),
    ):
        assert not_signed in replies({1: pairs[1] | {"sign": signed}}, [0, 2, 3])
    assert "site 4 would be in the sum, and is not among this site's peers" in replies({4: pairs[4]}, [0, 1, 2, 3])


class Signing:
    """Sites that sign their keys, in one Flower run; with it one may begin several runs of the same sites."""

    def __init__(self, configs: list[dict[str, Any]], sites: int, engine: LoopEngine | None = None) -> None:
        self.engine = engine or LoopEngine(make_setup(of_sites(sites)))
        setup = self.engine.setup
        self.start, self.total = setup.weights(), int(setup.sizes(0).sum())
        self.told = {"experiment": as_table(setup.experiment), "setup": describe_setup(setup), "quantity": "models"}
        self.here = [
            ClientTask(self.engine, read_site(config["site"]), c, 0, Memory(Context(1, 1, {}, RecordDict(), {})))
            for c, config in enumerate(configs)
        ]

    def keys(self, client: int) -> dict[str, torch.Tensor]:
        return {f"{client}/{n}": t for n, t in at_site.make_keys(self.here[client], self.told, {})[1].items()}

    def shares(self, client: int, table: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return at_site.make_shares(self.here[client], {**self.told, "threshold": 3}, table)[1]

    def mask(self, client: int, sealed: dict[str, torch.Tensor]) -> None:
        here, told = self.here[client], {**self.told, "total": self.total}
        with at_site.masking(here, "models", told, sealed) as taken:
            at_site.masked_update(here, here.setup.experiment.method.aggregator, self.start, self.start, told, taken)

    def sign(self, client: int, present: list[int], dropped: list[int]) -> torch.Tensor:
        told = {"quantity": "models", "present": present, "dropped": dropped}
        return at_site.sign_sites(self.here[client], told, {})[1]["sign"]

    def reveal(
        self, client: int, present: list[int], dropped: list[int], signed: dict[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        told = {"quantity": "models", "present": present, "dropped": dropped}
        signatures = {f"sign/{site}": signature for site, signature in signed.items()}
        return at_site.reveal_shares(self.here[client], told, signatures)[1]


def of_sites(sites: int) -> Any:
    return asked(partition={"name": "iid", "clients": sites}, train={**ALL, "cohort": sites})


def test_a_site_opens_no_share_that_was_sealed_under_other_keys(tmp_path: Path) -> None:
    """A server gives site 0 keys that sites 1 to 3 signed in runs of their own, each with other keys of the rest."""
    configs = signing_sites(tmp_path)
    victim, run_of_1, others = Signing(configs, 4), Signing(configs, 4), Signing(configs, 4)
    keys_of_0, keys_of_1 = victim.keys(0), run_of_1.keys(1)
    here, there = ({**others.keys(2), **others.keys(3)} for _ in range(2))
    sealed_by_0 = victim.shares(0, keys_of_0 | keys_of_1 | here)
    run_of_1.shares(1, keys_of_0 | keys_of_1 | there)
    sealed = {f"sealed/{c}": torch.zeros(1, dtype=torch.uint8) for c in (2, 3)} | {"sealed/0": sealed_by_0["1"]}
    run_of_1.mask(1, sealed)
    present = [0, 1, 2, 3]
    state = run_of_1.here[1].memory.recall(at_site.STATE, "0/models/masked")
    texts = {c: masks.sites_text(c, "models", masks.tensor_to_bytes(state["table"]), present, []) for c in present}
    signed = {c: masks.bytes_to_tensor(masks.sign(str(tmp_path / f"site-{c}.key"), texts[c])) for c in (0, 2, 3)}
    run_of_1.sign(1, present, [])
    assert set(run_of_1.reveal(1, present, [], signed)) == {"own/1"}


def test_sites_unmask_a_sum_of_the_sites_that_most_of_them_have_signed(tmp_path: Path) -> None:
    """Of five sites the server names three to site 0, and tells each what it needs for the masks of site 0's model."""
    one = Signing(signing_sites(tmp_path, 5), 5)
    table = {name: key for c in range(5) for name, key in one.keys(c).items()}
    shares = {c: one.shares(c, table) for c in range(5)}
    for c in range(5):
        among = (0, 1, 2) if c == 0 else range(5)
        one.mask(c, {f"sealed/{d}": shares[d][str(c)] for d in among if d != c})
    # Sites 0, 3 and 4 would give shares of the secret of site 0, and three sites those of the keys of 1 and of 2.
    lists = {0: ([0, 1, 2], []), 1: ([0, 1, 3, 4], [2]), 2: ([0, 2, 3, 4], [1])}
    lists |= dict.fromkeys((3, 4), ([0, 3, 4], [1, 2]))
    for c in range(5):
        with pytest.raises(FedblendError, match="the masks of round 1 are not at this stage"):
            one.reveal(c, *lists[c], {})
    signed = {c: one.sign(c, *lists[c]) for c in range(5)}
    for c in range(5):
        with pytest.raises(RefusedByPolicy, match=r"[12] sites have signed that the sum is of .*; 3 must"):
            one.reveal(c, *lists[c], signed)
        with pytest.raises(FedblendError, match="the masks of round 1 are not at this stage"):
            one.sign(c, [0, 1, 2, 3, 4], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "left"),
    [({1: "query.shares"}, [0, 2, 3, 4]), ({0: "train", 4: "train"}, [1, 2, 3]), ({1: "query.sign"}, [0, 1, 2, 3, 4])],
)
def test_a_signed_sum_covers_the_sites_that_did_not_drop_out(
    when: dict[int, str], left: list[int], tmp_path: Path
) -> None:
    one = of_sites(5)
    grid = drop(Nodes(signing_sites(tmp_path, 5)), when)
    finished = run(grid, one, tmp_path / "run", FederationLimits(min_sites=2, deadline=2))
    sizes = make_setup(one).sizes(0)
    share = sum(one.method.aggregator.share_of(int(sizes[c]), sizes.tolist()) for c in left)
    total = sum(summands(one, left, list(range(5))).values())
    expected = one.method.aggregator.decoded(Total(total, share), make_setup(one).weights())
    for name, tensor in expected.items():
        torch.testing.assert_close(finished.state.weights[name], tensor, rtol=0, atol=1e-7)
    assert [r["client"] for r in finished.directory.metrics()[1].get("refused", [])] == [
        c for c in range(5) if c not in left
    ]


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
            masks.sign_keys(str(tmp_path / path), 0, "models", b"", {"mask": b"", "box": b""})
