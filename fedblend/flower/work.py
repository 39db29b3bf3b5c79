"""A site's work for its own client: share, train, answer queries, score. Pure functions of a message and the task."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from fedblend.core.engine import Scores, TrainTask, client_rounds, first_client_state, first_server_state, protected
from fedblend.core.errors import FedblendError, brief
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.random import stream
from fedblend.core.setup import model_spec
from fedblend.core.sharing import Payload, Pool, Request, Sharing, gather, hides
from fedblend.core.state import ClientState
from fedblend.core.trees import add_prefix, differing, strip_prefix, without
from fedblend.core.upload import fault_of
from fedblend.flower.audit import digest_of
from fedblend.flower.client_task import ClientTask
from fedblend.flower.ledger import ledger_of
from fedblend.flower.messages import MessageContent, Tensors, round_of_mark
from fedblend.flower.model_check import check_first, check_model
from fedblend.flower.requests import MAX_ENTRIES, Start
from fedblend.flower.secrets import secret_generator
from fedblend.flower.secure_aggregation.masking_site import (
    SumState,
    masked_mean,
    masked_update,
    masking,
    secure_aggregator,
)
from fedblend.flower.secure_aggregation.masks import MEANS, MODELS, sent_beside
from fedblend.flower.site import RefusedByPolicy, describe_setup

CURVE = 100  # Steps in which a site tells what share of its held-out samples is right

LACKS = "lacks"
"""Field of a reply: what the client received earlier and no longer has, because its SuperNode was restarted."""

LASTS = "kept for the Flower run; with a site file, for the server's run folder, also through restarts"
"""How long a client has what nobody else has."""


def share(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Return what the client shares. Where the sharing sends nothing, the reply has only the number of entries."""
    sharing = task.setup.experiment.method.sharing
    if sharing.plan.sees_model:
        task.memory.keep("model", str(task.round), tensors)
    weights = _in_order(task, tensors) if sharing.plan.sees_model else task.setup.weights()
    request = request_of(task, fields)
    if sharing.plan.who == "groups" and task.size >= max(task.setup.experiment.policy.min_mean, task.site.min_mean):
        with masking(task, MEANS, fields, tensors) as taken:
            mean = shared(task, weights, task.client, task.round, request)
            return {}, masked_mean(task, mean or {}, fields, taken)
    payload = shared(task, weights, task.client, task.round, request)
    if payload is None:
        return {"nothing": True}, {}
    if "sample" in (sharing.made_of, PAYLOAD_KINDS[sharing.bytes_kind].entries):
        _require_few(task, max(map(len, payload.values())), f"single samples ({sharing.bytes_kind})")
    if sharing.plan.leaves:
        return {}, payload
    task.memory.keep("shared", str(task.round), payload)
    task.memory.save()
    return {}, {name: t.new_zeros(len(t), 0) for name, t in payload.items()}


def _require_few(task: ClientTask, number: int, what: str) -> None:
    if (most := task.site.max_seeds) is not None and number > most:
        raise RefusedByPolicy(f"it is asked for {number} {what}, and its policy gives {most} (max_seeds in its file)")


def request_of(task: ClientTask, fields: dict[str, Any]) -> Request | None:
    """Return what the server asks of this client in particular. Raises :class:`FedblendError` if it is invalid."""
    if (asked := fields["request"]) is None:
        return None
    classes, wanted, dummies = task.setup.task.outputs, asked.wanted, asked.dummies
    if len(wanted) != classes or max(dummies, default=0) >= classes:
        raise FedblendError(f"a request that is none: {brief(wanted)}; valid: numbers for {classes} labels, and labels")
    _require_few(task, sum(wanted), "seeds")
    return Request(np.array(wanted, np.int64), np.array(dummies, np.int64))


