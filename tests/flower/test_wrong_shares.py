"""Secure sums with a dishonest site: the sum is computed, and the site is named and excluded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_helpers import ALL, Nodes, federate, nodes
from flwr.app import Message
from test_masked_sum import asked, summands
from test_masking_site import Replying, Round, Tensors, dealt

from fedblend.core.errors import FedblendError
from fedblend.experiment.make_setup import make_setup
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.messages import pack, to_record, unpack
from fedblend.flower.secure_aggregation import masking_site as at_site
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.secure_aggregation.masked_sum import NoSum
from fedblend.flower.server import run
from fedblend.methods.aggregators.mean import Total

pytestmark = pytest.mark.usefixtures("no_waits")

Reveal = Callable[[int, Tensors], Tensors]


def flipped(share: torch.Tensor) -> torch.Tensor:
    """A share of the same index with other numbers."""
    return torch.cat([share[:4], share[4:] ^ 255])


def the_sum(one: Round, keys: Tensors, shares: dict[int, Tensors], *reveal: Reveal) -> dict[int, str]:
    """Whom the server excludes, after a sum that must be that of all four sites."""
    sites = Replying(one, *reveal)
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


def test_of_one_wrong_share_both_sites_are_named_and_none_is_excluded(caplog: pytest.LogCaptureFixture) -> None:
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
    one = Round()
    keys = one.keys()
    shares = {}
    for here in one.here:
        with monkeypatch.context() as patched:
            if here.client == client:
                patched.setattr(at_site, "split_secret", lambda *a: change(masks.split_secret(*a)))
            shares[here.client] = at_site.make_shares(here, {"quantity": "models", "threshold": 3}, keys)[1]
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


def test_of_one_share_that_cannot_be_opened_both_sites_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert the_sum(*withheld(2, {0})) == {}
    assert "client 0 has sent no share of client 2's secret, or one that client 2 did not commit to" in caplog.text


def test_a_dealer_whose_shares_nobody_can_open_is_named() -> None:
    told = (
        r"of 'own/2', a secret of client 2, 1 shares are valid, and 3 are needed\. Client 2, or those whose shares are "
    )
    told += r"missing or differ \(client 0, client 1, client 3\), are dishonest; client 2 is excluded"
    with pytest.raises(NoSum, match=told):
        the_sum(*withheld(2, {0, 1, 3}))


def lying(grid: Nodes, liar: int, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Nodes:
    changed = grid.changing("query.unmask", {liar}, change).spoil

    def spoil(client: int, message: Message, reply: Message) -> Message | None:
        drops_out = (client, message.metadata.message_type) == (1, "train") and len(grid.contexts) == 5
        return None if drops_out else changed(client, message, reply)

    grid.spoil = spoil
    return grid


@pytest.mark.slow
def test_a_run_goes_on_without_a_site_that_sent_wrong_shares(tmp_path: Path) -> None:
    one = asked(rounds=2)
    grid = lying(nodes(4), 0, lambda t: {name: flipped(share) for name, share in t.items()})
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
    grid = nodes(4)

    def spoil(client: int, message: Message, reply: Message) -> Message | None:
        kind = message.metadata.message_type
        if client != 2 or kind not in ("query.shares", "train"):
            return reply
        if kind == "train":
            return None if drops else reply
        fields, tensors = unpack(reply.content)
        sealed = {n: t if n in ("commit", "digests") else t.flip(0) for n, t in tensors.items()}
        return Message(pack(fields, to_record(sealed)), reply_to=message)

    grid.spoil = spoil
    return grid


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True])
def test_a_run_goes_on_after_a_round_whose_sum_a_dealer_prevents(drops: bool, tmp_path: Path) -> None:
    limits = FederationLimits(min_sites=2, deadline=2)
    name = "pair/2" if drops else "own/2"
    told = (
        f"the sum cannot be unmasked: of '{name}', a secret of client 2, {int(not drops)} shares are valid, and 3 are"
    )
    with pytest.raises(
        FedblendError, match=rf"round 1: 0 good uploads of 4.*{told}.*client 2 is excluded since round 1"
    ):
        run(sealing_garbage(drops), asked(), tmp_path / "ends", limits)
    finished = run(sealing_garbage(drops), asked(rounds=2, min_uploads=0), tmp_path / "goes-on", limits)
    first, second = finished.directory.metrics()[1:]
    assert (first["uploads"], second["uploads"]) == (0, 3)
    assert [one["client"] for one in first["refused"]] == [0, 1, 2, 3]
    (refused,) = second["refused"]
    assert (refused["client"], refused["reason"].startswith("excluded since round 1: its shares")) == (2, True)


@pytest.mark.slow
def test_a_wrong_share_of_a_dropped_sites_key_is_replaced(tmp_path: Path) -> None:
    one = asked(partition={"name": "dirichlet", "clients": 5, "alpha": 5.0}, train={**ALL, "cohort": 5})
    grid = lying(
        nodes(5), 0, lambda t: {name: flipped(share) if "pair" in name else share for name, share in t.items()}
    )
    finished = run(grid, one, tmp_path, FederationLimits(min_sites=2, deadline=2))
    left, sizes = [0, 2, 3, 4], make_setup(one).sizes(0)
    share = sum(one.method.aggregator.share_of(int(sizes[c]), sizes.tolist()) for c in left)
    total = sum(summands(one, left, list(range(5))).values())
    expected = one.method.aggregator.decoded(Total(total, share), make_setup(one).weights())
    for name, tensor in expected.items():
        torch.testing.assert_close(finished.state.weights[name], tensor, rtol=0, atol=1e-7)
