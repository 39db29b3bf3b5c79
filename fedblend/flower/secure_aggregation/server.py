"""Secure aggregation at the server: who takes part, who is gone, and the sum without masks. It sees no summand."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedblend.core.errors import FedblendError, by_reason, listed
from fedblend.core.upload import bytes_of
from fedblend.flower.messages import Tensors, arrays
from fedblend.flower.secure_aggregation.masks import (
    BROKEN,
    KEY,
    MODELS,
    bytes_in,
    digest,
    is_public,
    joined,
    masking,
    public_of,
    stretched,
    tensor_of,
)
from fedblend.flower.sites import Order, Reply, Sites

log = logging.getLogger("flwr")


class TooFew(FedblendError):
    """Fewer sites than a sum must cover."""


@dataclass
class MaskedSum:
    """A sum's protocol between the server and the sites of one cohort; ``threshold`` is the least that take part.

    ``public`` are the public keys by site and name, ``sealed`` by receiver what senders sealed for it, ``commits`` the
    digests of sites' own secrets; ``faults`` says why sites take no part. ``up`` and ``down`` count the bytes of keys
    and shares. ``of`` is what is summed, ``about`` the digest of what sites are told of it (:func:`about_sum`).
    """

    sites: Sites
    round: int
    threshold: int
    public: dict[int, dict[str, bytes]] = field(default_factory=dict)
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    commits: dict[int, bytes] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    up: int = 0
    down: int = 0
    of: str = MODELS
    about: bytes = b""

    def begin(self, clients: Collection[int]) -> list[int]:
        """Stages 1 and 2; returns the sites that go on to stage 3. Raises :class:`TooFew` if they are too few."""
        told = self._ask("query.keys", dict.fromkeys(clients, Order({"of": self.of})))
        for client, reply in told.items():
            keys = {name: bytes_in(tensor) for name, tensor in reply.tensors.items()}
            if set(keys) == {"mask", "box"} and all(map(is_public, keys.values())):
                self.public[client] = keys
            else:
                self.faults[client] = "it sent no keys"
        self._require(self.public, "sent keys")
        table = {f"{c}/{name}": tensor_of(key) for c, keys in self.public.items() for name, key in keys.items()}
        order = Order({"of": self.of, "threshold": self.threshold}, (arrays(table),))
        self.down += bytes_of(table) * len(self.public)
        for client, reply in self._ask("query.shares", dict.fromkeys(self.public, order)).items():
            others = {str(peer) for peer in self.public if peer != client}
            if set(reply.tensors) != others | {"commit"}:
                self.faults[client] = "it sent no shares"
                continue
            self.commits[client] = bytes_in(reply.tensors["commit"])
            self.sealed[client] = {int(peer): bytes_in(reply.tensors[peer]) for peer in others}
        self._require(self.sealed, "sent shares")
        return sorted(self.sealed)

    def table_for(self, client: int) -> ArrayRecord:
        """What the others who take part have sealed for a site."""
        table = {f"sealed/{c}": tensor_of(sent[client]) for c, sent in sorted(self.sealed.items()) if c != client}
        self.down += bytes_of(table)
        return arrays(table)

    def sum(self, vectors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Stage 4: the sum of the summands behind masked vectors, int32 [n], by site.

        Raises :class:`TooFew` if too few sites are left to take the masks off, :class:`FedblendError` if one lies.
        """
        self._require(vectors, f"sent {self.of}")
        gone = [client for client in self.sealed if client not in vectors]
        order = Order({"of": self.of, "there": sorted(vectors), "gone": sorted(gone)})
        shares: dict[str, list[bytes]] = {}
        answers = self._ask("query.unmask", dict.fromkeys(sorted(vectors), order))
        for client in vectors.keys() - answers.keys():
            log.warning("fedblend: round %s: client %s does not help to unmask", self.round + 1, client)
        for reply in answers.values():
            for name, tensor in reply.tensors.items():
                shares.setdefault(name, []).append(bytes_in(tensor))
        total = np.zeros(len(next(iter(vectors.values()))), np.uint32)
        for client, vector in vectors.items():
            secret = self._secret(f"own/{client}", shares)
            if len(secret) != KEY or digest(secret) != self.commits[client]:
                raise self._broken(f"own/{client}")
            total += vector.numpy().view(np.uint32) - stretched(secret, len(total))
        for client in gone:
            self._take_off(client, self._secret(f"pair/{client}", shares), vectors, total)
        return torch.from_numpy(total.view(np.int32))

    def _take_off(self, client: int, private: bytes, vectors: Mapping[int, torch.Tensor], total: np.ndarray) -> None:
        """Take off, in place, the masks that the others put on for a site that is gone."""
        try:
            if public_of(private) != self.public[client]["mask"]:
                raise self._broken(f"pair/{client}")
        except BROKEN:
            raise self._broken(f"pair/{client}") from None
        for peer in vectors:
            mask = masking(private, self.public[peer]["mask"], self.about, len(total))
            total += mask if client < peer else np.uint32(0) - mask

    def _secret(self, name: str, shares: Mapping[str, list[bytes]]) -> bytes:
        there = shares.get(name, [])
        if len(there) < self.threshold:
            raise TooFew(
                f"round {self.round + 1}: the sum cannot be unmasked: {len(there)} shares of {name!r}, and "
                f"{self.threshold} are needed ({_in_one_line(self.faults)}); run the same command again"
            )
        try:
            return joined(there[: self.threshold])
        except BROKEN:
            raise self._broken(name) from None

    def _broken(self, name: str) -> FedblendError:
        return FedblendError(
            f"round {self.round + 1}: the sum cannot be unmasked: the shares of {name!r} give nothing, so that a site "
            "has sent a wrong one"
        )

    def _ask(self, kind: str, orders: Mapping[int, Order]) -> dict[int, Reply]:
        """The answers that are none of refusals; those that are stand among the faults."""
        replies = self.sites.exchange(kind, self.round, orders)
        self.up += sum(bytes_of(reply.tensors) for reply in replies.values())
        self.faults |= {client: reply.fault for client, reply in replies.items() if reply.fault is not None}
        good = {client: reply for client, reply in replies.items() if reply.fault is None}
        return {client: reply if _is_bytes(reply.tensors) else Reply() for client, reply in good.items()}

    def _require(self, there: Collection[int], what: str) -> None:
        if len(there) < self.threshold:
            raise TooFew(
                f"round {self.round + 1}: {len(there)} sites {what}, and a masked sum needs {self.threshold} "
                f"({_in_one_line(self.faults) or 'no reasons given'})"
            )


def _is_bytes(tensors: Tensors) -> bool:
    return all(tensor.dtype == torch.uint8 and tensor.dim() == 1 for tensor in tensors.values())


def _in_one_line(faults: Mapping[int, str]) -> str:
    reasons = by_reason(faults.items())
    return "; ".join(f"client{'s' if len(who) > 1 else ''} {listed(who)}: {why}" for why, who in reasons.items())
