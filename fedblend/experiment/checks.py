"""Rules that fields of an experiment must keep together.

Rules reject combinations that cannot work, would send raw samples without ``unsafe = true``, or would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fedblend.core.engine import client_parts
from fedblend.core.errors import or_valid
from fedblend.core.objective import ClientPart, Personal, with_bases
from fedblend.experiment.fields import Train

if TYPE_CHECKING:
    from fedblend.experiment.config import Experiment


def faults(e: Experiment) -> Iterator[str]:
    """Yield a message for each rule that is broken: the field, its value and valid values."""
    groups = (_uploads, _evaluation, _raw_samples, _sharing, _sums, _training, _selection, _slow, _client_parts)
    for rules in (*groups, _metrics, _numbers):
        yield from rules(e)


def _uploads(e: Experiment) -> Iterator[str]:
    """Without model uploads, nothing may change, aggregate or compare models, and the payload must be used."""
    upload, step, method = e.method.upload, e.method.server_step, e.method
    none = f"method.upload '{upload.name}' sends none"
    if not upload.is_model:
        for field, part in (("protection", e.protection), ("adversary", e.adversary)):
            if part.name != "none":
                yield f"{field}: '{part.name}' changes models, but {none}; valid: none"
        if method.aggregator.name != "mean":
            yield f"method.aggregator: '{method.aggregator.name}' aggregates models, but {none}; valid: mean"
        if not (step.active or method.stateful_clients):
            valid = "model, a method.server_step, or method.stateful_clients = true"
            yield f"method.upload: '{upload.name}' sends no models: the server's would never change; valid: {valid}"
    elif method.stateful_clients:
        valid = 'method.upload = "outputs"'
        yield f"method.stateful_clients: true keeps clients on their own weights, not on uploaded ones; valid: {valid}"
    for term in method.terms:
        if term.outputs_kind not in ("", upload.bytes_kind):
            needs = f"needs mean outputs, which method.upload '{upload.name}' does not send"
            yield f"method.terms: '{term.name}' {needs}; valid: upload = \"{term.outputs_kind}\""
    if e.convergence_tol is not None and upload.content == "nothing" and not step.active:
        yield f"convergence_tol: {e.convergence_tol:g}, but the server's model never changes; valid: no convergence_tol"


def _evaluation(e: Experiment) -> Iterator[str]:
    """The model to evaluate must exist, and the samples too."""
    stateful, personal, field = e.method.stateful_clients, e.method.personal, f"evaluate_model: '{e.evaluate_model}'"
    if e.evaluate_model == "each" and not (stateful or personal.keeps):
        needs = "needs clients that keep their own weights (method.stateful_clients) or models (method.personal)"
        yield f"{field} {needs}; valid: server, device"
    if e.evaluate_model not in (None, "each") and personal.keeps == "layers":
        why = f"because '{personal.name}' keeps layers at each client"
        yield f"{field} has no whole model to evaluate, {why}; valid: each"
    if e.evaluate_model == "server" and stateful:
        why = "clients keep their own weights (method.stateful_clients)"
        yield f"{field} has no model to evaluate: {why}; valid: device, each"
    if e.evaluate_model == "each" and e.validation.server:
        yield "validation.server: evaluate_model 'each' tests clients' own models; valid: validation.clients"


def _raw_samples(e: Experiment) -> Iterator[str]:
    """Raw samples leave a client only with ``unsafe = true``."""
    if e.unsafe:
        return
    sharing = e.method.sharing
    for part in (sharing, e.method.server_step):
        if sends_raw_samples(part):
            remedy = "set unsafe = true to run it as an upper bound"
            yield f"unsafe: false does not allow '{part.name}', which sends raw samples; {remedy}"
    if getattr(sharing, "samples_per_mean", None) == 1:
        valid = '2 or more, or "all" (or unsafe = true and policy.min_mean = 1)'
        yield f"method.sharing.samples_per_mean: 1 would send raw samples as 'means'; valid: {valid}"
    if e.policy.min_mean == 1 and sharing.plan.leaves and sharing.shares_means:
        valid = "2 or more (or unsafe = true)"
        yield f"policy.min_mean: 1 would let a single sample leave a client as a 'mean'; valid: {valid}"


def sends_raw_samples(part: Any) -> bool:
    """Whether a part, or the class of one, sends raw samples to the server or to other clients."""
    needs_raw = getattr(part, "works_on", "") == "raw" or getattr(part, "reads", ()) == ("raw",)
    return bool(needs_raw or getattr(getattr(part, "plan", None), "form", "") == "raw")


FORMS = {
    "inputs": ("the model's inputs", "means"),
    "stored": ("samples as stored", ""),
    "seeds": ("seeds", "mixed-seeds, xor-seeds"),
    "raw": ("raw samples", "raw"),
    "statistics": ("statistics of channels", "channel-statistics"),
    "hidden": ("hidden states", "hidden-means, features"),
    "moments": ("moments of features", "feature-statistics"),
    "sums": ("sums of features", "moments"),
    "nothing": ("nothing", ""),
}
"""What each form of shared entries is, and which sharings have it, for messages."""


def _sharing(e: Experiment) -> Iterator[str]:
    """Shared data must be of a form that the objective or the server step reads, and must arrive."""
    sharing, objective, step = e.method.sharing, e.method.objective, e.method.server_step
    plan, field = sharing.plan, f"method.sharing: '{sharing.name}'"
    form = plan.form if plan.active else "nothing"
    readers = (
        ("objective", objective, objective.reads if objective.needs else ()),
        ("server_step", step, step.reads if plan.active else ()),
    )
    for slot, part, reads in readers:
        if reads and form not in reads:
            told = " or ".join(FORMS[one][0] for one in reads)
            valid = ", ".join(FORMS[one][1] for one in reads if FORMS[one][1])
            yield f"{field} shares {FORMS[form][0]}, but method.{slot} '{part.name}' reads {told}; valid: {valid}"
    if plan.active and not any(reads for _, _, reads in readers):
        neither = f"neither the objective '{objective.name}' nor the server step '{step.name}' reads"
        yield f"{field} shares data that {neither}; valid: none, or one that reads {FORMS[form][0]}"
    if plan.to == "own" and getattr(objective, "exclude_own", False):
        why = f"leaves nothing to mix with, because '{sharing.name}' gives a client only its own data"
        yield f"method.objective.exclude_own: true {why}; valid: false"
    layers = [getattr(part, "layer", None) for part in (sharing, objective)]
    if form == "hidden" and layers[0] != layers[1]:
        both = f"method.sharing.layer: {layers[0]} and method.objective.layer: {layers[1]}"
        yield f"{both} differ; both must name the same layer of hidden states"
    if plan.who == "groups" and e.channel.loses:
        why = f"sums the data that clients share once, but the channel '{e.channel.name}' loses transmissions"
        yield f"{field} {why}; valid: means, or another channel"
    if step.reads and plan.to in ("own", "nobody") and sharing.server is None:
        why = f"trains on shared data, but those of '{sharing.name}' never leave the clients"
        yield f"method.server_step: '{step.name}' {why}; valid: a sharing that reaches the server, such as means"
    if not plan.leaves and (average := getattr(sharing, "server_average", 1)) > 1:
        yield f"method.sharing.server_average: {average}: means of '{sharing.name}' never reach the server; valid: 1"


def _sums(e: Experiment) -> Iterator[str]:
    """A server step that inspects single uploads must get them, and not only a sum."""
    upload, aggregator, step = e.method.upload, e.method.aggregator, e.method.server_step
    if step.uses_uploads and not upload.is_model:
        why = f"works with the clients' models, but method.upload '{upload.name}' sends none"
        yield f"method.server_step: '{step.name}' {why}; valid: model"
    if aggregator.works_on == "sums" and step.works_on == "uploads":
        why = f"needs single uploads, which '{aggregator.name}' hides from the server"
        yield f"method.server_step: '{step.name}' {why}; valid: aggenhance-secure, or another aggregator"


def _training(e: Experiment) -> Iterator[str]:
    """Fields of ``[train]`` must fit the optimiser, and all parts its steps."""
    method, train, optimizer = e.method, e.train, e.train.optimizer
    if train.schedule is not None:
        if train.lr_decay not in (1.0, Train.model_fields["lr_decay"].default):
            yield f"train.lr_decay: {train.lr_decay:g} and train.schedule are both given; give one of them"
        train.schedule.require_over_rounds()
    if train.momentum and optimizer.steps != "sgd":
        yield f"train.momentum: {train.momentum:g} is of SGD, but train.optimizer is '{optimizer.name}'; valid: 0"
    if train.weight_decay and not optimizer.state_keys:
        place = f"give it in the options of train.optimizer '{optimizer.name}'"
        yield f"train.weight_decay: {train.weight_decay:g}: {place}; valid: 0"
    if train.optimizer_state == "keep" and not train.state_keys:
        why, valid = "has no state here that clients keep", "reset, or SGD with momentum, adam or adamw"
        yield f"train.optimizer_state: 'keep', but the optimizer '{optimizer.name}' {why}; valid: {valid}"
    phases = len(method.objective.phases())
    if train.accumulate > 1 and phases > 1:
        why = f"'{method.objective.name}' in method.objective makes several steps for each batch"
        yield f"train.accumulate: {train.accumulate}: {why}; valid: 1"
    if train.accumulate > 1 and method.personal.own_steps(2) is not None:
        why = f"'{method.personal.name}' changes its layers within an epoch, and a group of batches would be for both"
        yield f"train.accumulate: {train.accumulate}: {why}; valid: 1"
    if getattr(e.protection, "on", None) == "gradients" and optimizer.steps != "sgd":
        why = f"'gradients' is noise in units of SGD's learning rate, but train.optimizer is '{optimizer.name}'"
        yield f"protection.on: {why}; valid: another `on`, or sgd"
    method.aggregator.require_training(train, phases, sum(term.proximal_mu for term in method.terms))


def _selection(e: Experiment) -> Iterator[str]:
    """Losses are those of the server's model, which clients must have."""
    stateful = e.method.stateful_clients
    if e.selection.by == "losses" and (stateful or e.method.personal.keeps == "layers"):
        what = "weights (method.stateful_clients)" if stateful else "layers (method.personal)"
        told = f"asks for losses under the server's model, but clients keep {what} of their own"
        yield f"selection: '{e.selection.name}' {told}; valid: uniform, size, loss"


