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
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedblend.core.engine import client_parts
from fedblend.core.errors import FedblendError, brief, legible
from fedblend.core.registry import UntrustedCode
from fedblend.core.trees import digest_of
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.sgd import allow_tf32
from fedblend.experiment.config import resolve
from fedblend.flower import limits, requests, work
from fedblend.flower.audit import AuditLog, ReplayGuard
from fedblend.flower.client_task import ClientTask, Memory, Work
from fedblend.flower.ledger import FewDiffer, SampleSet, SampleSets
from fedblend.flower.messages import VERSION, Tensors, pack, to_record, unpack
from fedblend.flower.requests import read_request
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
            both = f"{VERSION} at this site, {brief(theirs)} at the server"
            raise FedblendError(f"version: {both}; valid: the same at all")
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
            setup = engine_for(site, client, fields, context, HELLO).setup
            experiment, population, samples = setup.experiment, setup.population, int(setup.population.sizes[client])
            limits.check_experiment(site, experiment)
            limits.check_steps(site, experiment, samples)
            limits.check_work(site, experiment, samples)
            held, validates = len(population.held_order), len(population.validation_order)
            reply_fields |= {"samples": samples, "holds_out": held, "validates": validates}
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
        kind, part = kind_of(engine.setup.experiment.method, what), part_of(task, what, do, fields, tensors)
        once = ReplayGuard(memory, AuditLog(site.audit), run_of(fields, context), task.round, client, kind, part)
        reply = pack(*_Answer(task, once, what).reply(do, fields, tensors))
    except Exception as error:
        reply = pack({"fault": reply_text(error)})
    return Message(reply, reply_to=message)


