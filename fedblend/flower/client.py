"""The ClientApp: each message is answered for the site's own client, as far as the site's policy allows."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedblend.core.engine import client_parts
from fedblend.core.errors import FedblendError, brief, legible
from fedblend.core.registry import UntrustedCode
from fedblend.core.trees import digest_of
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.sgd import allow_tf32
from fedblend.experiment.config import resolve
from fedblend.flower import requests, work
from fedblend.flower.audit import AuditLog, ReplayGuard
from fedblend.flower.client_task import ClientTask, Memory, Work
from fedblend.flower.limits import (
    bounded_model,
    bounded_seconds,
    check_agreed,
    check_experiment,
    check_held,
    check_kind,
    check_noise,
    check_schedule,
    check_steps,
    check_training,
    check_work,
)
from fedblend.flower.messages import VERSION, Tensors, pack, to_record, unpack
from fedblend.flower.requests import read_request
from fedblend.flower.sample_sets import FewDiffer, SampleSet, SampleSets
from fedblend.flower.secure_aggregation import masking_site as masked_site
from fedblend.flower.secure_aggregation.masks import hello_text, sign
from fedblend.flower.site import RefusedByPolicy, Site, Withheld, reply_text, setup_at_site, site_of_node, trust_of
from fedblend.runs.runner import one_thread

app = ClientApp()


HELLO, UPLOAD, SHARING, ANSWERS, SCORES, KEYS = "hello", "upload", "sharing", "answers", "scores", "keys"
LOSS, METRICS, LOCAL_LOSS = "loss", "metrics", "local-loss"
COUNTS = ("right", "samples")  # Numbers of samples that leave as scores
ONCE = (UPLOAD, SHARING, ANSWERS, KEYS, LOCAL_LOSS)
"""What a site gives once in a round of a run; of answers and keys, once for each question and stage."""


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Reply with the node's client and, with data of its own, its number of samples; or with its client and a fault.

    With a key the reply is signed: no other site can take this site's number.
    """
    stated: dict[str, Any] = {"version": VERSION}
    try:
        stated["client"] = client = client_of(context)
        site, (fields, tensors) = site_of_node(context.node_config), unpack(message.content)
        # Another version's words may not be readable here.
        if (theirs := fields.get("version", VERSION)) != VERSION:
            raise FedblendError(
                f"version: {VERSION} at this site, {brief(theirs)} at the server; valid: the same at all"
            )
        fields = read_request(requests.Hello, fields, tensors)
        if site.key is not None:
            stated["signed"] = sign(site.key, hello_text(fields["run"] or "", context.node_id, client)).hex()
        if fields["clients"] is not None and client not in fields["clients"]:
            raise FedblendError(
                "the run began without this site, and goes on without it; it takes part in a run that is begun again "
                "in another folder"
            )
        with AuditLog(site.audit).lock():
            pass  # A site whose log is not as it wrote it says so before a run begins.
        reply_fields: dict[str, Any] = stated | {"samples": None}
        if site.data is not None:
            engine = engine_for(site, client, fields, context, HELLO)
            check_experiment(site, engine.setup.experiment)
            population = engine.setup.population
            check_steps(site, engine.setup.experiment, int(population.sizes[client]))
            check_work(site, engine.setup.experiment, int(population.sizes[client]))
            reply_fields |= {"samples": int(population.sizes[client])}
            reply_fields |= {"holds_out": len(population.held_order), "validates": len(population.validation_order)}
    except Exception as error:
        reply_fields = stated | {"fault": reply_text(error)}
    return Message(pack(reply_fields), reply_to=message)


def answered(message: Message, context: Context, what: str, do: Work, form: type[requests.Form]) -> Message:
    """Reply with the result of ``do`` or a fault. The audit line is written before the payload leaves."""
    try:
        fields, tensors = unpack(message.content)
        fields = read_request(form, fields, tensors)
        site, client = site_of_node(context.node_config), client_of(context)
        if fields["client"] != client:
            raise FedblendError(f"this is client {client}, not {fields['client']}")
        engine = engine_for(site, client, fields, context, what)
        memory = Memory(context, site, client, fields["run"] or str(context.run_id))
        task = ClientTask(engine, site, client, fields["round"], memory)
        record = AuditLog(site.audit)
        run, kind = run_of(fields, context), kind_of(engine.setup.experiment.method, what)
        once = ReplayGuard(task.memory, record, run, task.round, client, kind, part_of(task, what, do, fields, tensors))
        begin = _Begin(task, once, what)
        try:
            check_experiment(site, engine.setup.experiment)
            check_work(site, engine.setup.experiment, task.size)
            if what == SHARING:
                check_schedule(engine.setup.experiment, task.round)
            if what == UPLOAD:
                check_training(engine.setup.experiment, task.round)
                check_steps(site, engine.setup.experiment, task.size)
            begin.covered = covered_by(task, what, fields)
            _check(task, once, what, begin.covered)
            counts = begin.count if what == SHARING else None
            with one_thread(), bounded_seconds(site, engine.model):
                reply_fields, leaving = do(
                    replace(task, begin=begin, covers=begin.cover, counts=counts), fields, tensors
                )
            covered = begin.covered
            with record.lock():
                # Again, since other messages may have been answered meanwhile.
                if not begin.done:
                    _check(task, once, what, covered)
                elif covered is not None:
                    SampleSets(record).check(covered, kind, site.min_mean)
                split = fields["split"] if what == SCORES else ""
                _record(task, once, what, reply_fields, leaving, covered, split, begin.sharing)
                if (leaving or begin.sharing) and what in ONCE:
                    once.mark_sent(what)
        except RefusedByPolicy as refusal:
            # A refusal that depends on the site's samples counts as what it refuses.
            if (what == SHARING and begin.sharing) or (what == UPLOAD and isinstance(refusal, FewDiffer)):
                trained = what == UPLOAD
                record.record_sent(run, task.round, client, kind, {}, trained, begun=trained, sharing=begin.sharing)
            why = refusal.why if isinstance(refusal, Withheld) else str(refusal)
            record.record_refused(run, task.round, client, kind, why)
            raise
        except Exception as error:
            # A server that chooses the model may choose on which samples it fails.
            if what in (SCORES, ANSWERS, LOCAL_LOSS) and not isinstance(error, FedblendError):
                record.record_sent(run, task.round, client, kind, {}, False, once.part, begun=True)
            raise
        reply = pack(plain(reply_fields), to_record(leaving))
    except Exception as error:
        reply = pack({"fault": reply_text(error)})
    return Message(reply, reply_to=message)