def _slow(e: Experiment) -> Iterator[str]:
    """A deadline needs a clock, and an upload that is put aside for a later round must be a model alone."""
    slow, method, train = e.slow, e.method, e.train
    if slow is None:
        return
    passes = "train.steps" if train.steps else "train.epochs"
    if slow.share and (train.steps or train.epochs) == 1:
        yield f"slow.share: {slow.share:g}, but {passes} is 1, of which there is no part; valid: {passes} of 2 or more"
    if slow.deadline is not None and slow.seconds is None:
        yield f"slow.deadline: {slow.deadline:g}, but slow.seconds does not say how long a batch takes at each client"
    if slow.late != "next-round":
        return
    aggregator, step = method.aggregator, method.server_step
    needs = {
        f"method.upload '{method.upload.name}' sends no models": not method.upload.is_model,
        f"method.aggregator '{aggregator.name}' knows a masked sum only": aggregator.works_on == "sums",
        f"method.aggregator '{aggregator.name}' counts the steps of one round": aggregator.counts_steps,
        f"method.server_step '{step.name}' works with single uploads": step.uses_uploads,
        "parts of the method send more beside the model": any(one.sends for one in client_parts(method).values()),
    }
    for why in (why for why, holds in needs.items() if holds):
        yield f"slow.late: 'next-round', but {why}; valid: partial, drop"


