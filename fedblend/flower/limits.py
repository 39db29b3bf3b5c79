"""What a site refuses of a server's requests: simulated conduct, kinds of payload, rounds, unscheduled sharing, noise.

A server sends the experiment with every message. So a site checks the experiment, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.protection import Mechanism
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.privacy_facts import clients_keep
from fedblend.flower.audit import AuditLog
from fedblend.flower.site import LEFT_AS, MOST_ROUNDS, MOST_SCORES, RefusedByPolicy, Site

SIMULATION_ONLY = {
    "adversary": "a site that sends a corrupted upload can leave another site's model alone in a sum",
    "channel": "a real network loses messages by itself, and a simulated loss makes sites share again",
    "arrival": "a site's data change when the site changes them",
    "slow": "a real site is slow by itself, and the federation has a deadline",
    "fraction": "a server that chooses a few of a site's samples can rebuild them",
}
"""Fields of an experiment that sites with a site file refuse unless they have their default, and why."""

OWN_DATA_ONLY = ("arrival", "slow", "fraction")
"""Fields of these that a site without data of its own accepts: it trains on the experiment's data, for trials."""

MOST_HELD_OUT = 0.5
"""Largest sum of ``holdout`` and ``validation.clients`` that sites with data of their own accept: a server that leaves
few samples can rebuild them.
"""

AT_SITES = (
    *("name", "seed", "rounds", "unsafe", "data", "scale", "partition", "holdout", "model", "precision", "protection"),
    *("metrics", "validation.clients", "validation.server"),
    *("evaluate_model", "policy.min_mean", "method.name", "method.label", "method.sharing", "method.objective"),
    *("method.terms", "method.personal", "method.upload", "method.stateful_clients", "method.aggregator"),
    *("method.server_step", "train.cohort", "train.epochs", "train.steps", "train.batch_size"),
    *("train.last_batch", "train.lr"),
    *("train.lr_decay", "train.momentum", "train.weight_decay", "train.clip_norm", "train.accumulate", "train.augment"),
    *("train.schedule", "train.schedule_in_round", "train.optimizer", "train.optimizer_state"),
)
"""Fields that sites follow, within what their site files allow."""

AT_SERVER = (
    *("eval_every", "eval_samples", "convergence_tol", "compute_seconds", "target", "start", "delta", "min_uploads"),
    *("target_metric", "stop_at_target", "validation.metric", "selection"),
    *("checkpoint_every", "callbacks", "engine", "stack", "ranks", "memory_format", "device", "cuda_graphs"),
)
"""Fields that sites do not read: the server's own work, and how a simulation computes."""

NOT_AGREED = ("name", "method.name", "method.label", "data", *(field for field in AT_SERVER if field != "start"))
"""Fields that a digest of an experiment leaves out: names, the server's own data, and what sites do not read. The
digest has ``start``, on which the first weights depend.
"""

MOST_DRAWN = 5 * 10**7  # Samples of all batches of one training that a site accepts: it keeps one number for each
MOST_ALL_ROUNDS = 10**6  # Rounds of an experiment that a site accepts
LEAST_MULTIPLIER = 0.5  # Least `multiplier` of means, where they have one: epsilon is then about 15
MOST_TENSORS = 2000  # Trained tensors of a model that a site builds: building takes a while for each


def check_simulated(experiment: Experiment, own_data: bool) -> None:
    """Raise :class:`RefusedByPolicy` for a field that sites, with data of their own or without, refuse."""
    default = _default_experiment()
    for field, reason in SIMULATION_ONLY.items():
        if (own_data or field not in OWN_DATA_ONLY) and getattr(experiment, field) != getattr(default, field):
            raise RefusedByPolicy(
                f"{field}: real sites refuse this field of simulations: {reason}; valid: leave it out"
            )


@functools.cache
def _default_experiment() -> Experiment:
    return Experiment(data="digits", partition={"name": "iid", "clients": 1})


