"""The engine of a real federation: each client is a site that receives Flower messages."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedblend.core.dataset import ClientSplit, Split
from fedblend.core.engine import (
    Arrived,
    ClientUpdate,
    CohortResult,
    Scores,
    Tensors,
    TrainTask,
    aggregator_of,
    gather_uploads,
    good_uploads,
)
from fedblend.core.errors import FedblendError, legible
from fedblend.core.random import stream
from fedblend.core.setup import Setup, model_spec, reference_device
from fedblend.core.sharing import Payload, Pool
from fedblend.core.state import ClientState
from fedblend.core.trees import add_prefix, bytes_of, digest_of, strip_prefix
from fedblend.core.upload import fault_of
from fedblend.engines.distributed.serialization import pool_tensors
from fedblend.engines.loop_engine import LoopEngine
from fedblend.flower.messages import (
    fault_of_number,
    fault_of_shared,
    find_mismatched,
    mark_text,
    round_of_mark,
    to_record,
)
from fedblend.flower.secrets import secret_generator
from fedblend.flower.secure_aggregation.masked_sum import MaskedSum, NoSum, sum_shared_means
from fedblend.flower.secure_aggregation.masks import sent_beside, sum_digest
from fedblend.flower.sites import ClientRequest, Reply, Sites, summarize_faults
from fedblend.flower.work import LACKS, runs_of
from fedblend.methods.aggregators.mean import SecureMean, Total
from fedblend.methods.sharing.means import MaskedSums

log = logging.getLogger("flwr")

MARK = "kept"
"""Name of the tensor that replaces a client's own weights at the server: their mark (``FlowerEngine._new_mark``)."""

LARGEST = float(np.finfo(np.float32).max)
"""Upper bound of a loss or a metric, so that sums over samples are finite: sites compute in float32."""

PARTS = "parts/kept"  # Name of the tensor that replaces the tables of parts at a client: their mark
EXTRAS = "extras/"  # Prefix of what parts send beside the model