def _check(task: ClientTask, once: ReplayGuard, what: str, covered: SampleSet | None) -> None:
    check_kind(task.site, once.kind, once.audit, what == UPLOAD)
    check_noise(task.site, once.kind, task.setup.experiment, what == SHARING)
    if what == SCORES and once.part:
        held, validated, samples = once.part.split(" ")
        check_held(task.site, once.audit, (int(held), int(validated)), samples)
    if what in ONCE:
        once.check(what, what == UPLOAD)
    if covered is not None:
        SampleSets(once.audit).check(covered, once.kind, task.site.min_mean)


@dataclass
class _Begin:
    """Counts a training or a masked payload before it is computed, whether or not something leaves then.

    So a server has no training that no audit line shows, and learns once only that a site sends nothing.
    """

    task: ClientTask
    once: ReplayGuard
    what: str
    covered: SampleSet | None = None
    done: bool = False
    sharing: str = ""
    """A keyed digest of an unmasked sharing and its result, at a site with a site file."""

    def __call__(self) -> None:
        task, once = self.task, self.once
        with once.audit.lock():
            _check(task, once, self.what, self.covered)
            if self.what == SHARING:
                once.audit.check_sharings("", None, task.site.sharings)
            trained = self.what == UPLOAD
            samples = "" if self.covered is None else SampleSets(once.audit).keep(self.covered)
            where = (once.run, task.round, task.client, once.kind)
            once.audit.record_sent(*where, {}, trained, once.part, samples, begun=True)
            once.mark_sent(self.what)
        self.done = True

    def count(self, sharing: str) -> None:
        """Note the digest of an unmasked sharing, which counts before its reply leaves, also without a payload."""
        self.sharing = sharing

    def cover(self, tags: np.ndarray, groups: np.ndarray) -> None:
        """Note the samples of means or statistics. Raises :class:`RefusedByPolicy` if few differ from earlier ones."""
        if self.task.site.data is not None:
            self.covered = SampleSet(tags, groups)
            SampleSets(self.once.audit).check(self.covered, self.once.kind, self.task.site.min_mean)


def _record(
    task: ClientTask,
    once: ReplayGuard,
    what: str,
    reply_fields: dict[str, Any],
    leaving: Tensors,
    covered: SampleSet | None,
    split: str,
    sharing: str,
) -> None:
    """Write all that leaves in a reply to the audit log. Raises :class:`RefusedByPolicy` if some may not leave."""
    record, extras = once.audit, {name: tensor for name, tensor in leaving.items() if name.startswith("extras/")}
    payload = {name: tensor for name, tensor in leaving.items() if name not in extras}
    beside = extras_kind(task.setup.experiment.method)
    if extras:
        check_kind(task.site, beside, record)
        check_noise(task.site, beside, task.setup.experiment)
    if sharing:
        record.check_sharings(sharing, payload, task.site.sharings)

    def sent(kind: str, tensors: Tensors, trained: bool = False, part: str = "", samples: str = "") -> None:
        where = (once.run, task.round, task.client)
        record.record_sent(*where, kind, tensors, trained, part, samples, split=split, sharing=sharing)

    if extras:
        sent(beside, extras)
    if LOSS in reply_fields:
        sent(LOSS, {LOSS: torch.tensor(reply_fields[LOSS], dtype=torch.float64)})
    if METRICS in reply_fields:
        sent(METRICS, {name: torch.tensor(v, dtype=torch.float64) for name, v in reply_fields[METRICS].items()})
    if what == SCORES and not leaving:
        payload = {name: torch.tensor(n) for name in COUNTS if (n := reply_fields.get(name)) is not None}
    # Metrics are scores, too, for the limits that count these.
    if leaving or sharing or reply_fields.get("right") is not None or METRICS in reply_fields:
        samples = "" if covered is None else SampleSets(record).keep(covered)
        sent(once.kind, payload, what == UPLOAD, once.part, samples)


