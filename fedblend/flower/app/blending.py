"""At a client of a Flower app of the user's own: the mod, the loss of a batch, and the reply with shared data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from fedblend.core import objective as objectives
from fedblend.core.errors import FedblendError, tokens_refused
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.core.sharing import ClientData, Payload, hides
from fedblend.engines.nets import EagerNet
from fedblend.flower.app.inputs import Inputs
from fedblend.flower.app.supported import fault_of_sharing
from fedblend.flower.audit import AuditLog, ReplayGuard
from fedblend.flower.client_task import Memory
from fedblend.flower.ledger import SampleSet, SampleSets, ledger_of
from fedblend.flower.limits import check_kind, check_mechanisms
from fedblend.flower.messages import APP_FIELDS, SHARE_QUERY, attach, detach, from_record, to_record
from fedblend.flower.requests import StrategyRound, StrategyShare, read_request
from fedblend.flower.secrets import secret_generator
from fedblend.flower.site import RefusedByPolicy, Site, reply_text, site_of_node, trust_of
from fedblend.methods.objectives.output_cache import OutputCache

POOL = "fedblend-pool"  # Name of the other clients' shared data in a client's memory

Samples = Callable[[Context], tuple[torch.Tensor, torch.Tensor]]
"""Returns a client's samples: inputs x float32 [n, ...] as the model takes them, and targets y."""