def shared(
    task: ClientTask, weights: Tensors, owner: int, round: int, request: Request | None = None
) -> Payload | None:
    """Return what the sharing makes of the client's samples with the random numbers of ``owner``.

    A site with a site file draws groups and noise from its own secret, and shares the same again
    (:class:`~fedblend.flower.ledger.SharingLedger`). Without one groups are those of a simulation, and noise that is to
    protect samples comes from a cryptographic generator: whoever knows the experiment knows all keyed streams.
    """
    experiment, engine = task.setup.experiment, task.engine
    sharing = experiment.method.sharing
    minimum = max(experiment.policy.min_mean, task.site.min_mean)
    rng = secret_generator() if hides(sharing) else stream(experiment.seed, "share", round, owner)
    engine.prepare(weights)
    local = engine.local(task.client, task.size, rng, minimum, request)
    ledger = ledger_of(task.site)
    if ledger is not None and task.counts is not None:
        model = digest_of(weights) if sharing.plan.sees_model else None
        about = {"scale": describe_setup(task.setup)["scale"], "model": model}
        if sharing.plan.leaves:
            return ledger.payload(sharing, local, about, task.covers, task.counts)
        ledger.count_number(sharing, local, about, task.counts)
    made: Payload | None = sharing.share(local)
    return made


