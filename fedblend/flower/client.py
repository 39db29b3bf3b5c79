"""The ClientApp: each message is answered for the site's own client, as far as the site's policy allows."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedblend.core.errors import FedblendError, brief
from fedblend.core.registry import UntrustedCode
from fedblend.engines.loop import LoopEngine
from fedblend.engines.sgd import allow_tf32
from fedblend.experiment.config import resolve
from fedblend.flower import work
from fedblend.flower.audit import AuditLog, ReplayGuard
from fedblend.flower.client_task import ClientTask, Memory, Work
from fedblend.flower.limits import check_experiment, check_kind, check_noise, check_schedule
from fedblend.flower.messages import Tensors, pack, to_record, unpack
from fedblend.flower.secure_aggregation import site as masked_site
from fedblend.flower.site import RefusedByPolicy, Site, reply_text, setup_at_site, site_of_node, trust_of
from fedblend.runs.runner import one_thread

app = ClientApp()


HELLO, UPLOAD, SHARING, ANSWERS, SCORES, KEYS = "hello", "upload", "sharing", "answers", "scores", "keys"
EXTRAS, LOSS, METRICS = "extras", "loss", "metrics"
ONCE = (UPLOAD, SHARING)
"""What a site gives once in a round of a run."""


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Reply with the node's client and, with data of its own, its number of samples."""
    try:
        fields, _ = unpack(message.content)
        client, site = client_of(context), site_of_node(context.node_config)
        reply_fields: dict[str, Any] = {"client": client, "samples": None}
        if site.data is not None:
            engine = engine_for(site, client, fields, context, HELLO)
            check_experiment(site, engine.setup.experiment)
            population = engine.setup.population
            reply_fields |= {"samples": int(population.sizes[client])}
            reply_fields |= {"holds_out": len(population.held_order), "validates": len(population.validation_order)}
    except Exception as error:
        reply_fields = {"fault": reply_text(error)}
    return Message(pack(reply_fields), reply_to=message)


def answered(message: Message, context: Context, what: str, do: Work) -> Message:
    """Reply with the result of ``do`` or a fault. The audit line is written before the payload leaves."""
    try:
        fields, tensors = unpack(message.content)
        site, client = site_of_node(context.node_config), client_of(context)
        if fields["client"] != client:
            raise FedblendError(f"this is client {client}, not {fields['client']}")
        engine = engine_for(site, client, fields, context, what)
        task = ClientTask(engine, site, client, int(fields["round"]), Memory(context))
        record = AuditLog(site.audit)
        run, kind = run_of(fields, context), kind_of(engine, what)
        once = ReplayGuard(task.memory, record, run, task.round, client, kind)
        try:
            check_experiment(site, engine.setup.experiment)
            if what == SHARING:
                check_schedule(engine.setup.experiment, task.round)
            _check(task, record, once, what, kind)
            with one_thread():
                reply_fields, leaving = do(task, fields, tensors)
            with record.lock():
                # Again, since other messages may have been answered meanwhile.
                _check(task, record, once, what, kind)
                _record(task, record, run, what, kind, reply_fields, leaving)
                if leaving and what in ONCE:
                    once.mark_sent(what)
        except RefusedByPolicy as refusal:
            record.record_refused(run, task.round, client, kind, str(refusal))
            raise
        reply = pack(plain(reply_fields), to_record(leaving))
    except Exception as error:
        reply = pack({"fault": reply_text(error)})
    return Message(reply, reply_to=message)


def _check(task: ClientTask, record: AuditLog, once: ReplayGuard, what: str, kind: str) -> None:
    """Raise :class:`RefusedByPolicy` if this payload may not leave now."""
    check_kind(task.site, kind, record if what == UPLOAD else None)
    check_noise(task.site, what, task.setup.experiment)
    if what in ONCE:
        once.check(what, what == UPLOAD)