def blend_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod: store a :class:`Strategy`'s fields for :func:`blended_loss`, and apply the site's policy.

    The training function receives the message of the wrapped strategy, without fedblend's records. Where the SuperNode
    was started with ``site="..."``, the site file's `allow`, `rounds`, `protection` and `audit` apply to the model in
    the reply. A round's model leaves once. Messages without fedblend's fields pass unchanged, but a site with a site
    file does not train on them.

    Raises :class:`FedblendError`; Flower then replies with an error.
    """
    # A mod of the whole app is called for its queries and evaluations, too.
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    return _blended(message, context, call_next)


@contextmanager
def _without_paths() -> Iterator[None]:
    """Inside, an error that Flower sends to the server has no path of this machine."""
    try:
        yield
    except FedblendError as error:
        raise FedblendError(reply_text(error)) from None


@_without_paths()
def _blended(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    fields, tensors = detach(message.content)
    if fields is None:
        if policy_of(context).has_file:
            raise FedblendError("this site trains on requests of a fedblend.flower.Strategy only: it has a site file")
        return call_next(message, context)
    fields, memory = read_request(StrategyRound, fields, tensors), Memory(context)
    if tensors:
        memory.keep(POOL, fields["pool"], tensors)
    elif fields["pool"] is not None and memory.recall(POOL, fields["pool"]) is None:
        raise FedblendError("this client no longer has the other clients' shared data; the strategy sends them again")
    context.state[APP_FIELDS] = ConfigRecord({APP_FIELDS: json.dumps(fields)})
    site = policy_of(context)
    audit = AuditLog(site.audit)
    guard = ReplayGuard(memory, audit, str(context.run_id), fields["round"], client_number(context), "weights")

    def check() -> None:
        check_kind(site, "weights", audit, trained=True)
        check_mechanisms(site, {} if site.protection is None else {"protection": site.protection.mechanism()})
        guard.check("upload", True)

    try:
        check()
        starts = [from_record(record) for record in message.content.array_records.values()]
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        content = _protected(site, starts, reply.content)
        records = content.array_records.items()
        upload = {f"{name}/{n}": t for name, record in records for n, t in from_record(record).items()}
        with audit.lock():
            # Again, since other messages may have been answered meanwhile.
            check()
            guard.record_sent(upload, True)
            guard.mark_sent("upload")
    except RefusedByPolicy as refusal:
        guard.record_refused(str(refusal))
        raise
    return Message(content, reply_to=message)


def _protected(site: Site, starts: list[dict[str, torch.Tensor]], content: RecordDict) -> RecordDict:
    if site.protection is None:
        return content
    if getattr(site.protection, "on", "weights") == "gradients":
        raise RefusedByPolicy(
            'protection.on = "gradients" needs the learning rate, which only your own training loop has'
        )
    models = list(content.array_records.items())
    if len(starts) != 1 or len(models) != 1 or set(starts[0]) != set(models[0][1]):
        raise RefusedByPolicy(
            "protection needs one model in the message and one with the same tensors in the reply; this app sends "
            "something else"
        )
    ((name, record),) = models
    model = site.protection.protect(from_record(record), starts[0], 1.0, secret_generator())
    protected = RecordDict(dict(content.items()))
    protected[name] = to_record(model)
    return protected


class BlendedLoss:
    """The objective and the terms of the server's :class:`Strategy`, as a function of batches.

    Make a new one in each round, after the round's weights are in the model and before the first step: FedProx's
    distance is from the weights that the model has then. Random choices (mean, partner, operations) are drawn batch
    after batch from the stream of the round and the client.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, fields: dict[str, Any], pool: dict[str, torch.Tensor], client: int
    ) -> None:
        self.net = EagerNet(model)
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.params.values())).device
        self.terms = [build("term", table) for table in fields["terms"]]
        objective: objectives.Objective = build("objective", fields["objective"])
        self.entries = len(next(iter(pool.values()))) if pool else 0
        # As in fedblend's own engines, a client without data to mix with trains on the plain loss.
        self.objective = objectives.Plain() if objective.needs and not self.entries else objective
        first, count = fields["own"]
        self.own = (np.arange(self.entries) >= first) & (np.arange(self.entries) < first + count)
        self.round = int(fields["round"])
        self.rng = stream(int(fields["seed"]), "objective", self.round, client)
        start = {name: p.detach().clone() for name, p in self.params.items()} if self.terms else {}
        shared = {name: tensor.to(self.device) for name, tensor in pool.items()}
        self.context = objectives.Context(inputs.task, inputs.scale.to(self.device), shared, start)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss of inputs x [B, ...] and targets y [B] (classes) or [B, q] (numbers).

        Raises :class:`FedblendError` for whole numbers, ids of tokens, where the objective computes with inputs.
        """
        for one in () if x.is_floating_point() else objectives.with_bases(self.objective):
            if one.numeric_inputs:
                raise tokens_refused(f"the objective '{one.name}'")
        batch = objectives.Batch(x, y)
        plan = objectives.StepPlan(np.array([len(y)]), len(y), self.round, self.own, self.entries)
        rows = self.objective.draw(self.rng, plan)
        drawn = {name: torch.from_numpy(values)[0].to(self.device) for name, values in rows.items()}
        net = OutputCache(self.net, x)
        loss = self.objective.loss(net, batch, drawn, self.context)
        for term in self.terms:
            loss = loss + term.loss(self.params, net, batch, self.context)
        return loss


def blended_loss(context: Context, model: nn.Module, inputs: Inputs) -> BlendedLoss:
    """Return the round's loss, in a training function of an app with :func:`blend_mod`.

    Raises :class:`FedblendError` where the message did not come from a :class:`Strategy`.
    """
    if APP_FIELDS not in context.state.config_records:
        raise FedblendError(
            "blended_loss: no message of a fedblend.flower.Strategy; use one at the server, and at the client "
            "ClientApp(mods=[fedblend.flower.blend_mod])"
        )
    fields = json.loads(str(context.state.config_records[APP_FIELDS][APP_FIELDS]))
    pool = Memory(context).recall(POOL, fields["pool"]) if fields["pool"] is not None else {}
    if pool is None:
        raise FedblendError("blended_loss: the other clients' shared data are missing; blend_mod should have refused")
    with trust_of(policy_of(context)):
        return BlendedLoss(model, inputs, fields, pool, client_number(context))


def add_sharing(app: ClientApp, inputs: Inputs, samples: Samples) -> None:
    """Let an app's clients share means of their samples on a :class:`Strategy`'s request (FedMix, NaiveMix).

    This is a query, not a mod: Flower calls mods only for functions that an app registers.
    """

    app.query(SHARE_QUERY)(functools.partial(_reply_shared, inputs=inputs, samples=samples))


@_without_paths()
def _reply_shared(message: Message, context: Context, inputs: Inputs, samples: Samples) -> Message:
    told, tensors = detach(message.content)
    fields = read_request(StrategyShare, told or {}, tensors)
    site = policy_of(context)
    audit, client = AuditLog(site.audit), client_number(context)
    with trust_of(site):
        sharing = build("sharing", fields["sharing"])
    kind = sharing.bytes_kind
    guard = ReplayGuard(Memory(context), audit, str(context.run_id), 0, client, kind)
    digests: list[str] = []
    covered: list[SampleSet] = []

    def cover(tags: np.ndarray, groups: np.ndarray) -> None:
        covered.append(SampleSet(tags, groups))
        SampleSets(audit).check(covered[-1], kind, site.min_mean)

    try:
        # The site does not rely on the server's own check.
        if why := fault_of_sharing(sharing):
            raise RefusedByPolicy(f"this app does not share such data: {why}")
        check_kind(site, kind, audit)
        check_mechanisms(site, {"sharing": sharing.mechanism()})
        x, y = samples(context)
        data = _client_data(sharing, fields, inputs, x, y, site, client)
        ledger = ledger_of(site)
        payload: Payload | None = (
            sharing.share(data) if ledger is None else ledger.payload(sharing, data, {}, cover, digests.append)
        )
        with audit.lock():
            guard.check("sharing", False)
            for digest in digests:
                audit.check_sharings(digest, payload, site.sharings)
                kept = ""
                for sample_set in covered:
                    SampleSets(audit).check(sample_set, kind, site.min_mean)
                    kept = SampleSets(audit).keep(sample_set)
                guard.record_sent(payload or {}, False, samples=kept, sharing=digest)
            if payload or digests:
                guard.mark_sent("sharing")
    except RefusedByPolicy as refusal:
        # That its samples differ in a few from earlier ones tells of labels, so that it counts.
        for digest in digests:
            refusal = guard.count_refused(refusal, digest, site.sharings)
        guard.record_refused(str(refusal))
        raise refusal from None
    # By its number of samples the server bounds what a site can share.
    content = attach(RecordDict(), {"samples": len(y)}, to_record(payload) if payload else None)
    return Message(content, reply_to=message)


def _client_data(
    sharing: Any, fields: dict[str, Any], inputs: Inputs, x: torch.Tensor, y: torch.Tensor, site: Site, client: int
) -> ClientData:
    if tuple(x.shape[1:]) != inputs.shape or not x.is_floating_point() or len(x) != len(y):
        raise FedblendError(
            f"samples: {x.dtype} of shape {list(x.shape)} and {len(y)} targets are not valid: inputs as the model "
            f"takes them, floats [n, {', '.join(map(str, inputs.shape))}], and as many targets"
        )
    rng = secret_generator() if hides(sharing) else stream(fields["seed"], "share", 0, client)
    min_mean = max(site.min_mean, 2, fields["min_mean"])
    return ClientData(x.float().cpu(), y.cpu(), inputs.task, inputs.scale, _no_hidden_states, rng, min_mean)


def _no_hidden_states(x: torch.Tensor, layer: int) -> torch.Tensor:
    raise FedblendError("an app of your own does not share hidden states")


def policy_of(context: Context) -> Site:
    """Return the site of a SuperNode; without a site file the default policy holds: no single samples leave."""
    return site_of_node(context.node_config) if "site" in context.node_config else Site()


def client_number(context: Context) -> int:
    """Return the number that keys a client's random streams: its partition-id, or its node id where it has none."""
    number = context.node_config.get("partition-id", context.node_id)
    return number if type(number) is int else context.node_id