def check_experiment(site: Site, experiment: Experiment) -> None:
    """Raise :class:`RefusedByPolicy` if a site with a site file refuses an experiment, whatever is requested."""
    if not site.has_file:
        return
    check_simulated(experiment, site.data is not None)
    method, name = experiment.method, experiment.method.aggregator.name
    masked = method.aggregator.works_on == "sums"
    if masked and getattr(method.objective, "exclude_own", False):
        raise RefusedByPolicy(
            "method.objective.exclude_own: the server says whose entries are whose. It could have all sites but one "
            f"train on entries that it knows, and subtract their models from the sum of '{name}'; valid: false"
        )
    if masked and (clients_keep(experiment) or method.sharing.plan.to == "own"):
        raise RefusedByPolicy(
            f"method.aggregator: '{name}' with a method whose clients keep something for later rounds: a server could "
            "have all sites but one keep what fixes their models, and subtract these from the sum; valid: another "
            "aggregator, or a method whose clients keep nothing"
        )
    kept = experiment.holdout + experiment.validation.clients
    if site.data is not None and kept > MOST_HELD_OUT:
        field = "holdout and validation.clients" if experiment.validation.clients else "holdout"
        raise RefusedByPolicy(
            f"{field}: {kept:g}: real sites train on half of their samples or more; valid: 0 to {MOST_HELD_OUT:g}"
        )


def agreed_digest(experiment: Experiment) -> str:
    """Return the digest of all that sites do in an experiment, as ``agreed`` of a site file has it."""
    table = as_table(experiment)
    for field in NOT_AGREED:
        outer, _, last = field.rpartition(".")
        (table.get(outer, {}) if outer else table).pop(last, None)
    return f"sha256:{hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()}"


def check_agreed(site: Site, experiment: Experiment) -> None:
    """Raise :class:`RefusedByPolicy` if the site's owner has agreed to another experiment."""
    if site.agreed is not None and (found := agreed_digest(experiment)) != site.agreed:
        raise RefusedByPolicy(
            f"this experiment is {found}, and this site takes part in {site.agreed} only (agreed in its site file)"
        )


def check_work(site: Site, experiment: Experiment, samples: int) -> None:
    """Raise :class:`RefusedByPolicy` if a training on so many samples is longer than the site file allows."""
    train = experiment.train
    passes, batches = "train.steps" if train.steps else "train.epochs", train.batches_of(samples)
    drawn = batches * train.batch_size if train.steps else samples * train.epochs
    for field, number, most, what in (
        (passes, batches, site.max_steps, "batches in one training (max_steps in its site file)"),
        (f"{passes} and train.batch_size", drawn, MOST_DRAWN, "samples in the batches of one training"),
        ("rounds", experiment.rounds, MOST_ALL_ROUNDS, "rounds"),
    ):
        if site.has_file and number > most:
            raise RefusedByPolicy(f"{field}: this makes {number:,} {what}; valid: {most:,} at most")


