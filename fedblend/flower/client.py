"""The ClientApp: each message is answered for the site's own client, as far as the site's policy allows."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedblend.core.errors import FedblendError
from fedblend.engines.loop import LoopEngine
from fedblend.engines.sgd import allow_tf32
from fedblend.experiment.config import resolve
from fedblend.flower import work
from fedblend.flower.audit import AuditLog, ReplayGuard
from fedblend.flower.client_task import ClientTask, Memory, Work
from fedblend.flower.messages import pack, to_record, unpack
from fedblend.flower.secure_aggregation import site as masked_site
from fedblend.flower.site import RefusedByPolicy, Site, setup_at_site, site_of_node
from fedblend.runs.runner import one_thread

app = ClientApp()

UPLOAD, SHARING, ANSWERS, SCORES, KEYS = "upload", "sharing", "answers", "scores", "keys"
ONCE = (UPLOAD, SHARING)
"""What a site gives once in a round of a run."""


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Which client this node is, and how many samples it holds where they are its own."""
    try:
        words, _ = unpack(message.content)
        client, site = client_of(context), site_of_node(context.node_config)
        said: dict[str, Any] = {"client": client, "samples": None}
        if site.data is not None:
            engine = engine_of(site, client, json.dumps(words["experiment"]), json.dumps(words["setup"]))
            said |= {"samples": int(engine.setup.population.sizes[client]), "holds_out": _held(engine, client)}
    except FedblendError as error:
        said = {"fault": str(error)}
    return Message(pack(said), reply_to=message)


def answered(message: Message, context: Context, what: str, do: Work) -> Message:
    """The reply of ``do``, or why there is none; what leaves is in the audit log before it does."""
    try:
        words, tensors = unpack(message.content)
        site, client = site_of_node(context.node_config), client_of(context)
        if words["client"] != client:
            raise FedblendError(f"this is client {client}, not {words['client']}")
        engine = engine_of(site, client, json.dumps(words["experiment"]), json.dumps(words["setup"]))
        here = ClientTask(engine, site, client, int(words["round"]), Memory(context))
        record = AuditLog(site.audit)
        run, kind = f"{words['experiment']['name']}/{context.run_id}", kind_of(engine, what)
        once = ReplayGuard(here.memory, record, run, here.round, client, kind)
        try:
            refuse(site, kind, record if what == UPLOAD else None)
            if what in ONCE:
                once.check(what, what == UPLOAD)
            with one_thread():
                said, leaving = do(here, words, tensors)
        except RefusedByPolicy as refusal:
            record.record_refused(run, here.round, client, kind, str(refusal))
            raise
        extras = {name: tensor for name, tensor in leaving.items() if name.startswith("extras/")}
        if extras:
            refuse(site, "extras", None)
            record.record_sent(run, here.round, client, "extras", extras, False)
        if leaving or said.get("right") is not None:
            upload = {name: tensor for name, tensor in leaving.items() if name not in extras}
            record.record_sent(run, here.round, client, kind, upload, what == UPLOAD)
        if leaving and what in ONCE:
            once.mark_sent(what)
        reply = pack(plain(said), to_record(leaving))
    except FedblendError as error:
        reply = pack({"fault": str(error)})
    return Message(reply, reply_to=message)


def refuse(site: Site, kind: str, record: AuditLog | None) -> None:
    """Raise :class:`RefusedByPolicy` if the site's policy forbids to send this. ``record`` is given for training."""
    if kind not in site.allow:
        raise RefusedByPolicy(
            f"this site's policy lets no {kind} out (allow in its site file: {', '.join(site.allow)})"
        )
    if record is not None and site.rounds is not None:
        made = record.rounds_trained()
        if len(made) >= site.rounds:
            raise RefusedByPolicy(
                f"this site has trained in {len(made)} rounds, and takes part in no more (rounds in its site file)"
            )


def kind_of(engine: LoopEngine, what: str) -> str:
    """The word for a payload: that under which its bytes are counted."""
    method = engine.setup.experiment.method
    upload = "masked" if method.aggregator.secure_aggregated else method.upload.bytes_kind
    shared = "masked" if method.sharing.secure_aggregated else method.sharing.bytes_kind
    words = {UPLOAD: upload, SHARING: shared}
    return str(words.get(what, what))


def client_of(context: Context) -> int:
    """The client that a node is: its ``partition-id``. Raises :class:`FedblendError` if it was started without."""
    client = context.node_config.get("partition-id")
    if type(client) is not int:
        raise FedblendError(f"partition-id: {client!r}; start the SuperNode with --node-config 'partition-id=0', say")
    return client


@functools.lru_cache(maxsize=8)
def engine_of(site: Site, client: int, experiment: str, told: str) -> LoopEngine:
    """The engine of a client; a simulation, whose clients share a process, makes it once for each."""
    asked = resolve(json.loads(experiment)).model_copy(update={"device": site.device})
    allow_tf32(asked.precision)
    return LoopEngine(setup_at_site(site, asked, client, json.loads(told)), site.device)


def plain(said: dict[str, Any]) -> dict[str, Any]:
    """Words in which every number can be written as JSON: a loss that is not finite is told as ``null``."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in said.items()}


def _held(engine: LoopEngine, client: int) -> int:
    return len(engine.setup.population.held(client))


ANSWERED: tuple[tuple[Callable[[ClientAppCallable], object], str, Work], ...] = (
    (app.query("share"), SHARING, work.share),
    (app.train(), UPLOAD, work.train),
    (app.query("ask"), ANSWERS, work.respond),
    (app.evaluate(), SCORES, work.score),
    (app.query("keys"), KEYS, masked_site.make_keys),
    (app.query("shares"), KEYS, masked_site.make_shares),
    (app.query("unmask"), KEYS, masked_site.reveal_shares),
)
"""Messages but the greeting: how Flower is told of them, what leaves in answer, and what makes it."""

for register, what, do in ANSWERED:
    register(functools.partial(answered, what=what, do=do))
