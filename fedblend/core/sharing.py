"""The base class of sharings, which say what clients send before training and what the server makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from fedblend.core.context import ModelSpec, Scale, Task
from fedblend.core.part import Part
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.protection import Mechanism

Payload = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Request:
    """What a server requests of one client in particular."""

    wanted: np.ndarray
    """Number of seeds by target label, int64 [C]: for a server with data of its own (XorMixFL, section 3)."""
    dummies: np.ndarray
    """Labels of the dummies that hide the targets, int64 [M]."""
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """Pairs of labels to mix, int64 [n, 2], -1 for none: for a server that coordinates mixtures (Mix2FLD)."""


@dataclass(frozen=True)
class ClientData:
    """What a client can read when it shares."""

    x: torch.Tensor
    """The client's samples as stored."""
    y: torch.Tensor
    """Their targets as stored."""
    task: Task
    """The task of the experiment."""
    scale: Scale
    """What turns stored samples into inputs."""
    hidden: Callable[[torch.Tensor, int], torch.Tensor]
    """``hidden(x, k)`` returns the global model's hidden states after k layers."""
    rng: np.random.Generator
    """Keyed by seed, round and client."""
    minimum: int = 1
    """Fewest samples of which the client's policy lets it send a mean."""
    request: Request | None = None
    """What the server requests of this client in particular."""
    model: nn.Module | None = None
    """The global model with its weights, in evaluation mode; a sharing may call it and must not change it."""


@dataclass(frozen=True)
class Pool:
    """Shared entries that clients may use."""

    tensors: Payload
    """Tensors by name, with one row an entry."""
    owner: np.ndarray
    """The client of each entry, int64 [entries]; -1 for an entry of several clients."""

    def __len__(self) -> int:
        return len(self.owner)


@dataclass(frozen=True)
class Shares:
    """What clients sent when they were asked to share."""

    asked: np.ndarray
    """Clients that were asked, int64 [n]."""
    reached: np.ndarray
    """Which of them received the model that sharing needs, bool [n]; all, where it needs none."""
    payloads: dict[int, Payload]
    """Payloads that arrived and are good, by client."""
    lost: list[int]
    """Clients whose payload did not arrive, or whom the model that sharing needs did not reach."""
    refused: list[dict[str, Any]]
    """``client`` and ``reason`` of each payload that cannot be used, or that a site refused to send."""

    def facts(self, entries: int) -> dict[str, Any]:
        """Return the record's field ``shared``; ``entries`` is the number of all entries at the server."""
        shared: dict[str, Any] = {"asked": len(self.asked), "sent": len(self.payloads), "entries": entries}
        if self.lost:
            shared["lost"] = self.lost
        if self.refused:
            shared["refused"] = sorted(self.refused, key=lambda one: one["client"])
        return shared


Form = Literal["inputs", "stored", "seeds", "raw", "statistics", "hidden", "moments", "sums"]
"""What shared entries are: inputs of the model, or means of such; samples on the scale that they are stored in, mixed
or encoded ones as seeds, or raw ones; means and deviations of channels; hidden states after some layers; means and
covariances of features, or sums of them.
"""


@dataclass(frozen=True)
class SharingPlan:
    """Who shares what, when, and with whom."""

    form: Form = "stored"
    """What entries are. An objective and a server step name the forms that they read."""
    when: Literal["never", "once", "each-round", "after-last-round", "after-rounds"] = "once"
    """Before the first round or each round, or after training, under the round's aggregate, for the server step."""
    who: Literal["all", "groups", "cohort", "server"] = "all"
    """All clients that hold samples; the same in groups, where the server of a real federation receives sums over each
    group only; those of the round; or the server, which makes the entries itself.
    """
    to: Literal["clients", "server", "own", "nobody"] = "clients"
    """The clients whose objective reads entries, by way of the server; the server alone; each client its own entries
    alone; or nobody, where entries hold nothing of clients' samples.
    """
    sees_model: bool = False
    """Whether entries depend on the round's global model, which the server then sends for it."""

    @property
    def active(self) -> bool:
        """Whether anything is shared."""
        return self.when != "never"

    @property
    def leaves(self) -> bool:
        """Whether a payload leaves clients."""
        return self.active and self.who != "server" and self.to in ("clients", "server")

    @property
    def repeats(self) -> bool:
        """Whether clients share more than once."""
        return self.when in ("each-round", "after-rounds")

    @property
    def after_training(self) -> bool:
        """Whether clients share at the end of a round."""
        return self.when in ("after-last-round", "after-rounds")

    @property
    def is_stored(self) -> bool:
        """Whether entries are on the scale of stored samples."""
        return self.form in ("stored", "seeds", "raw")


@dataclass(frozen=True)
class ServerSide:
    """What a server knows where it requests samples of clients, or makes the pool."""

    spec: ModelSpec
    """The model, the data and the task."""
    clients: np.ndarray
    """Clients that hold samples, as a request is made; that have been asked, as the pool is made. int64, in order."""
    base: tuple[torch.Tensor, torch.Tensor] | None
    """Samples (x, y) as stored of a server with data of its own."""
    labels_held: Callable[[], np.ndarray]
    """Collects which labels clients hold, bool [clients, C]."""
    rng: np.random.Generator
    """Keyed by seed, purpose and the round of the entries."""