class FlowerEngine:
    """Sends a round's tasks to the sites, and collects their replies in the order of the clients.

    Weights that clients go on from (federated distillation, a lost downlink) never leave them: here stands only their
    mark, which a checkpoint keeps too.
    """

    def __init__(self, setup: Setup, sites: Sites) -> None:
        self.setup, self.sites = setup, sites
        self.inner = LoopEngine(setup, setup.experiment.device)
        self._sent_pools: dict[int, tuple[int, str]] = {}
        self._digest: tuple[Pool | None, str] = (None, "")
        self._begun: tuple[TrainTask | None, str] = (None, "")
        self._sent_model: tuple[int, frozenset[int]] = (-1, frozenset())
        self._uploads: dict[int, Tensors] = {}
        # The round that is evaluated next.
        self._round = 0
        self._frozen_is_known = False
        self._good: tuple[int, list[int]] = (0, [])
        self._extra_bytes = Counter[tuple[str, str]]()

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload | str]]:
        """Request shared data of clients; of sites that refuse or fail yield the reason, with a warning.

        Raises :class:`FedblendError` if none of them gives anything and one of them has failed.
        """
        asked, self._round = list(clients), round
        sharing = self.setup.experiment.method.sharing
        if isinstance(sharing, MaskedSums):
            yield from self._share_sums(round, sharing, asked)
            return
        tables = (to_record(add_prefix("weights/", self.setup.shared(weights))),) if sharing.plan.sees_model else ()
        requests = self.setup.requests(sizes)
        told = {
            client: {"request": {"wanted": one.wanted.tolist(), "dummies": one.dummies.tolist()}}
            for client, one in requests.items()
        }
        orders = {client: ClientRequest(told.get(client, {}), tables) for client in asked}
        spec, minimum = model_spec(self.setup, self.server_model()), self.setup.experiment.policy.min_mean

        def fault_of_payload(client: int, payload: Payload) -> str | None:
            samples = int(sizes[client])
            most = sharing.most_entries(samples, minimum, requests.get(client))
            fault = fault_of_shared(payload, self.setup.task.outputs) or fault_of_number(payload, samples, most)
            return fault or sharing.fault(payload, samples, spec)

        replies = self.sites.exchange("query.share", round, orders)
        faults = {c: fault for c, reply in replies.items() if (fault := reply.fault) is not None}
        if sharing.plan.sees_model:
            self._note_sent(round, replies.keys() - faults.keys())
        payloads = {c: reply.tensors for c, reply in replies.items() if c not in faults and reply.tensors}
        faults |= {c: fault for c, payload in payloads.items() if (fault := fault_of_payload(c, payload))}
        good, faults = _of_one_form(payloads, faults, rows=True)
        _log_faults(faults, round, bool(good))
        yield from (good | faults).items()

    def _note_sent(self, round: int, clients: Iterable[int]) -> None:
        earlier = self._sent_model[1] if self._sent_model[0] == round else frozenset()
        self._sent_model = (round, earlier.union(clients))

    def _share_sums(self, round: int, sharing: MaskedSums, asked: Sequence[int]) -> Iterator[tuple[int, Payload | str]]:
        """Request masked shared data; keys and shares are counted with the round's training."""
        setup = self.setup
        like = sharing.form(model_spec(setup, self.server_model()))
        rng = stream(setup.experiment.seed, "pool", round)
        payloads, faults, self._extra_bytes = sum_shared_means(self.sites, round, sharing, asked, rng, like)
        _log_faults(faults, round, bool(payloads))
        # A site may fail after its mean is in the sum.
        yield from (faults | payloads).items()

    def losses(self, round: int, weights: Tensors, clients: Sequence[int], sizes: np.ndarray) -> dict[int, float | str]:
        """Request the mean loss of a model over each client's samples; of sites that refuse or fail return the reason.

        Raises :class:`FedblendError` if no site states it, and one of them has failed.
        """
        table = to_record(add_prefix("weights/", self.setup.shared(weights)))
        replies = self.sites.exchange("query.loss", round, dict.fromkeys(clients, ClientRequest({}, (table,))))
        found: dict[int, float | str] = {}
        for client, reply in replies.items():
            loss = reply.tensors.get("loss", torch.empty(0))
            stated = loss.shape == () and loss.dtype == torch.float64 and bool(loss.isfinite())
            found[client] = reply.fault or (float(loss) if stated else "its loss is no finite number")
        faults = {client: loss for client, loss in found.items() if isinstance(loss, str)}
        _log_faults(faults, round, len(faults) < len(found), "states no loss", "states its loss")
        self._note_sent(round, found.keys() - faults.keys())
        return found

    def train(self, task: TrainTask, clients: Sequence[int]) -> Iterator[ClientUpdate]:
        """Train clients in this process; a round's cohort goes through :meth:`collect`."""
        return self.inner.train(task, clients)

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> CohortResult:
        """Request training, check the uploads, and keep what the aggregator needs.

        Raises :class:`FedblendError` where the run has other frozen tensors than its model is built with at sites.
        """
        if not self._frozen_is_known:
            if self.setup.frozen_digest(task.weights) != self.setup.frozen_digest(self.setup.weights()):
                raise FedblendError(
                    "model: its tensors that are not trained differ from those that it is built with at the sites, and "
                    "they do not travel; valid over Flower: no start from a run with others, and the file from which "
                    "the model was loaded when the run began"
                )
            self._frozen_is_known = True
        self._round = task.round
        # The last round's need no memory while this round's arrive.
        self._uploads = {}
        if isinstance(aggregator := aggregator_of(self.setup, task.round), SecureMean):
            result = self._collect_sum(task, clients, lost, aggregator)
        else:
            begin = time.perf_counter()
            replies = self._trained(task, clients)
            result = CohortResult(seconds=time.perf_counter() - begin)
            # All replies have arrived, so that keeping the uploads takes no further memory.
            gather_uploads(self.setup, task, self._sent(task, clients, replies), lost, result, keep=True)
        self._uploads, self._good = result.uploads, (task.round, [client for client, _, _ in result.good])
        self._extra_bytes.update(result.extra_bytes)
        result.extra_bytes, self._extra_bytes = dict(self._extra_bytes), Counter()
        return result

    def _sent(self, task: TrainTask, clients: Sequence[int], replies: dict[int, Reply]) -> Iterator[Arrived]:
        """Yield what arrived of each client's round, and free the reply."""
        for client in clients:
            reply, samples = replies.pop(client), int(task.sizes[client])
            extras = strip_prefix(EXTRAS, reply.tensors)
            upload = {name: tensor for name, tensor in reply.tensors.items() if not name.startswith(EXTRAS)}
            fault, loss = self._fault_of_words(reply.fields, samples), reply.fields.get("loss")
            kept = self._kept_there(task, client) if reply.fault is None else ClientState()
            shares = metrics_in(reply.fields.get("metrics"), self.setup.method.objective.measures)
            measured = {name: share for name, share in shares.items() if name != "loss" and 0 <= share <= 1}
            update = ClientUpdate(client, {}, samples, loss, state=kept, extras=extras, measured=measured)
            yield Arrived(update, upload, bytes_of(upload), reply.fault, fault)

    def _collect_sum(
        self, task: TrainTask, clients: Sequence[int], lost: Collection[int], aggregator: SecureMean
    ) -> CohortResult:
        """Request masked models, and remove the masks from their sum only; without a sum no upload is good."""
        result, begin = CohortResult(), time.perf_counter()
        cohort = [int(task.sizes[client]) for client in clients]
        share = {c: aggregator.share_of(size, cohort) for c, size in zip(clients, cohort, strict=True)}
        total = sum(map(aggregator.weight_of, cohort))
        begun = self.setup.shared(task.weights)
        sharing, pool = self.setup.experiment.method.sharing, task.pool
        sent = None if pool is None else pool.tensors if sharing.plan.to == "clients" else {}
        beside = sent_beside(sent, pool.owner if pool is not None else np.empty(0, np.int64), task.server_state)
        about = sum_digest(self.sites.setup_fields, task.round, begun, total, beside)
        masks = MaskedSum(self.sites, task.round, aggregator.threshold(len(clients)), context=about)
        like = {"masked": torch.empty(sum(tensor.numel() for tensor in begun.values()), dtype=torch.int32)}
        try:
            part = masks.begin(clients)
            extra = {client: ClientRequest({"total": total}, (masks.sealed_shares(client),)) for client in part}
            replies = self._trained(task, part, extra)
            replies = {client: Reply(fault=fault) for client, fault in masks.faults.items()} | replies
            arrived = self._sent(task, clients, replies)
            good = good_uploads(
                arrived, lost, result, lambda one: fault_of(one.upload, like) or fault_of(one.update.extras, {})
            )
            vectors = {one.update.client: one.upload["masked"] for one in good}
            result.partial = Total(masks.sum(vectors), sum(share[client] for client in vectors))
        except NoSum as error:
            result.good, reason = [], f"there is no sum: {error}"
            faults = masks.faults | {one["client"]: one["reason"] for one in result.refused}
            result.refused = [{"client": c, "reason": faults.get(c, reason)} for c in clients if c not in lost]
        result.extra_bytes |= masks.counted
        result.seconds = time.perf_counter() - begin
        return result

    def _kept_there(self, task: TrainTask, client: int) -> ClientState:
        """Return the marks of what a client keeps at its site from this round on: weights and tables of parts."""
        fields = ["model"] * self.setup.experiment.keeps_client_weights
        # Where the site's own model is found when it is tested.
        fields += [keeps for keeps in [self.setup.experiment.method.personal.keeps] if keeps]
        # The site computes the first tables of its parts itself, and keeps them.
        keeps_parts = bool(replace(task.state_of(client), model={}, outputs={}))
        if not (fields or keeps_parts):
            return ClientState()
        mark = self._new_mark(task, client)
        return ClientState(**{key: {MARK: mark} for key in fields}, parts={PARTS: mark} if keeps_parts else {})

    def _new_mark(self, task: TrainTask, client: int) -> torch.Tensor:
        """Return the mark of what a client keeps after a round, int64 [2]: the round, and a digest of its beginning.

        Servers that go on from copies of one run folder have other marks where sites keep other tables for them.
        """
        if self._begun[0] is not task:
            tables = add_prefix("outputs/", task.global_outputs) | add_prefix("server/", task.server_state)
            pool = "" if task.pool is None else self._version(task.pool)
            self._begun = (task, digest_of(self.setup.shared(task.weights) | tables) + pool)
        had = sorted((n, mark_text(t)) for n, t in task.state_of(client).to_tensors().items() if n.endswith(MARK))
        digest = hashlib.sha256(f"{self._begun[1]} {had}".encode()).digest()
        return torch.tensor([task.round, int.from_bytes(digest[:7], "big")])

    def query(self, question: Tensors) -> Iterator[tuple[int, Payload]]:
        """Send the server step's question to the sites, or answer it from the uploads at the server."""
        step = self.setup.experiment.method.server_step
        if step.works_on != "answers":
            yield from step.respond(self._uploads, question, model_spec(self.setup, self.server_model())).items()
            return
        round, good = self._good
        request = ClientRequest({}, (to_record(question),))
        replies = self.sites.exchange("query.ask", round, dict.fromkeys(good, request))
        faults = {client: reply.fault for client, reply in replies.items() if reply.fault is not None}
        payloads, faults = _of_one_form({c: reply.tensors for c, reply in replies.items()}, faults, rows=False)
        _log_faults(faults, round, bool(payloads), "does not answer", "answers the server step")
        yield from payloads.items()

    def score(self, weights: Tensors, split: Split = "test") -> Scores:
        """Score the server's samples here, and samples that clients keep and clients' own weights at the sites."""
        own = _mark(weights)
        if own is not None and (split != "test" or self.setup.experiment.metrics):
            raise FedblendError(
                "evaluate_model: a device's model stays at its site, which sends its scores on test samples only; "
                "valid: no holdout, no validation and no metrics"
            )
        if split in ("holdout", "validation"):
            return self._score_at_sites(weights, split)
        if own is None:
            return self.inner.score(weights, split)
        return self._score_own(reference_device(self.setup), own, len(self.setup.data.test))

    def score_each(self, weights: Tensors, models: Mapping[int, Tensors], split: ClientSplit) -> Scores:
        """Score each client's own model at its site, on the samples that it holds out or keeps for validation."""
        if split not in ("holdout", "validation"):
            raise FedblendError(
                "evaluate_model: 'each' tests each site's own model on samples that the site holds out; valid over "
                "Flower with holdout (such as 0.2)"
            )
        field = "personal" if self.setup.experiment.method.personal.keeps else "own"
        own = {client: {field: mark_text(table[MARK])} for client, table in models.items()}
        return self._score_at_sites(weights, split, own)

    def _score_own(self, client: int, kept: str, samples: int) -> Scores:
        """Score the weights that a client kept under the mark ``kept``, on the experiment's test samples."""
        request = ClientRequest({"own": kept, "split": "test"})
        reply = self.sites.exchange("evaluate", round_of_mark(kept), {client: request})[client]
        loss, right = reply.tensors.get("loss", torch.empty(0)), reply.tensors.get("right")
        # A device that diverged has a loss of NaN, as in the loop engine.
        valid = loss.shape == (samples,) and loss.dtype == torch.float32
        valid = valid and (right is None or (right.shape == loss.shape and right.dtype == torch.bool))
        if reply.fault is not None or not valid:
            why = reply.fault or "its scores are not of this experiment's test samples"
            raise FedblendError(f"evaluate_model: the model of client {client} could not be evaluated: {why}")
        return Scores(loss.numpy(), None if right is None else right.numpy().astype(bool), np.arange(samples))

    def _score_at_sites(
        self, weights: Tensors, split: ClientSplit, own: Mapping[int, Mapping[str, str]] = MappingProxyType({})
    ) -> Scores:
        """Score weights on samples that clients hold out or keep for validation; ``own`` names models of clients' own.

        Sites send the number of right samples, where there are classes, and the metrics that their files allow.
        Clients without a valid reply are left out, with a warning. Raises :class:`FedblendError` if no client remains.
        """
        setup = self.setup
        population, counts = setup.population, setup.task.kind == "classification"
        names = [metric.label for metric in setup.experiment.metrics]
        offsets = population.held_offsets if split == "holdout" else population.validation_offsets
        number = np.zeros(len(population), np.int64) if offsets is None else np.diff(offsets)
        record = to_record(add_prefix("weights/", setup.shared(weights)))
        fields: dict[str, Any] = {"own": None, "split": split, "personal": None}
        clients = np.flatnonzero(number).tolist()
        requests = {client: ClientRequest({**fields, **own.get(client, {})}, (record,)) for client in clients}
        right: dict[int, Any] = {}
        at_clients: dict[int, dict[str, float]] = {}
        samples: dict[int, int] = {}
        why = "no client has such samples"
        for client, reply in self.sites.exchange("evaluate", self._round, requests).items():
            kept, count, stated = int(number[client]), reply.fields.get("right"), reply.fields.get("samples")
            metrics = metrics_in(reply.fields.get("metrics"), names)
            # Without classes a site counts no right samples, and its loss is all that it sends.
            fits = type(count) is int and 0 <= count <= kept if counts else count is None and bool(metrics)
            if not fits or reply.fault is not None or stated != kept:
                why = reply.fault or legible(f"it sent {count!r} right of {stated!r} samples, and has {kept} of them")
                log.warning("fedblend: client %s sent no valid scores: %s", client, why)
                continue
            samples[client], at_clients[client] = kept, metrics
            right |= {client: count} if counts else {}
        if not samples:
            field = "holdout" if split == "holdout" else "validation.clients"
            raise FedblendError(f"{field}: no client sent valid scores; the last one: {why}")
        # One entry a client: a site may state any number of samples.
        owner, numbers = np.array(list(samples), np.int64), np.array(list(samples.values()), np.int64)
        number_right = np.array(list(right.values()), np.int64) if right else None
        no_loss = np.full(len(owner), np.nan, np.float32)
        return Scores(no_loss, number_right, owner=owner, at_clients=at_clients, numbers=numbers)

    def server_model(self) -> nn.Module:
        """Return a module for functional calls with any weights, in evaluation mode, for the server step."""
        return self.inner.server_model()

    def secret_rng(self) -> np.random.Generator:
        """Return a cryptographic generator: sites know the keys of all keyed streams."""
        return secret_generator()

    def close(self) -> None:
        """Do nothing: sites wait for the next run."""

    def _trained(
        self, task: TrainTask, clients: Sequence[int], extra: Mapping[int, ClientRequest] | None = None
    ) -> dict[int, Reply]:
        """Return every client's reply. A site that lost what it received earlier receives it again, with ``extra``."""
        # A restarted node has lost what it received earlier.
        self.sites.wait_until_connected()
        pool = task.pool.tensors if task.pool is not None and self.setup.method.sharing.plan.to == "clients" else {}
        tables = {"weights": self.setup.shared(task.weights), "pool": pool, "server": task.server_state}
        shared = {name: to_record(add_prefix(f"{name}/", table)) for name, table in tables.items()}
        given = {client: (extra or {}).get(client, ClientRequest()) for client in clients}
        orders = {client: self._order(task, client, shared, set(), given[client]) for client in clients}
        replies = self.sites.exchange("train", task.round, orders)
        lacking = {c: reply.fields[LACKS] for c, reply in replies.items() if LACKS in reply.fields}
        if lacking:
            again = {c: self._order(task, c, shared, {"model", "pool"}, given[c]) for c in lacking}
            replies |= self.sites.exchange("train", task.round, again)
        if task.pool is not None:
            version = self._version(task.pool)
            nodes = self.sites.nodes
            self._sent_pools |= {c: (nodes[c], version) for c in clients if c in nodes and replies[c].fault is None}
        still = {c: Reply(fault="it lacks what it was sent twice") for c in lacking if LACKS in replies[c].fields}
        return {client: still.get(client) or replies[client] for client in clients}

    def _order(
        self, task: TrainTask, client: int, shared: Mapping[str, ArrayRecord], resend: set[str], extra: ClientRequest
    ) -> ClientRequest:
        """Return one client's request for a round with ``extra``; ``resend`` names what it receives a second time."""
        method = self.setup.experiment.method
        fields: dict[str, Any] = {"begins": "round", "mark": None, "state": None, "pool": None, "keep": None}
        tables = []
        kept = task.state_of(client)
        if PARTS in kept.parts:
            fields["state"] = mark_text(kept.parts[PARTS])
        if new := self._kept_there(task, client).to_tensors():
            fields["keep"] = mark_text(next(iter(new.values())))
        if kept.model:
            fields |= {"begins": "own", "mark": _mark(kept.model)}
        elif task.round == self._sent_model[0] and client in self._sent_model[1] and "model" not in resend:
            fields["begins"] = "shared"
        else:
            tables.append(shared["weights"])
        if outputs := task.outputs_of(client) if any(term.outputs_kind for term in method.terms) else {}:
            tables.append(to_record(add_prefix("outputs/", outputs)))
        if task.server_state:
            tables.append(shared["server"])
        if task.pool is not None:
            fields |= {"pool": self._version(task.pool), "owners": runs_of(task.pool.owner)}
            if method.sharing.plan.to == "clients" and (
                "pool" in resend or self._sent_pools.get(client) != (self.sites.nodes.get(client), fields["pool"])
            ):
                tables.append(shared["pool"])
        return ClientRequest({**fields, **extra.fields}, (*tables, *extra.records))

    def _version(self, pool: Pool) -> str:
        if self._digest[0] is not pool:
            self._digest = (pool, digest_of(pool_tensors(pool)))
        return self._digest[1]

    def _fault_of_words(self, fields: Mapping[str, Any], size: int) -> str | None:
        samples, loss = fields.get("samples"), fields.get("loss", 0.0)
        if type(samples) is not int or samples != size:
            return legible(f"it says that it trained on {samples!r} samples, and holds {size}")
        if loss is not None and type(loss) not in (int, float):
            return legible(f"its loss is {loss!r}")
        if loss is None or not -LARGEST < loss < LARGEST:
            return "its loss is NaN or infinite (a learning rate, or inputs, too large?)"
        return None