@dataclass
class _Answer:
    """One reply: what is checked before it is computed and before it leaves, and what the audit log says of it."""

    task: ClientTask
    once: ReplayGuard
    what: str
    covered: SampleSet | None = None
    begun: bool = False
    sharing: str = ""  # A keyed digest of an unmasked sharing and its result, at a site with a site file

    def reply(self, do: Work, fields: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], ArrayRecord]:
        """Return the fields and the payload of the reply. Raises :class:`RefusedByPolicy`, which the log records."""
        task, once, what = self.task, self.once, self.what
        try:
            self._check_experiment()
            self.covered = covered_by(task, what, fields)
            self._check()
            counts = self.count if what == SHARING else None
            with one_thread(), limits.bounded_seconds(task.site, task.engine.model):
                counted = replace(task, begin=self.begin, covers=self.cover, counts=counts)
                reply_fields, leaving = do(counted, fields, tensors)
            with once.audit.lock():
                # Again, since other messages may have been answered meanwhile.
                if self.begun:
                    self._check_covered()
                else:
                    self._check()
                self._record(reply_fields, leaving, fields["split"] if what == SCORES else "")
                if (leaving or self.sharing) and what in ONCE:
                    once.mark_sent(what)
        except RefusedByPolicy as refusal:
            # A refusal that depends on the site's samples counts as what it refuses.
            if what == SHARING and self.sharing:
                refusal = once.count_refused(refusal, self.sharing, task.site.sharings)
            elif what == UPLOAD and isinstance(refusal, FewDiffer):
                once.record_sent({}, True, begun=True)
            once.record_refused(refusal.why if isinstance(refusal, Withheld) else str(refusal))
            raise refusal from None
        except Exception as error:
            # A server that chooses the model may choose on which samples it fails.
            if what in (SCORES, ANSWERS, LOCAL_LOSS) and not isinstance(error, FedblendError):
                once.record_sent({}, False, begun=True)
            raise
        # A loss that is not finite is no number of JSON.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in reply_fields.items()}
        return finite, to_record(leaving)

    def begin(self) -> None:
        """Count a training or a masked payload before it is computed, whether or not something leaves then.

        So a server has no training that no audit line shows, and learns once only that a site sends nothing.
        """
        with self.once.audit.lock():
            self._check()
            if self.what == SHARING:
                self.once.audit.check_sharings("", None, self.task.site.sharings)
            self.once.record_sent({}, self.what == UPLOAD, samples=self._kept_samples(), begun=True)
            self.once.mark_sent(self.what)
        self.begun = True

    def count(self, sharing: str) -> None:
        """Note the digest of an unmasked sharing, which counts before its reply leaves, also without a payload."""
        self.sharing = sharing

    def cover(self, tags: np.ndarray, groups: np.ndarray) -> None:
        """Note the samples of means or statistics. Raises :class:`RefusedByPolicy` if few differ from earlier ones."""
        if self.task.site.data is not None:
            self.covered = SampleSet(tags, groups)
            self._check_covered()

    def _check_experiment(self) -> None:
        task, experiment = self.task, self.task.setup.experiment
        limits.check_experiment(task.site, experiment)
        limits.check_work(task.site, experiment, task.size)
        if self.what == SHARING:
            limits.check_schedule(experiment, task.round)
        if self.what == UPLOAD:
            limits.check_training(experiment, task.round)
            limits.check_steps(task.site, experiment, task.size)

    def _check(self) -> None:
        site, once, trained = self.task.site, self.once, self.what == UPLOAD
        limits.check_kind(site, once.kind, once.audit, trained)
        limits.check_noise(site, once.kind, self.task.setup.experiment, self.what == SHARING)
        if self.what == SCORES and once.part:
            held, validated, samples = once.part.split(" ")
            limits.check_held(site, once.audit, (int(held), int(validated)), samples)
        if self.what in ONCE:
            once.check(self.what, trained)
        self._check_covered()

    def _check_covered(self) -> None:
        if self.covered is not None:
            SampleSets(self.once.audit).check(self.covered, self.once.kind, self.task.site.min_mean)

    def _kept_samples(self) -> str:
        return "" if self.covered is None else SampleSets(self.once.audit).keep(self.covered)

    def _record(self, reply_fields: dict[str, Any], leaving: Tensors, split: str) -> None:
        """Write all that leaves to the audit log. Raises :class:`RefusedByPolicy` if some may not leave."""
        task, once, sharing = self.task, self.once, self.sharing
        extras = {name: tensor for name, tensor in leaving.items() if name.startswith("extras/")}
        payload = {name: tensor for name, tensor in leaving.items() if name not in extras}
        beside: dict[str, Tensors] = {}
        if extras:
            kind = extras_kind(task.setup.experiment.method)
            limits.check_kind(task.site, kind, once.audit)
            limits.check_noise(task.site, kind, task.setup.experiment)
            beside[kind] = extras
        if sharing:
            once.audit.check_sharings(sharing, payload, task.site.sharings)
        if LOSS in reply_fields:
            beside[LOSS] = {LOSS: torch.tensor(reply_fields[LOSS], dtype=torch.float64)}
        if METRICS in reply_fields:
            found = reply_fields[METRICS].items()
            beside[METRICS] = {name: torch.tensor(value, dtype=torch.float64) for name, value in found}
        for kind, tensors in beside.items():
            replace(once, kind=kind, part="").record_sent(tensors, False, split=split, sharing=sharing)
        if self.what == SCORES and not leaving:
            payload = {name: torch.tensor(n) for name in COUNTS if (n := reply_fields.get(name)) is not None}
        # Metrics are scores, too, for the limits that count these.
        if leaving or sharing or reply_fields.get("right") is not None or METRICS in reply_fields:
            trained, samples = self.what == UPLOAD, self._kept_samples()
            once.record_sent(payload, trained, samples=samples, split=split, sharing=sharing)


def covered_by(task: ClientTask, what: str, fields: dict[str, Any]) -> SampleSet | None:
    """Return the samples that scores, a loss, mean outputs or prototypes cover, of a site with data and a site file.

    Mean outputs and prototypes have a row for each label. Of what is shared :meth:`_Answer.cover` notes them.
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
    with trust_of(site), limits.bounded_model(site):
        asked = resolve(json.loads(experiment)).model_copy(update={"device": site.device})
        limits.check_agreed(site, asked)
        allow_tf32(asked.precision)
        return LoopEngine(setup_at_site(site, asked, client, json.loads(server_setup)), site.device)


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
