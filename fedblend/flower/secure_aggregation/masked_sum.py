"""Secure aggregation at the server: the protocol of one masked sum, and the sums of means that clients share.

The server learns sums and no single vector.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedblend.core.errors import FedblendError, listed
from fedblend.core.sharing import Payload
from fedblend.core.trees import bytes_of
from fedblend.core.upload import fault_of
from fedblend.flower.messages import Tensors, to_record
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.sites import ClientRequest, Reply, Sites, summarize_faults
from fedblend.methods.sharing.means import MaskedSums

log = logging.getLogger("flwr")


UP, DOWN = ("up", "keys"), ("down", "keys")  # Directions and kind of what is counted here
TRIES = 200  # Sets of shares of one secret that are tried, where the first set does not restore it

LONGEST = 1024
"""Most bytes of a key, a signature, a share, or two sealed shares; the last have 612. The server sends them to all
sites, and the time to restore a secret is proportional to them."""


class NoSum(FedblendError):
    """A sum that cannot be computed."""


class TooFewSites(NoSum):
    """Fewer sites than a sum must cover."""


Shares = dict[str, list[bytes]]
"""Shares that sites have sent, by the secret that they restore: "own/SITE" or "pair/SITE"."""


@dataclass
class MaskedSum:
    """One masked sum between the server and the sites of a cohort.

    Call :meth:`begin`, send each site its :meth:`sealed_shares` with the request for its vector, then call
    :meth:`sum`.
    """

    sites: Sites
    round: int
    threshold: int  # Fewest sites in the sum
    public: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """Public keys "mask" and "box" of each site, and its signature "sign" if it signs them."""
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)  # Sealed shares of each sender, by receiver
    commitments: dict[int, bytes] = field(default_factory=dict)  # Commitment of each site to its own secret
    digests: dict[int, dict[tuple[int, str], bytes]] = field(default_factory=dict)
    """Digests of the shares that each site dealt, by receiver and secret ("own", "pair")."""
    faults: dict[int, str] = field(default_factory=dict)  # Why sites are not in the sum
    mismatches: set[tuple[int, int]] = field(default_factory=set)
    """Sites that dealt a share, with the sites that sent another one, or none, to unmask the sum."""
    counted: Counter[tuple[str, str]] = field(default_factory=lambda: Counter({UP: 0, DOWN: 0}))
    """Bytes of keys and shares that the server received and sent, by direction and kind."""
    quantity: str = masks.MODELS  # What is summed: "models" or "means"
    context: bytes = b""  # Digest of the sum's context (:func:`~fedblend.flower.secure_aggregation.masks.sum_digest`)

    def begin(self, clients: Collection[int]) -> list[int]:
        """Run stages 1 and 2; return the sites of stage 3. Raises :class:`TooFewSites` if they are too few."""
        replies = self._exchange("query.keys", dict.fromkeys(clients, ClientRequest({"quantity": self.quantity})))
        for client, reply in replies.items():
            keys = masks.as_bytes(reply.tensors)
            if fault := self._fault_of_keys(keys):
                self.faults[client] = fault
            else:
                self.public[client] = keys
        self._require(self.public, "sent keys")
        table = masks.as_tensors({f"{c}/{name}": keys[name] for c, keys in self.public.items() for name in keys})
        request = ClientRequest({"quantity": self.quantity, "threshold": self.threshold}, (to_record(table),))
        self.counted[DOWN] += bytes_of(table) * len(self.public)
        for client, reply in self._exchange("query.shares", dict.fromkeys(self.public, request)).items():
            peers = {str(peer) for peer in self.public if peer != client}
            of = [(receiver, secret) for receiver in sorted(self.public) for secret in masks.SECRETS]
            size = masks.DIGEST_BYTES
            digests = masks.tensor_to_bytes(reply.tensors.get("digests", torch.empty(0)))
            if set(reply.tensors) != peers | {"commit", "digests"} or len(digests) != size * len(of):
                self.faults[client] = "it sent no shares"
                continue
            dealt = masks.as_bytes({name: reply.tensors[name] for name in sorted({*peers, "commit"})})
            if fault := _fault_of_length(dealt):
                self.faults[client] = fault
                continue
            self.commitments[client] = dealt["commit"]
            self.digests[client] = {key: digests[size * i :][:size] for i, key in enumerate(of)}
            self.sealed[client] = {int(peer): dealt[peer] for peer in peers}
        self._require(self.sealed, "sent shares")
        return sorted(self.sealed)

    def _fault_of_keys(self, keys: Mapping[str, bytes]) -> str | None:
        if set(keys) - {"sign"} != {"mask", "box"}:
            return "it sent no keys"
        if fault := _fault_of_length(keys):
            return fault
        own = {keys["mask"], keys["box"]}
        if not all(map(masks.is_public_key, own)):
            return "it sent no keys"
        known = {accepted[name] for accepted in self.public.values() for name in ("mask", "box")}
        return "its keys are not its own two" if len(own) < 2 or known & own else None

    def sealed_shares(self, client: int) -> ArrayRecord:
        """Return the shares that the other sites sealed for a site."""
        table = masks.as_tensors({f"sealed/{c}": s[client] for c, s in sorted(self.sealed.items()) if c != client})
        self.counted[DOWN] += bytes_of(table)
        return to_record(table)

    def sum(self, vectors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Run stages 4 and 5: return the sum behind the masked vectors, int32 [n], given by site.

        Secrets are restored from the shares that their dealers committed to, as far as these suffice. A site that has
        sent, or dealt, wrong shares is excluded from the run. Raises :class:`NoSum` if a secret cannot be restored.
        """
        self._require(vectors, f"sent {self.quantity}")
        dropped = [client for client in self.sealed if client not in vectors]
        of = {"quantity": self.quantity, "present": sorted(vectors), "dropped": sorted(dropped)}
        signed = self._signatures(of, vectors)
        request = ClientRequest(of, (to_record(signed),) if signed else ())
        asked = sorted(client for client in vectors if not signed or f"sign/{client}" in signed)
        self.counted[DOWN] += bytes_of(signed) * len(asked)
        wanted = {f"own/{client}": client for client in vectors} | {f"pair/{client}": client for client in dropped}
        committed: Shares = {name: [] for name in wanted}
        others: Shares = {name: [] for name in wanted}
        replies = self._exchange("query.unmask", dict.fromkeys(asked, request))
        for client in vectors.keys() - replies.keys():
            log.warning("fedblend: round %s: client %s sent no shares to unmask the sum", self.round + 1, client)
        for client, reply in replies.items():
            # A site sends its own share; it lacks those that it cannot open, because they were not sealed for it.
            if f"own/{client}" in reply.tensors:
                self.mismatches |= {(wanted[name], client) for name in wanted.keys() - reply.tensors.keys()}
            for name in wanted.keys() & reply.tensors.keys():
                share, dealer, secret = masks.tensor_to_bytes(reply.tensors[name]), wanted[name], name.partition("/")[0]
                fits = len(share) <= LONGEST
                if fits and masks.share_digest(dealer, client, secret, share) == self.digests[dealer][client, secret]:
                    committed[name].append(share)
                    continue
                self.mismatches.add((dealer, client))
                if fits:
                    others[name].append(share)
        self._exclude_by_mismatches()
        total = np.zeros(len(next(iter(vectors.values()))), np.uint32)
        for client, vector in vectors.items():
            key = self._join(f"own/{client}", client, committed, others)
            total += vector.numpy().view(np.uint32) - masks.mask_from_key(key, len(total))
        context = self.context + masks.table_digest(self.public, self.threshold)
        for client in dropped:
            private = self._join(f"pair/{client}", client, committed, others)
            for peer in vectors:
                mask = masks.shared_mask(private, self.public[peer]["mask"], context, len(total))
                total += mask if client < peer else np.uint32(0) - mask
        return torch.from_numpy(total.view(np.int32))

    def _signatures(self, of: dict[str, Any], present: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the signatures of who is in the sum, "sign/SITE"; none where sites do not sign their keys."""
        if not all("sign" in self.public.get(client, {}) for client in present):
            return {}
        replies = self._exchange("query.sign", dict.fromkeys(sorted(present), ClientRequest(of)))
        signed = {
            client: reply.tensors["sign"]
            for client, reply in replies.items()
            if set(reply.tensors) == {"sign"} and len(reply.tensors["sign"]) <= LONGEST
        }
        self._require(signed, "signed which sites are in the sum")
        return {f"sign/{client}": signature for client, signature in signed.items()}

    def _exclude_by_mismatches(self) -> None:
        """Exclude the sites that certainly sent, or dealt, a share other than the one committed to, or none.

        Of one such pair either site may be the dishonest one. At most n - threshold sites are (at least one), so a site
        with more counterparts than that has an honest counterpart, and is dishonest itself.
        """
        counterparts: dict[int, set[int]] = {}
        for dealer, receiver in self.mismatches:
            counterparts.setdefault(dealer, set()).add(receiver)
            counterparts.setdefault(receiver, set()).add(dealer)
        tolerated = max(1, len(self.sealed) - self.threshold)
        for client in sorted(counterparts):
            others = counterparts[client] - {client}
            if client in counterparts[client] or len(others) > tolerated:
                about = f"clients {listed(sorted(others))}" if others else "its own secret"
                self._exclude(client, f"its shares with {about} are missing, or not those committed to")
        for dealer, receiver in sorted(self.mismatches):
            if not {dealer, receiver} & self.sites.excluded.keys():
                log.warning(
                    "fedblend: round %s: client %s has sent no share of client %s's secret, or one that client %s did "
                    "not commit to; one of the two is dishonest. The other shares are used first",
                    *(self.round + 1, receiver, dealer, dealer),
                )

    def _exclude(self, client: int, why: str) -> None:
        self.sites.exclude(client, f"excluded since round {self.round + 1}: {why}")

    def _join(self, name: str, dealer: int, committed: Shares, others: Shares) -> bytes:
        """Restore a site's secret; the site has committed to the secret, too, so that a wrong one is detected."""
        # First those that were committed to: if they do not fit together, the dealer is dishonest.
        inconsistent = False
        for some in islice(combinations([*committed[name], *others[name]], self.threshold), TRIES):
            secret = self._restored(name, dealer, list(some))
            if secret is not None:
                if inconsistent:
                    self._exclude(dealer, "the shares of its secret do not fit together")
                return secret
            inconsistent |= all(share in committed[name] for share in some)
        if inconsistent:
            self._exclude(dealer, "the shares of its secret do not restore it")
        valid = f"{len(committed[name])} shares are valid, and {self.threshold} are needed"
        why = f"of {name!r}, a secret of client {dealer}, {valid}"
        if inconsistent:
            why = f"client {dealer} has split a secret into shares that do not restore it"
        told = f"round {self.round + 1}: the sum cannot be unmasked: {why}"
        told += f" ({summarize_faults(self.faults)})" if self.faults else ""
        pairs = listed([f"client {receiver}" for of, receiver in sorted(self.mismatches) if of == dealer])
        if pairs and not inconsistent:
            told += f". Client {dealer}, or those whose shares are missing or differ ({pairs}), are dishonest"
            if dealer in self.sites.excluded:
                told += f"; client {dealer} is {self.sites.excluded[dealer]}"
        if pairs or inconsistent:
            raise NoSum(
                f"{told}. Remove the dishonest site (flwr supernode unregister), and run the same command again"
            )
        raise TooFewSites(f"{told}; run the same command again")

    def _restored(self, name: str, dealer: int, shares: list[bytes]) -> bytes | None:
        try:
            secret = masks.join_shares(shares)
            if name.startswith("own/"):
                valid = len(secret) == masks.KEY_BYTES and masks.commitment(secret) == self.commitments[dealer]
            else:
                valid = masks.public_key_of(secret) == self.public[dealer]["mask"]
        except masks.CRYPTO_ERRORS:
            return None
        return secret if valid else None

    def _exchange(self, kind: str, requests: Mapping[int, ClientRequest]) -> dict[int, Reply]:
        """Return the replies without a fault; faults are kept in ``faults``."""
        replies = self.sites.exchange(kind, self.round, requests)
        self.counted[UP] += sum(bytes_of(reply.tensors) for reply in replies.values())
        self.faults |= {client: reply.fault for client, reply in replies.items() if reply.fault is not None}
        return {
            client: reply if all(t.dtype == torch.uint8 and t.dim() == 1 for t in reply.tensors.values()) else Reply()
            for client, reply in replies.items()
            if reply.fault is None
        }

    def _require(self, sites: Collection[int], what: str) -> None:
        if len(sites) < self.threshold:
            raise TooFewSites(
                f"round {self.round + 1}: {len(sites)} sites {what}, and a masked sum needs {self.threshold} "
                f"({summarize_faults(self.faults) or 'no reasons given'})"
            )


def _fault_of_length(sent: Mapping[str, bytes]) -> str | None:
    for name, content in sent.items():
        if len(content) > LONGEST:
            return f"it sent {len(content):,} bytes as '{name}'; valid: {LONGEST:,} at most"
    return None


def sum_shared_means(
    sites: Sites, round: int, sharing: MaskedSums, clients: Sequence[int], rng: np.random.Generator, like: Tensors
) -> tuple[dict[int, Payload], dict[int, str], Counter[tuple[str, str]]]:
    """Let clients share their means under masks, group after group; ``like`` has the form of one client's payload.

    Returns payloads, why clients are in no sum, and the bytes of keys and shares. A group's sum is at the first of its
    clients, with zeros at its others. A group of which too few sites remain, or whose secrets cannot be restored, has
    no sum.
    """
    payloads: dict[int, Payload] = {}
    faults: dict[int, str] = {}
    counted, asked = Counter({UP: 0, DOWN: 0}), np.sort(np.array(clients, np.int64))
    group = sharing.groups(asked, rng)
    for number in range(int(group.max(initial=-1)) + 1):
        members = asked[group == number].tolist()
        context = masks.sum_digest(sites.setup_fields, round)
        one = MaskedSum(sites, round, sharing.threshold(len(members)), quantity=masks.MEANS, context=context)
        try:
            total, present = _sum_means(one, members, like)
            zeros = {client: {name: torch.zeros_like(t) for name, t in like.items()} for client in present}
            # The numbers of all tensors, in order of name.
            parts = zip(sorted(like), total.split([like[name].numel() for name in sorted(like)]), strict=True)
            payloads |= zeros | {present[0]: {name: part.reshape(like[name].shape) for name, part in parts}}
        except NoSum as error:
            faults |= dict.fromkeys(members, f"its group has no sum: {error}")
        faults |= one.faults
        counted.update(one.counted)
    return dict(sorted(payloads.items())), faults, counted


def _sum_means(one: MaskedSum, members: list[int], like: Tensors) -> tuple[torch.Tensor, list[int]]:
    requests = {client: ClientRequest({}, (one.sealed_shares(client),)) for client in one.begin(members)}
    form = {"masked": torch.empty(sum(t.numel() for t in like.values()), dtype=torch.int32)}
    vectors: dict[int, torch.Tensor] = {}
    for client, reply in one.sites.exchange("query.share", one.round, requests).items():
        nothing = "it has too few samples for a mean" if reply.fields.get("nothing") else None
        fault = reply.fault or nothing or fault_of(reply.tensors, form)
        if fault:
            one.faults[client] = fault
        else:
            vectors[client] = reply.tensors["masked"]
    return one.sum(vectors), sorted(vectors)