def _client_parts(e: Experiment) -> Iterator[str]:
    """Parts that keep something at clients: what they need of other fields, and what covers models only."""
    method, train = e.method, e.train
    objective, upload, personal, step = method.objective, method.upload, method.personal, method.server_step
    for base in with_bases(objective)[1:]:
        if (type(base).init_server_state, type(base).init_client_state) != _NO_STATE:
            why = f"keeps a state from round to round, which '{objective.name}' does not pass on"
            yield f"method.objective.base: '{base.name}' {why}; valid: another base"
        base.require_possible(method, train)
    if objective.tracks and type(personal).objective is not Personal.objective:
        why = f"takes several steps inside each step, but the state of '{objective.name}' is renewed once a step"
        yield f"method.personal: '{personal.name}' {why}; valid: another personal"
    for slot, part in client_parts(method).items():
        part.require_possible(method, train)
        where = "method.objective" if slot == "objective" else "method.terms"
        if part.broadcasts and e.channel.loses:
            why = f"loses downlinks, but '{part.name}' needs the server's state in every round"
            yield f"channel: '{e.channel.name}' {why}; valid: ideal"
        if not part.sends:
            continue
        if not upload.is_model:
            yield f"{where}: '{part.name}' goes with models, but method.upload '{upload.name}' sends none"
        if method.aggregator.works_on == "sums":
            why = f"method.aggregator '{method.aggregator.name}' would not mask"
            yield f"{where}: '{part.name}' sends more beside the model, which {why}; valid: another aggregator"
        if e.protection.name != "none":
            why = f"changes models only, but '{part.name}' in {where} sends more beside them"
            yield f"protection: '{e.protection.name}' {why}; valid: none"
    if personal.keeps and not (upload.is_model and upload.trains):
        why = f"trains beside a global model, but method.upload '{upload.name}' sends none"
        yield f"method.personal: '{personal.name}' {why}; valid: upload = \"model\""
    if personal.keeps == "layers" and (step.works_on != "aggregate" or step.reads):
        why = f"trains a whole model at the server, but '{personal.name}' keeps layers at each client"
        yield f"method.server_step: '{step.name}' {why}; valid: none, or an optimiser such as fedadam"