class Sharing(Part):
    """Base of all sharings. The base shares nothing."""

    to_define = ("share or make_pool",)
    renamed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                *("shares_inputs", "shares_features", "unsafe", "for_server", "each_round", "after_training"),
                *("of_cohort", "made_by_server", "leaves_client", "own_only", "reads_model", "active"),
            ),
            'plan = SharingPlan("inputs", when="once", who="all", to="clients", sees_model=False), or other words',
        ),
        **dict.fromkeys(
            ("make", "pool_beside", "pool_of_sums", "requests_by_labels"),
            "make_pool(entries, server) and requests(server)",
        ),
        "secure_aggregated": 'plan = SharingPlan(who="groups")',
        "single_samples": 'made_of = "sample"',
        "by_label": 'made_of = "label"',
    }
    plan = SharingPlan()
    """Who shares what, when, and with whom; a property, where options decide."""
    bytes_kind: str = "shared"
    """Kind under which bytes are counted, and which a site's policy allows: a name in
    :data:`~fedblend.core.payload.PAYLOAD_KINDS`.
    """
    server: int | None = None
    """The client that is the server, for a server with data of its own; it does not share."""
    if_empty: str = "let clients make larger means (samples_per_mean, split), or lower policy.min_mean: {min_mean}"
    """What to change where nothing was shared, for a message with the policy's ``min_mean``."""
    refresh: float | None = None
    """Share of the clients with new data from which on clients share again; ``None`` for once."""
    made_of: Literal["samples", "sample", "label"] = "samples"
    """What each entry is made of: several samples; one "sample", of which a site limits the number (its ``max_seeds``);
    or samples of one "label".
    """

    @property
    def shares_means(self) -> bool:
        """Whether entries are means of as many samples as a policy demands, or more."""
        return self.bytes_kind in PAYLOAD_KINDS and PAYLOAD_KINDS[self.bytes_kind].entries == "means"

    @property
    def numeric_inputs(self) -> bool:  # type: ignore[override]
        """Whether entries are made of samples, not samples as they are, features or hidden states."""
        return self.plan.active and self.plan.form in ("inputs", "stored", "seeds", "statistics")

    def shares_in(self, round: int, rounds: int) -> bool:
        """Whether clients share in ``round``, counted from 0, of a run of ``rounds``, even if no data are new."""
        return {"never": False, "once": round == 0, "after-last-round": round + 1 == rounds}.get(self.plan.when, True)

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` if no client could share anything.

        ``sizes`` int64 [clients] are the clients' samples; ``minimum`` is as in :class:`ClientData`.
        """

    def share(self, local: ClientData) -> Payload | None:
        """At a client: return the payload, or ``None`` to send nothing."""
        return None

    def used(self, local: ClientData) -> np.ndarray:
        """At a client: return of which samples :meth:`share` makes a payload with the same random numbers, bool [n].

        A site lets the others make means with samples that it adds later, and compares the samples that two payloads
        cover.
        """
        return np.ones(len(local.y), bool)

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        """Return the most entries that a client with ``samples`` samples can share, for the server's check.

        ``minimum`` is as in :class:`ClientData`.
        """
        return samples // max(1, minimum) if self.shares_means else samples

    def fault(self, payload: Payload, samples: int, spec: ModelSpec) -> str | None:
        """Why a payload of finite numbers by a client with so many samples cannot be used, or ``None``."""
        return None

    def mechanism(self) -> Mechanism | str:
        """The noise that gives an (epsilon, delta) for a sample of the payload, or the reason why there is none."""
        return f"'{self.name}' shares without noise"

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """At the server: make the pool from all entries, in order of client."""
        return entries

    def make_pool(self, entries: Pool, server: ServerSide) -> Pool:
        """At the server: make the pool from all entries and what the server has beside them; by default :meth:`pool`.

        The entries are of groups of clients where the server receives sums only, and none where it makes them itself.
        """
        return self.pool(entries, server.rng)

    def requests(self, server: ServerSide) -> dict[int, Request]:
        """At the server: the request to each client of which it wants certain samples."""
        return {}

    def view(self, pool: Pool, client: int) -> Pool:
        """The part of the pool that a client may use; the base gives all of it."""
        return pool


def gather(payloads: Mapping[int, Payload]) -> Pool:
    """Stack payloads row by row, in order of client."""
    clients = sorted(payloads)
    if not clients:
        return Pool({}, np.empty(0, np.int64))
    names = list(payloads[clients[0]])
    rows = [len(payloads[k][names[0]]) for k in clients]
    return Pool({n: torch.cat([payloads[k][n] for k in clients]) for n in names}, np.repeat(clients, rows))


def rows_of(pool: Pool, chosen: np.ndarray) -> Pool:
    """The chosen entries of a pool; ``chosen`` is bool or int64."""
    index = torch.from_numpy(chosen)
    return Pool({name: tensor[index] for name, tensor in pool.tensors.items()}, pool.owner[chosen])


def joined(kept: Pool, new: Pool) -> Pool:
    """Entries kept and entries renewed, in order of client."""
    if not len(kept) or not len(new):
        return new if len(new) else kept
    both = Pool(
        {name: torch.cat([kept.tensors[name], new.tensors[name]]) for name in new.tensors},
        np.concatenate([kept.owner, new.owner]),
    )
    return rows_of(both, np.argsort(both.owner, kind="stable"))


def hides(sharing: Sharing) -> bool:
    """Whether a sharing adds noise to what it makes of samples."""
    # An option, not XorSeeds' method of that name.
    sizes = (getattr(sharing, option, 0) for option in ("noise", "multiplier", "offset"))
    return any(isinstance(size, (int, float)) and size > 0 for size in sizes) or isinstance(
        sharing.mechanism(), Mechanism
    )