def covered_by(task: ClientTask, what: str, fields: dict[str, Any]) -> SampleSet | None:
    """Return the samples that scores, a loss, mean outputs or prototypes cover, of a site with data and a site file.

    Mean outputs and prototypes have a row for each label. Of what is shared :meth:`_Begin.cover` notes them.
    """
    setup, record = task.setup, AuditLog(task.site.audit)
    population, upload = setup.population, setup.experiment.method.upload
    if record.path is None or task.site.data is None:
        return None
    if what == SCORES and fields["split"] in ("holdout", "validation"):
        rows = population.held_order if fields["split"] == "holdout" else population.validation_order
    elif what == LOCAL_LOSS or (what == UPLOAD and upload.content in ("outputs", "embeddings")):
        rows = population.order
    else:
        return None
    return SampleSets(record).of(task.engine, rows, task.site.min_mean, what == UPLOAD) if len(rows) else None


def part_of(task: ClientTask, what: str, do: Work, fields: dict[str, Any], tensors: Tensors) -> str:
    """Return which one of several payloads of a kind is requested: of answers the question, of keys the stage.

    Of scores it is the numbers of samples that are held out and kept for validation, and a digest of all samples of a
    site with data of its own.
    """
    if what == ANSWERS:
        return brief(sorted(tensors))
    if what == KEYS:
        return f"{do.__name__} of {brief(fields['quantity'])}"
    if what == SCORES and task.site.data is not None and fields["split"] != "test":
        population = task.setup.population
        return f"{len(population.held_order)} {len(population.validation_order)} {samples_digest(task.engine)}"
    return ""


@functools.lru_cache(maxsize=8)
def samples_digest(engine: LoopEngine) -> str:
    """Return a digest of a site's samples."""
    train = engine.setup.data.train
    return digest_of({"x": train.x, "y": train.y})


def kind_of(method: Any, what: str) -> str:
    """Return the kind of a payload, under which its bytes are counted."""
    upload = "masked" if method.aggregator.works_on == "sums" else method.upload.bytes_kind
    shared = "masked" if method.sharing.plan.who == "groups" else method.sharing.bytes_kind
    fields = {UPLOAD: upload, SHARING: shared}
    return str(fields.get(what, what))


def extras_kind(method: Any) -> str:
    """Return the kind of what leaves beside a model: statistics of the model's hidden maps, or what models give."""
    parts = client_parts(method).values()
    return "map-statistics" if any(part.exchanges == "map-statistics" for part in parts) else "extras"


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
    return f"{legible(fields['experiment']['name'])}/{context.run_id}"


def engine_for(site: Site, client: int, fields: dict[str, Any], context: Context, what: str) -> LoopEngine:
    """Return a client's engine. The audit log records a refusal of code or files that the experiment names."""
    try:
        return engine_of(site, client, json.dumps(fields["experiment"]), json.dumps(fields["setup"]))
    except (UntrustedCode, RefusedByPolicy) as refusal:
        round = fields.get("round", 0)
        AuditLog(site.audit).record_refused(run_of(fields, context), round, client, what, str(refusal))
        raise


@functools.lru_cache(maxsize=8)
def engine_of(site: Site, client: int, experiment: str, server_setup: str) -> LoopEngine:
    """Return a client's engine; it is cached, because the clients of a simulation share a process."""
    with trust_of(site), bounded_model(site):
        asked = resolve(json.loads(experiment)).model_copy(update={"device": site.device})
        check_agreed(site, asked)
        allow_tf32(asked.precision)
        return LoopEngine(setup_at_site(site, asked, client, json.loads(server_setup)), site.device)


def plain(reply_fields: dict[str, Any]) -> dict[str, Any]:
    """Return message fields that JSON can hold: a loss that is not finite becomes ``None``."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in reply_fields.items()}


ANSWERED: tuple[tuple[Callable[[ClientAppCallable], object], str, Work, type[requests.Form]], ...] = (
    (app.query("share"), SHARING, work.share, requests.Share),
    (app.train(), UPLOAD, work.train, requests.Train),
    (app.query("ask"), ANSWERS, work.respond, requests.Ask),
    (app.evaluate(), SCORES, work.score, requests.Score),
    (app.query("keys"), KEYS, masked_site.make_keys, requests.Keys),
    (app.query("shares"), KEYS, masked_site.make_shares, requests.Shares),
    (app.query("sign"), KEYS, masked_site.sign_sites, requests.Unmask),
    (app.query("unmask"), KEYS, masked_site.reveal_shares, requests.Unmask),
    (app.query("loss"), LOCAL_LOSS, work.local_loss, requests.Loss),
)
"""Handlers of all messages except the first query: Flower's decorator, kind of payload, function, and closed form."""

for register, what, do, form in ANSWERED:
    register(functools.partial(answered, what=what, do=do, form=form))