def _record(
    task: ClientTask, record: AuditLog, run: str, what: str, kind: str, reply_fields: dict[str, Any], leaving: Tensors
) -> None:
    """Write all that leaves in a reply to the audit log. Raises :class:`RefusedByPolicy` if some of it may not."""
    extras = {name: tensor for name, tensor in leaving.items() if name.startswith("extras/")}
    if extras:
        check_kind(task.site, EXTRAS, None)
        check_noise(task.site, EXTRAS, task.setup.experiment)
        record.record_sent(run, task.round, task.client, EXTRAS, extras, False)
    if LOSS in reply_fields:
        loss = {LOSS: torch.tensor(reply_fields[LOSS], dtype=torch.float64)}
        record.record_sent(run, task.round, task.client, LOSS, loss, False)
    if METRICS in reply_fields:
        numbers = {name: torch.tensor(v, dtype=torch.float64) for name, v in reply_fields[METRICS].items()}
        record.record_sent(run, task.round, task.client, METRICS, numbers, False)
    if leaving or reply_fields.get("right") is not None:
        payload = {name: tensor for name, tensor in leaving.items() if name not in extras}
        if what == SHARING:
            record.check_sharings(payload, task.site.sharings)
        record.record_sent(run, task.round, task.client, kind, payload, what == UPLOAD)


def kind_of(engine: LoopEngine, what: str) -> str:
    """Return the kind of a payload, under which its bytes are counted."""
    method = engine.setup.experiment.method
    upload = "masked" if method.aggregator.secure_aggregated else method.upload.bytes_kind
    shared = "masked" if method.sharing.secure_aggregated else method.sharing.bytes_kind
    fields = {UPLOAD: upload, SHARING: shared}
    return str(fields.get(what, what))


def client_of(context: Context) -> int:
    """Return a node's client, its ``partition-id``. Raises :class:`FedblendError` if it was started without."""
    client = context.node_config.get("partition-id")
    if type(client) is not int:
        raise FedblendError(
            f"partition-id: {brief(client)}; start the SuperNode with --node-config 'partition-id=0', say"
        )
    return client


def run_of(fields: dict[str, Any], context: Context) -> str:
    """Return a run's name in the audit log: the experiment's name and Flower's run number."""
    return f"{fields['experiment']['name']}/{context.run_id}"


def engine_for(site: Site, client: int, fields: dict[str, Any], context: Context, what: str) -> LoopEngine:
    """Return a client's engine. The audit log records a refusal of code or files that the experiment names."""
    try:
        return engine_of(site, client, json.dumps(fields["experiment"]), json.dumps(fields["setup"]))
    except (UntrustedCode, RefusedByPolicy) as refusal:
        round = int(fields.get("round", 0))
        AuditLog(site.audit).record_refused(run_of(fields, context), round, client, what, str(refusal))
        raise


@functools.lru_cache(maxsize=8)
def engine_of(site: Site, client: int, experiment: str, server_setup: str) -> LoopEngine:
    """Return a client's engine; it is cached, because the clients of a simulation share a process."""
    with trust_of(site):
        asked = resolve(json.loads(experiment)).model_copy(update={"device": site.device})
        allow_tf32(asked.precision)
        return LoopEngine(setup_at_site(site, asked, client, json.loads(server_setup)), site.device)


def plain(reply_fields: dict[str, Any]) -> dict[str, Any]:
    """Return message fields that JSON can hold: a loss that is not finite becomes ``None``."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in reply_fields.items()}


ANSWERED: tuple[tuple[Callable[[ClientAppCallable], object], str, Work], ...] = (
    (app.query("share"), SHARING, work.share),
    (app.train(), UPLOAD, work.train),
    (app.query("ask"), ANSWERS, work.respond),
    (app.evaluate(), SCORES, work.score),
    (app.query("keys"), KEYS, masked_site.make_keys),
    (app.query("shares"), KEYS, masked_site.make_shares),
    (app.query("unmask"), KEYS, masked_site.reveal_shares),
)
"""Handlers of all messages except the first query: Flower's decorator, kind of payload, and function."""

for register, what, do in ANSWERED:
    register(functools.partial(answered, what=what, do=do))
