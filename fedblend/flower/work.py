"""What a site does for its own client: share, train, answer, score. Plain functions of what it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch

from fedblend.core.engine import TrainTask, first_client_state, first_server_state
from fedblend.core.errors import FedblendError
from fedblend.core.protection import Mechanism
from fedblend.core.random import stream
from fedblend.core.setup import model_spec
from fedblend.core.sharing import Payload, Pool, Request, Sharing, gather
from fedblend.core.trees import add_prefix, strip_prefix
from fedblend.core.upload import fault_of
from fedblend.flower.client_task import ClientTask
from fedblend.flower.messages import MessageContent, Tensors
from fedblend.flower.secure_aggregation.site import masked_mean, masked_update, secure_aggregator
from fedblend.flower.site import RefusedByPolicy

SINGLE = ("seeds", "raw")
"""Kinds of payload in which each entry is made of one sample, or of two."""

LACKS = "lacks"
"""The word with which a client says that it no longer has what it was sent before (its SuperNode was restarted)."""


def share(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> MessageContent:
    """What the client shares. Of what does not travel only the number of entries is told, and the client keeps it."""
    sharing = here.setup.experiment.method.sharing
    if sharing.each_round:
        here.memory.keep("model", str(here.round), tensors)
    weights = _in_order(here, tensors) if sharing.each_round else here.setup.weights()
    payload = shared(here, weights, here.client, here.round, request_of(here, words))
    if payload is None:
        return {"nothing": True}, {}
    _require_few(here, payload)
    if sharing.secure_aggregated:
        return {}, masked_mean(here, payload, words, tensors)
    if sharing.leaves_client:
        return {}, payload
    here.memory.keep("shared", "", payload)
    return {}, {name: t.new_zeros(len(t), 0) for name, t in payload.items()}


def _require_few(here: ClientTask, payload: Payload) -> None:
    """Raise :class:`RefusedByPolicy` for more single samples, mixed or not, than the site's policy gives."""
    most, number = here.site.max_seeds, max(len(tensor) for tensor in payload.values())
    if most is not None and here.setup.experiment.method.sharing.bytes_kind in SINGLE and number > most:
        raise RefusedByPolicy(f"it is asked for {number} seeds, and its policy gives {most} (max_seeds in its file)")


def asked_of(request: Request | None) -> dict[str, Any]:
    """The words of what a server with data of its own asks of one client; none where it asks nothing in particular."""
    if request is None:
        return {}
    return {"request": {"wanted": request.wanted.tolist(), "dummies": request.dummies.tolist()}}


def request_of(here: ClientTask, words: dict[str, Any]) -> Request | None:
    """The request that :func:`asked_of` wrote down. Raises :class:`FedblendError` if it is none, or asks too much."""
    asked = words.get("request")
    if asked is None:
        return None
    classes, most = here.setup.task.outputs, here.site.max_seeds
    wanted, dummies = (asked.get(word) if isinstance(asked, dict) else None for word in ("wanted", "dummies"))
    if not (_whole(wanted) and _whole(dummies) and len(wanted) == classes and max(dummies, default=0) < classes):
        raise FedblendError(f"a request that is none: {asked!r}; valid: numbers for {classes} labels, and labels")
    if most is not None and sum(wanted) > most:
        raise RefusedByPolicy(
            f"it is asked for {sum(wanted)} seeds, and its policy gives {most} (max_seeds in its file)"
        )
    return Request(np.array(wanted, np.int64), np.array(dummies, np.int64))