def _mark(start: Tensors) -> str | None:
    return mark_text(start[MARK]) if MARK in start else None


def _of_one_form(
    payloads: Mapping[int, Payload], faults: dict[int, str], rows: bool
) -> tuple[dict[int, Payload], dict[int, str]]:
    """Return the payloads without faults that have the majority's form, and all faults."""
    payloads = {client: payload for client, payload in payloads.items() if client not in faults}
    faults = faults | find_mismatched(payloads, rows)
    return {client: payload for client, payload in payloads.items() if client not in faults}, faults


def _log_faults(
    faults: Mapping[int, str], round: int, others: bool, nothing: str = "shares nothing", any: str = "shares anything"
) -> None:
    """Log clients that send nothing of what was asked for. Raises :class:`FedblendError` if there are no others."""
    for client, reason in faults.items():
        log.warning("fedblend: round %s: client %s %s: %s", round + 1, client, nothing, reason)
    if faults and not others:
        raise FedblendError(f"round {round + 1}: no site {any} ({summarize_faults(faults)})")


def metrics_in(sent: Any, names: Sequence[str]) -> dict[str, float]:
    """The finite numbers of the expected names in a site's reply."""
    if not isinstance(sent, Mapping):
        return {}
    numbers = {name: sent.get(name) for name in ("loss", *names)}
    return {name: float(v) for name, v in numbers.items() if isinstance(v, (int, float)) and -LARGEST < v < LARGEST}