@contextmanager
def bounded_model(site: Site) -> Iterator[None]:
    """Inside, building a model that is larger than the site file allows raises :class:`RefusedByPolicy`.

    PyTorch calls the check for each new tensor. A model of fedblend's is built on the device "meta" first, without
    numbers (:func:`fedblend.experiment.make_setup.require_model_memory`).
    """
    tensors, numbers = Counter[str](), Counter[str]()

    def add(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            tensors[tensor.device.type] += 1
            numbers[tensor.device.type] += tensor.numel()
        for counts, what, most in (
            (numbers, "numbers (max_weights in its site file)", site.max_weights),
            (tensors, "trained tensors", MOST_TENSORS),
        ):
            if site.has_file and max(counts.values(), default=0) > most:
                raise RefusedByPolicy(f"model: it has more than {most:,} {what}; valid: a smaller one")

    hook = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def bounded_seconds(site: Site, model: nn.Module) -> Iterator[None]:
    """Inside, a call of ``model`` after ``max_seconds`` of the site file raises :class:`RefusedByPolicy`."""
    end = time.monotonic() + site.max_seconds
    most = f"{site.max_seconds:g} seconds (max_seconds in its site file)"

    def check_time(*_: Any) -> None:
        if site.has_file and time.monotonic() > end:
            raise RefusedByPolicy(f"the work of one message takes more than {most}")

    hook = model.register_forward_pre_hook(check_time)
    try:
        yield
    finally:
        hook.remove()


BOUNDED = {"answers": ("max_answers", 2, math.inf), "scores": ("max_scores", 4, MOST_SCORES)}
"""Kinds of payload whose number over all runs a site file bounds: the field that does, its default in `rounds`, and the
most of that default.
"""


def used_limits(site: Site, record: AuditLog) -> dict[str, tuple[int, int]]:
    """Return how much of each limit over all runs is used, and the limit, by its field in the site file."""
    used = {"rounds": (len(record.rounds_trained()), site.rounds), "sharings": (record.times_shared(), site.sharings)}
    return used | {field: (record.times_sent(kind), most_sent(site, kind)) for kind, (field, *_) in BOUNDED.items()}


def most_sent(site: Site, kind: str) -> int:
    """Return how many payloads of a kind of :data:`BOUNDED` a site sends at most, over all runs."""
    field, each, limit = BOUNDED[kind]
    return int(getattr(site, field) or min(each * site.rounds, limit))


def check_kind(site: Site, kind: str, record: AuditLog, trained: bool = False) -> None:
    """Raise :class:`RefusedByPolicy` if the site's policy forbids to send this; ``trained`` for what training made."""
    if kind not in site.allow:
        where = "allow in its site file" if site.has_file else "it has no site file; allow in its --node-config"
        before = f". Version 0.2 let them out as '{LEFT_AS[kind]}'" if kind in LEFT_AS else ""
        through = kind in PAYLOAD_KINDS and PAYLOAD_KINDS[kind].through_model
        why = f". The server's model makes them of samples, so that they may tell of single ones{before}"
        raise RefusedByPolicy(
            f"this site's policy lets no {kind} out ({where}: {', '.join(site.allow)}){why if through else ''}"
        )
    if kind in BOUNDED:
        field, each, limit = BOUNDED[kind]
        if (sent := record.times_sent(kind)) >= most_sent(site, kind):
            raise RefusedByPolicy(
                f"this site has sent {sent} {kind} in all runs, and sends no more ({field} in its file); default: "
                f"{each} times its rounds{'' if limit == math.inf else f', {limit} at most'}"
            )
    if kind == "local-loss" and (sent := record.times_sent(kind)) >= site.rounds:
        raise RefusedByPolicy(f"this site has sent {sent} losses in all runs, and sends no more (rounds in its file)")
    if trained and (rounds := len(record.rounds_trained())) >= site.rounds:
        where = f"rounds in its site file; default: {MOST_ROUNDS}"
        raise RefusedByPolicy(f"this site has trained in {rounds} rounds, and takes part in no more ({where})")


def check_schedule(experiment: Experiment, round: int) -> None:
    """Raise :class:`RefusedByPolicy` if an experiment's clients do not share in this round, counted from 0.

    They share again where data arrive (``refresh``), or where a channel loses what they share.
    """
    sharing = experiment.method.sharing
    refreshes = sharing.refresh is not None and experiment.arrival is not None
    again = (refreshes or experiment.channel.loses) and not sharing.plan.after_training
    rounds = max(1, experiment.rounds)
    if not sharing.plan.active:
        raise RefusedByPolicy("this experiment's clients share nothing (method.sharing)")
    if not (0 <= round < rounds and (again or sharing.shares_in(round, rounds))):
        due = [one + 1 for one in range(rounds) if again or sharing.shares_in(one, rounds)]
        when = f"rounds {due[0]} to {due[-1]}" if len(due) > 1 else f"round {due[0]} only"
        raise RefusedByPolicy(f"this experiment's clients share in {when}, not in round {round + 1} (method.sharing)")


def check_training(experiment: Experiment, round: int) -> None:
    """Raise :class:`RefusedByPolicy` if an experiment's clients do not train in this round, counted from 0."""
    if not (0 <= round < max(1, experiment.rounds) and experiment.method.upload.trains_in(round)):
        raise RefusedByPolicy(f"this experiment's clients do not train in round {round + 1} of {experiment.rounds}")


def check_steps(site: Site, experiment: Experiment, samples: int) -> None:
    """Raise :class:`RefusedByPolicy` if means by label would tell of the few samples that move the model.

    The server's seed says which samples are in a step. ``samples`` are those of a site with data of its own.
    """
    upload, train = experiment.method.upload, experiment.train
    if site.data is None or upload.content not in ("outputs", "embeddings"):
        return
    means = "mean outputs" if upload.content == "outputs" else upload.bytes_kind
    if train.steps is not None:
        raise RefusedByPolicy(
            f"train.steps: steps draw samples by the server's seed, and {means} of many draws tell of each sample; "
            f"valid: leave it out, so that {means} cover all samples of a site alike (train.epochs)"
        )
    if train.schedule_in_round is not None:
        raise RefusedByPolicy(
            f"train.schedule_in_round: '{train.schedule_in_round.name}': where rates differ within a round, {means} "
            "tell of the samples of some steps; valid: leave it out (train.schedule changes the rate between rounds)"
        )
    if train.last_batch == "drop" and samples > train.batch_size and samples % train.batch_size:
        raise RefusedByPolicy(
            f"train.last_batch: 'drop' leaves other samples out in each epoch, by the server's seed, and {means} then "
            "tell of these; valid: keep or merge"
        )
    step = train.batch_size * train.accumulate
    rest = samples % step if samples > step else 0
    # A merged rest of the samples is part of the batch before it.
    fewest = rest if rest >= (train.batch_size if train.last_batch == "merge" else 1) else step
    if fewest < site.min_mean:
        raise RefusedByPolicy(
            f"train.batch_size: {train.batch_size}: of {samples} samples a step would be of {fewest}, and {means} tell "
            f"of these; valid: a size with which each step of an epoch is of {site.min_mean} samples or more (min_mean "
            f"in its file; train.accumulate counts), such as {samples}"
        )


def check_held(site: Site, record: AuditLog, kept: tuple[int, int], samples: str) -> None:
    """Raise :class:`RefusedByPolicy` if scores of other samples than before reveal single ones.

    ``kept`` are the numbers of samples that are held out, and kept for validation. Of two sets of held-out samples the
    smaller is part of the larger. The difference of their scores is the score of the samples that are in one of them
    only. Sets for validation are not parts of each other, so that there is one. ``samples`` is a digest of all samples
    of the site.
    """
    held, validated = kept
    for part in (part.split(" ") for part in record.parts_sent("scores") if part.endswith(samples)):
        before, validated_before = int(part[0]), int(part[1])
        if (validated and validated_before and validated != validated_before) or (
            (validated or validated_before) and before != held
        ):
            raise RefusedByPolicy(
                f"validation: it holds out {held} samples and keeps {validated} for validation, and {before} and "
                f"{validated_before} earlier: scores of both would tell of samples that are in one set only"
            )
        if 0 < abs(before - held) < site.min_mean:
            raise RefusedByPolicy(
                f"holdout: it holds out {held} samples, and {before} earlier: the difference would tell of "
                f"{abs(before - held)}, and it tells of {site.min_mean} or more together (min_mean in its file)"
            )


def check_noise(site: Site, kind: str, experiment: Experiment, shared: bool = False) -> None:
    """Raise :class:`RefusedByPolicy` if a payload leaves with less noise than ``min_noise`` of the site file.

    ``shared`` is true for what a sharing makes, also where it leaves masked. Keys depend on no sample.
    """
    method, noise = experiment.method, PAYLOAD_KINDS[kind].noise
    if kind == "keys":
        return
    mechanisms: dict[str, Any] = {}
    if shared:
        if site.has_file and 0 < (found := getattr(method.sharing, "multiplier", 0)) < LEAST_MULTIPLIER:
            raise RefusedByPolicy(
                f"method.sharing.multiplier: {found:g}: with it samples are cut to the bounds of the server's scale "
                "before they are averaged, and so little noise hides none that is beyond them; valid: 0 (not cut), or "
                f"{LEAST_MULTIPLIER:g} or more"
            )
        mechanisms = {"method.sharing": method.sharing.mechanism()}
    elif noise == "protection":
        mechanisms = {"protection": experiment.protection.mechanism()}
        mechanisms |= {} if site.protection is None else {"protection in its site file": site.protection.mechanism()}
    check_mechanisms(site, mechanisms)


def check_mechanisms(site: Site, mechanisms: Mapping[str, Any]) -> None:
    """Raise :class:`RefusedByPolicy` if none of the noises on a payload, by field, reaches the site's ``min_noise``.

    Each is a :class:`Mechanism`, or the reason why there is none.
    """
    if site.min_noise is None:
        return
    words = []
    for name, mechanism in mechanisms.items():
        text = str(mechanism)
        if isinstance(mechanism, Mechanism):
            text = "its noise is added at the server" if mechanism.at_server else f"{mechanism.multiplier:g}"
            if not mechanism.at_server and mechanism.multiplier >= site.min_noise:
                return
        words.append(f"{name}: {text}")
    found = "; ".join(words)
    raise RefusedByPolicy(
        f"this site sends only what has noise of {site.min_noise:g} or more times the largest change that it hides "
        f"(min_noise in its site file); here: {found or 'nothing adds noise to it'}"
    )