def local_loss(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Return the mean loss of the round's model over all of the client's samples, for the choice of clients.

    The model is kept: if the client is chosen, its training begins with it.
    """
    if task.site.data is not None and task.size < task.site.min_mean:
        told = f"{task.size} samples, and it tells of {task.site.min_mean} or more together (min_mean in its file)"
        raise RefusedByPolicy(f"its mean loss would be of {told}")
    task.memory.keep("model", str(task.round), tensors)
    losses = task.engine.losses(task.round, _in_order(task, tensors), [task.client], task.setup.sizes(task.round))
    return {}, {"loss": torch.tensor(_rounded(task, float(losses[task.client])), dtype=torch.float64)}


def _rounded(task: ClientTask, value: float) -> float:
    """Return a number that leaves: of a site's own samples three digits of it, which a curve or a choice needs."""
    return value if task.site.data is None else float(f"{value:.3g}")


def train(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Return the client's upload after training, its number of samples and its loss; or what it lacks to begin."""
    start = _start(task, fields, tensors)
    pool = _pool(task, fields, tensors)
    if start is None or isinstance(pool, str):
        return {LACKS: "model" if start is None else pool}, {}
    experiment = task.setup.experiment
    if task.site.agreed and task.round == 0 and fields["begins"] != Start.OWN and experiment.start is None:
        check_first(start, task.setup.weights())
    if fields["begins"] == Start.OWN and (protects(task) or secure_aggregator(task) is not None):
        raise RefusedByPolicy(
            "it did not receive the round's model, from which its protection clips how far its own moves, and a masked "
            "sum counts changes"
        )
    state = _client_state(task, fields, start)
    if experiment.method.upload.content == "embeddings" and experiment.policy.min_mean < task.site.min_mean:
        raise RefusedByPolicy(
            f"its mean embeddings would be of {experiment.policy.min_mean} samples or more (policy.min_mean), and this "
            f"site sends means of {task.site.min_mean} or more (min_mean in its file)"
        )
    train_task = _train_task(task, fields, tensors, start, pool, state)
    if secure_aggregator(task) is None:
        task.begin()
        return _trained(task, fields, train_task, None)
    with masking(task, MODELS, fields, tensors) as taken:
        return _trained(task, fields, train_task, taken)


def _trained(task: ClientTask, fields: dict[str, Any], train_task: TrainTask, taken: SumState | None) -> MessageContent:
    """Return the client's upload after training; ``taken`` are the secrets of its masks in a masked sum."""
    experiment, pool, start = task.setup.experiment, train_task.pool, train_task.weights
    (trained,) = client_rounds(task.engine, task.setup, train_task, [task.client])
    # A client's own model has a table of its own.
    had, kept = (replace(one, model={}, outputs={}) for one in (train_task.state_of(task.client), trained.state))
    # The server may not receive this round's reply; the next round then begins with what was kept before.
    if kept:
        if fields["state"] is not None:
            task.memory.keep("parts-before", fields["state"], had.to_tensors())
        task.memory.keep("parts", fields["keep"], kept.to_tensors())
    if experiment.keeps_client_weights:
        if fields["mark"] is not None:
            task.memory.keep("own-before", fields["mark"], without(start, task.setup.frozen))
        task.memory.keep("own", fields["keep"], trained.state.model or start)
    if kept or experiment.keeps_client_weights:
        task.memory.save()
    if trained.outputs is not None and task.site.has_file:
        trained = replace(trained, outputs=_without_few(task, train_task, trained.outputs))
    begun = task.setup.shared(start)
    upload, extras = protected(task.setup, train_task, trained, secret_generator())
    if task.site.protection is not None and experiment.method.upload.is_model:
        lr = experiment.train.lr_in(task.round)
        upload = task.site.protection.protect(upload, begun, lr, secret_generator())
    sent = upload
    if aggregator := secure_aggregator(task):
        assert taken is not None
        owner = _owners(fields["owners"]) if pool is not None else np.empty(0, np.int64)
        mixed = None if pool is None else pool.tensors if experiment.method.sharing.plan.to == "clients" else {}
        beside = sent_beside(mixed, owner, train_task.server_state)
        sent = masked_update(task, aggregator, upload, begun, fields, taken, beside)
    if extras and task.site.protection is not None:
        raise FedblendError("its site's protection covers models only, and this method sends more beside them")
    reply_fields: dict[str, Any] = {"samples": trained.samples}
    if sends_loss(task):
        reply_fields["loss"] = trained.loss
        if trained.measured and "metrics" in task.site.allow:
            reply_fields["metrics"] = dict(trained.measured)
    if experiment.method.server_step.works_on == "answers":
        task.memory.keep("upload", str(task.round), upload)
    return reply_fields, sent | add_prefix("extras/", extras)


def _without_few(task: ClientTask, train_task: TrainTask, outputs: torch.Tensor) -> torch.Tensor:
    """Return mean outputs by label [C, C], with zeros for labels of fewer samples in training than ``min_mean``."""
    # The server chooses the model: the mean of one sample's outputs would tell any number of it.
    rows = np.unique(task.engine.assign(train_task, task.client).order)
    labels = task.setup.samples(task.client, task.size)[1][torch.from_numpy(rows)]
    few = torch.bincount(labels, minlength=len(outputs)) < task.site.min_mean
    return outputs.masked_fill(few[:, None], 0.0)


def sends_loss(task: ClientTask) -> bool:
    """Whether the training loss leaves. It leaves only beside an upload in clear: it reveals samples and noise.

    A site with a site file sends it only beside a model: mean outputs tell less of samples than their loss.
    """
    beside = task.setup.experiment.method.upload.is_model or not task.site.has_file
    return beside and "loss" in task.site.allow and secure_aggregator(task) is None and not protects(task)


def _train_task(
    task: ClientTask, fields: dict[str, Any], tensors: Tensors, start: Tensors, pool: Pool | None, kept: ClientState
) -> TrainTask:
    outputs = strip_prefix("outputs/", tensors)
    if fields["begins"] == Start.OWN:
        kept = replace(kept, model=start, outputs=outputs)
    server_state = strip_prefix("server/", tensors)
    spec = model_spec(task.setup, task.engine.model)
    like = first_server_state(task.setup.experiment.method, spec, start, broadcast=True)
    if fault := fault_of(server_state, like):
        raise FedblendError(f"what the server sent beside the model cannot be used: {fault}")
    states = {task.client: kept} if kept else {}
    return TrainTask(task.round, start, pool, task.setup.sizes(task.round), outputs, states, server_state)


def _client_state(task: ClientTask, fields: dict[str, Any], start: Tensors) -> ClientState:
    """Return what this client keeps beside its own model: the first state, or that kept under the server's mark.

    Raises :class:`FedblendError` where it is gone, or not of this experiment.
    """
    experiment, mark = task.setup.experiment, fields["state"]
    first = first_client_state(experiment.method, experiment.train, model_spec(task.setup, task.engine.model), start)
    if mark is None:
        return first
    kept = ClientState.from_tensors(_recall(task, "parts", mark))
    like = first.to_tensors()
    # A personal model that is made after training is not read in the next round, and has no first table.
    table = {name: tensor for name, tensor in kept.to_tensors().items() if name in like}
    _require_form(table, like, f"what it keeps since round {round_of_mark(mark)} is")
    return ClientState.from_tensors({name: table[name] for name in like})


def _recall(task: ClientTask, table: Literal["own", "parts"], mark: str) -> dict[str, torch.Tensor]:
    kept = task.memory.recall(table, mark) or task.memory.recall(f"{table}-before", mark)
    if kept is None:
        what = "its own weights of" if table == "own" else "what the method keeps at it since"
        raise FedblendError(
            f"it no longer has {what} round {round_of_mark(mark)} ({LASTS}), and nobody else has it; begin a new run"
        )
    return kept


def protects(task: ClientTask) -> bool:
    """Whether the experiment or the site changes the model before it leaves."""
    experiment = task.setup.experiment
    return experiment.method.upload.is_model and (
        experiment.protection.name != "none" or task.site.protection is not None
    )


def respond(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Return the client's answer to the server step's question about its last upload."""
    upload = task.memory.recall("upload", str(task.round))
    if upload is None:
        raise FedblendError("it no longer has its upload (its SuperNode was restarted)")
    known = model_spec(task.setup, task.engine.server_model())
    step, cohort = task.setup.experiment.method.server_step, task.setup.experiment.train.cohort
    if fault := step.fault_of_question(tensors, min(cohort, len(task.setup.population)), known):
        raise RefusedByPolicy(fault)
    responses = step.respond({task.client: upload}, tensors, known)
    return {}, responses[task.client]


def score(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Return the scores of a model.

    Of samples that the client holds out or keeps for validation: their number, the number of right ones, and the
    experiment's metrics with the loss where the site file allows them. Of test samples, at a site without data of its
    own: the loss of each, and whether it is right.
    """
    split, own_data = fields["split"], task.site.data is not None
    weights = _in_order(task, tensors) if fields["own"] is None else _own_weights(task, fields["own"])
    if (mark := fields["personal"]) is not None:
        kept = ClientState.from_tensors(_recall(task, "parts", mark))
        weights |= getattr(kept, task.setup.experiment.method.personal.keeps)
    if own_data and split == "test":
        raise RefusedByPolicy(
            "its test samples are its own, and what each of them says of a model stays here; valid: holdout"
        )
    made = task.engine.score(weights, split)
    if split == "test":
        found = {"loss": torch.from_numpy(made.loss)}
        return {}, found | ({} if made.right is None else {"right": torch.from_numpy(made.right)})
    mine = task.setup.population.owners(split) == task.client
    samples, least = int(mine.sum()), task.site.min_mean
    if own_data and 0 < samples < least:
        did = "holds out" if split == "holdout" else "keeps for validation"
        raise RefusedByPolicy(
            f"it {did} {samples} samples, and tells of {least} or more together (min_mean in its file)"
        )
    right = None if made.right is None else int(made.right[mine].sum())
    if right is not None and own_data:
        # As coarse as a curve allows, so that a sample's prediction seldom shows.
        step = max(least, math.ceil(samples / CURVE))
        right = min(step * round(right / step), samples)
    # No metrics and no loss leave unless the site's file names them.
    metrics = {"metrics": _metrics(task, made, mine)} if "metrics" in task.site.allow else {}
    return {"right": right, "samples": samples, **metrics}, {}


def _metrics(task: ClientTask, made: Scores, mine: np.ndarray) -> dict[str, float]:
    """Return the loss and the experiment's metrics on the client's own samples, those that are defined."""
    found = {"loss": float(made.loss[mine].mean()) if mine.any() else math.nan}
    targets = task.setup.data.train.y[made.samples[mine]]
    # A mean over classes would tell of single samples of a class that has few.
    if made.outputs is not None and not (task.site.data is not None and _has_few(task, targets)):
        outputs = made.outputs[mine]
        found |= {metric.label: metric.overall(outputs, targets) for metric in task.setup.experiment.metrics}
    return {name: _rounded(task, value) for name, value in found.items() if math.isfinite(value)}


def _has_few(task: ClientTask, targets: torch.Tensor) -> bool:
    """Whether some class, or one of a label's two values, is that of fewer samples than the site tells of together."""
    kind = task.setup.task.kind
    if kind == "regression":
        return False
    rows = torch.cat([targets, 1 - targets], 1) if kind == "multi-label" else task.setup.task.encode(targets)
    counts = rows.sum(0)
    return bool(((counts > 0) & (counts < task.site.min_mean)).any())


def _in_order(task: ClientTask, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the model of a message, in the model's order; tensors that do not travel have their first values."""
    weights, first = strip_prefix("weights/", tensors), task.setup.weights()
    if different := differing(task.setup.shared(first), weights):
        raise FedblendError(f"the server sent another model than the experiment's ('{different[0]}' differs)")
    if task.site.has_file:
        check_model(weights)
    return task.setup.tied(first | weights)


def _start(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """Return the first weights of training: the round's, sent now or with the request to share, or the client's own.

    ``None`` where they were sent before and are gone. Raises :class:`FedblendError` where its own are gone.
    """
    if fields["begins"] == Start.ROUND:
        return _in_order(task, tensors)
    if fields["begins"] == Start.SHARED:
        kept = task.memory.recall("model", str(task.round))
        return None if kept is None else _in_order(task, kept)
    if fields["mark"] is None:
        return task.setup.weights()
    return _own_weights(task, fields["mark"])


def _own_weights(task: ClientTask, mark: str) -> dict[str, torch.Tensor]:
    weights = task.setup.weights()
    own = {name: weights[name] for name in task.setup.frozen} | _recall(task, "own", mark)
    _require_form(own, weights, f"its own weights of round {round_of_mark(mark)} are")
    return {name: own[name] for name in weights}


def _require_form(kept: Tensors, like: Tensors, what: str) -> None:
    if fault := fault_of(kept, like):
        raise FedblendError(f"{what} not of this experiment: {fault}; begin a new run")


def _pool(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> Pool | str | None:
    """Return the client's pool to mix with, or the name of what it received earlier and no longer has."""
    sharing = task.setup.experiment.method.sharing
    if fields["pool"] is None:
        return None
    owners = _owners(fields["owners"])
    if sharing.plan.to != "clients":
        return _made_here(task, sharing, owners)
    sent = strip_prefix("pool/", tensors)
    if sent:
        task.memory.keep("pool", fields["pool"], sent)
    table = sent or task.memory.recall("pool", fields["pool"])
    return "pool" if table is None else Pool(table, owners)


def _owners(runs: Any) -> np.ndarray:
    # Entries of a group of masked sites have the owner -1.
    if any(entries < 0 for _, entries in runs) or sum(entries for _, entries in runs) > MAX_ENTRIES:
        raise FedblendError(f"owners of a pool that are none: {brief(runs)}; valid: [client, entries] for each run")
    return np.repeat(*np.array(runs, np.int64).reshape(-1, 2).T)


def runs_of(owner: np.ndarray) -> list[list[int]]:
    """Encode the owners of a pool's entries, int64 [n], as [owner, entries] for each run of equal owners.

    >>> runs_of(np.array([0, 0, 2]))
    [[0, 2], [2, 1]]
    """
    first = np.flatnonzero(np.diff(owner, prepend=owner[:1] - 1))
    return np.stack([owner[first], np.diff(first, append=len(owner))], 1).tolist()


def _made_here(task: ClientTask, sharing: Sharing, owners: np.ndarray) -> Pool:
    """Return the pool of a sharing that sends nothing: the client's own entries, or entries without anybody's samples.

    The latter (the control with noise) can be made anywhere, for any owner.
    """
    if sharing.plan.to == "own":
        if task.client not in owners:
            return gather({})
        made_in = task.memory.mark("shared")
        # A server that goes on from an older checkpoint does not have what was made after it.
        kept = task.memory.recall("shared", made_in) if made_in is not None and int(made_in) <= task.round else None
        if kept is None:
            raise FedblendError(f"it no longer has its own data to mix with ({LASTS}); begin a new run")
        return gather({task.client: kept})
    made = ((owner, shared(task, task.setup.weights(), owner, 0)) for owner in np.unique(owners).tolist())
    return gather({owner: payload for owner, payload in made if payload is not None})