_NO_STATE = ClientPart.init_server_state, ClientPart.init_client_state


def _metrics(e: Experiment) -> Iterator[str]:
    """Metrics must have different names, and those that are named must be recorded."""
    labels = [metric.label for metric in e.metrics]
    for i, label in enumerate(labels):
        if label in ("loss", "accuracy", *labels[:i]):
            yield f"metrics[{i}]: '{label}' is recorded already; leave it out, or give it another title"
    valid = ["accuracy", "loss", *labels]
    for field, name in (("target_metric", e.target_metric), ("validation.metric", e.validation.metric)):
        if name is not None and name not in valid:
            yield f"{field}: '{name}' is not recorded{or_valid(name, [*valid, 'another metric that `metrics` lists'])}"
    if e.validation.metric is not None and not e.validation.active:
        why = "but no samples are kept for validation; give validation.server or validation.clients"
        yield f"validation.metric: '{e.validation.metric}', {why}"
    if e.target is not None and e.target_metric == "accuracy" and not 0 <= e.target <= 1:
        yield f"target: {e.target:g} is not valid: an accuracy is a share, from 0 to 1"
    if e.stop_at_target and e.target is None:
        yield "stop_at_target: true, but there is no target to reach; give target"


def _numbers(e: Experiment) -> Iterator[str]:
    """Two numbers must leave room for each other."""
    if e.holdout + e.validation.clients >= 1:
        both = f"validation.clients: {e.validation.clients:g} and holdout: {e.holdout:g}"
        yield f"{both} leave no samples to train on; valid: below 1 together"
    if e.min_uploads > e.train.cohort:
        both = f"min_uploads: {e.min_uploads} is more than train.cohort: {e.train.cohort}"
        yield f"{both}; no round could have enough uploads"