def _whole(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def shared(
    here: ClientTask, weights: Tensors, owner: int, round: int, request: Request | None = None
) -> Payload | None:
    """What the sharing makes of the client's samples with the random numbers of ``owner``.

    Noise that is to protect samples is drawn from the system's entropy: whoever knows the experiment knows all keyed
    streams, and could take keyed noise off again.
    """
    experiment, engine = here.setup.experiment, here.engine
    minimum = max(1 if experiment.unsafe else experiment.policy.min_mean, here.site.min_mean)
    noisy = hides(experiment.method.sharing)
    rng = np.random.default_rng() if noisy else stream(experiment.seed, "share", round, owner)
    engine.prepare(weights)
    made: Payload | None = experiment.method.sharing.share(engine.local(here.client, here.size, rng, minimum, request))
    return made


def hides(sharing: Sharing) -> bool:
    """Whether a sharing adds noise to what it makes of samples."""
    # An option, not XorSeeds' method of that name.
    sizes = (getattr(sharing, option, 0) for option in ("noise", "multiplier", "offset"))
    return any(isinstance(size, (int, float)) and size > 0 for size in sizes) or isinstance(
        sharing.mechanism(), Mechanism
    )


def train(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> MessageContent:
    """The client's upload after its training, with its samples and its loss; or what it lacks to begin."""
    start = _start(here, words, tensors)
    pool = _pool(here, words, tensors)
    if start is None or isinstance(pool, str):
        return {LACKS: "model" if start is None else pool}, {}
    state = _client_state(here, words, start)
    task = _task(here, words, tensors, start, pool, state)
    (trained,) = here.engine.train(task, [here.client])
    kept = dict(trained.state)
    if here.setup.experiment.method.personal.active:
        (personal,) = here.engine.train(replace(task, personal=True), [here.client])
        kept |= add_prefix("personal/", personal.weights)
    if kept:
        # The server may not receive this round's reply: it then asks for the next round from the same state.
        if words["state"] is not None:
            here.memory.keep("parts-before", words["state"], state)
        here.memory.keep("parts", str(here.round), kept)
    experiment = here.setup.experiment
    if experiment.keeps_client_weights:
        if words["mark"] is not None:
            # The server may not hear of this round: it then asks for the next one from the same weights.
            here.memory.keep("own-before", words["mark"], start)
        here.memory.keep("own", str(here.round), trained.weights)
    if words["begins"] == "own" and protects(here):
        raise FedblendError("it did not hear the round's model, from which its protection clips how far its own moves")
    upload = leaving(here, experiment.method.upload.payload(trained.weights, trained.outputs), start)
    if experiment.method.server_step.looks_at_uploads and experiment.method.server_step.queries_clients:
        here.memory.keep("upload", str(here.round), upload)
    if aggregator := secure_aggregator(here):
        if words["begins"] == "own":
            raise FedblendError("it did not hear the round's model, and cannot tell how far its own has moved from it")
        upload = masked_update(here, aggregator, upload, start, words, tensors)
    if trained.extras and here.site.protection is not None:
        raise FedblendError("its site's protection covers models only, and this method sends more beside them")
    return {"samples": trained.samples, "loss": trained.loss}, upload | add_prefix("extras/", trained.extras)


def _task(
    here: ClientTask, words: dict[str, Any], tensors: Tensors, start: Tensors, pool: Pool | None, state: Tensors
) -> TrainTask:
    """The round's task for this client alone."""
    outputs = strip_prefix("outputs/", tensors)
    kept = dict(state)
    if words["begins"] == "own":
        kept |= add_prefix("weights/", start) | add_prefix("outputs/", outputs)
    server_state = strip_prefix("server/", tensors)
    spec = model_spec(here.setup, here.engine.model)
    like = first_server_state(here.setup.experiment.method, spec, start, broadcast=True)
    if fault := fault_of(server_state, like):
        raise FedblendError(f"what the server sent beside the model cannot be used: {fault}")
    states = {here.client: kept} if kept else {}
    return TrainTask(here.round, start, pool, here.setup.sizes(here.round), outputs, states, server_state)


def _client_state(here: ClientTask, words: dict[str, Any], start: Tensors) -> dict[str, torch.Tensor]:
    """What parts keep at this client: as made before its first round, or as kept at the mark that the server names.

    Raises :class:`FedblendError` where it is gone.
    """
    method, mark = here.setup.experiment.method, words["state"]
    if mark is not None:
        kept = here.memory.recall("parts", mark) or here.memory.recall("parts-before", mark)
        if kept is None:
            raise FedblendError(
                f"it no longer has what the method keeps at it since round {mark} (kept as long as the Flower run and "
                "the SuperNode), and nobody else has it; begin a new run"
            )
        return kept
    spec = model_spec(here.setup, here.engine.model)
    return first_client_state(method, spec, start)


def protects(here: ClientTask) -> bool:
    """Whether the experiment or the site changes the model before it leaves."""
    experiment = here.setup.experiment
    return experiment.method.upload.is_model and (
        experiment.protection.name != "none" or here.site.protection is not None
    )


def leaving(here: ClientTask, payload: dict[str, torch.Tensor], start: Tensors) -> dict[str, torch.Tensor]:
    """The upload as it leaves: with the experiment's protection on it, and then the site's.

    Noise is drawn from the system's entropy, not from the run's streams, which everybody knows.
    """
    experiment, round = here.setup.experiment, here.round
    if here.setup.adversaries[here.client]:
        rng = stream(experiment.seed, "adversary", round, here.client)
        payload = experiment.adversary.corrupt(payload, start, rng)
    else:
        payload = experiment.protection.protect(payload, start, experiment.train.lr_in(round), np.random.default_rng())
    if here.site.protection is None or not experiment.method.upload.is_model:
        return payload
    lr = experiment.train.lr_in(round)
    protected: dict[str, torch.Tensor] = here.site.protection.protect(payload, start, lr, np.random.default_rng())
    return protected


def respond(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> MessageContent:
    """The client's answer to the server step's question about the upload that it has just sent."""
    upload = here.memory.recall("upload", str(here.round))
    if upload is None:
        raise FedblendError("it no longer has its upload (its SuperNode was restarted)")
    known = model_spec(here.setup, here.engine.server_model())
    responses = here.setup.experiment.method.server_step.respond({here.client: upload}, tensors, known)
    return {}, responses[here.client]


def score(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Of the samples that the client holds out (or of all test samples): how many, how many are right, their loss."""
    if words["own"] is not None:
        weights = _kept(here, words["own"])
        if weights is None:
            raise FedblendError(f"it no longer has its weights of round {words['own']}; begin a new run")
    else:
        weights = _in_order(here, tensors)
    if here.site.data is not None and not words["held"]:
        raise RefusedByPolicy(
            "its test samples are its own, and what each of them says of a model stays here; valid: holdout"
        )
    made = here.engine.score(weights, words["held"])
    if words["held"]:
        mine = here.setup.population.owners(held=True) == here.client
        right = None if made.right is None else made.right[mine]
        return {"right": None if right is None else int(right.sum()), "samples": int(mine.sum())}, {}
    found = {"loss": torch.from_numpy(made.loss)}
    return {}, found | ({} if made.right is None else {"right": torch.from_numpy(made.right)})


def _in_order(here: ClientTask, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The model's tensors among those of a message, in the model's order."""
    weights = strip_prefix("weights/", tensors)
    return {name: weights[name] for name in here.setup.model.state_dict()}


def _start(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """The weights that training begins with: the round's, sent now or with the request to share, or the client's own.

    ``None`` where they were sent before and are gone. Raises :class:`FedblendError` where its own are gone.
    """
    if words["begins"] == "round":
        return _in_order(here, tensors)
    if words["begins"] == "shared":
        kept = here.memory.recall("model", str(here.round))
        return None if kept is None else _in_order(here, kept)
    if words["mark"] is None:
        return here.setup.weights()
    own = _kept(here, words["mark"])
    if own is None:
        raise FedblendError(
            f"it no longer has its own weights of round {words['mark']} (they live as long as the Flower run and the "
            "SuperNode), and nobody else has them; begin a new run"
        )
    return {name: own[name] for name in here.setup.model.state_dict()}


def _kept(here: ClientTask, mark: str) -> dict[str, torch.Tensor] | None:
    return here.memory.recall("own", mark) or here.memory.recall("own-before", mark)


def _pool(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> Pool | str | None:
    """What the client may mix with; the word for what it lacks where that was sent before and is gone."""
    sharing = here.setup.experiment.method.sharing
    if words["pool"] is None:
        return None
    owners = np.repeat(*np.array(words["owners"], np.int64).reshape(-1, 2).T)
    if not sharing.leaves_client:
        return _made_here(here, sharing, owners)
    sent = strip_prefix("pool/", tensors)
    if sent:
        here.memory.keep("pool", words["pool"], sent)
    table = sent or here.memory.recall("pool", words["pool"])
    return "pool" if table is None else Pool(table, owners)


def runs_of(owner: np.ndarray) -> list[list[int]]:
    """The owners of a pool's entries, int64 [n], as [owner, entries] for each run of the same one.

    >>> runs_of(np.array([0, 0, 2]))
    [[0, 2], [2, 1]]
    """
    first = np.flatnonzero(np.diff(owner, prepend=owner[:1] - 1))
    return np.stack([owner[first], np.diff(first, append=len(owner))], 1).tolist()


def _made_here(here: ClientTask, sharing: Sharing, owners: np.ndarray) -> Pool:
    """The pool of a sharing that does not travel: the client's own entries, or those that hold nothing of anyone.

    Entries that a client may use of others, though they never travel, hold nothing of samples (the control with
    noise), so that they can be made anywhere.
    """
    if sharing.own_only:
        kept = here.memory.recall("shared", "")
        return gather({here.client: kept} if kept is not None and here.client in owners else {})
    made = {owner: shared(here, here.setup.weights(), owner, 0) for owner in np.unique(owners).tolist()}
    return gather({owner: payload for owner, payload in made.items() if payload is not None})
