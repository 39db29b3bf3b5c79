"""Checks of fields of an experiment against each other.

Each check raises ``ValueError`` with the field, its value and valid values. Checks reject combinations that cannot
work, that would send raw samples without ``unsafe = true``, or that would have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedblend.core.engine import client_parts
from fedblend.core.errors import or_valid
from fedblend.core.objective import ClientPart, Personal, with_bases
from fedblend.experiment.fields import Method, Policy, Train, Validation


def check_metrics(
    metrics: Sequence[Any], validation: Validation, target: float | None, target_metric: str, stops: bool
) -> None:
    """Metrics must have different names, and those that are named must be recorded."""
    labels = [metric.label for metric in metrics]
    for i, label in enumerate(labels):
        if label in ("loss", "accuracy", *labels[:i]):
            raise ValueError(f"metrics[{i}]: '{label}' is recorded already; leave it out, or give it another title")
    valid = ["accuracy", "loss", *labels]
    for field, name in (("target_metric", target_metric), ("validation.metric", validation.metric)):
        if name is not None and name not in valid:
            raise ValueError(
                f"{field}: '{name}' is not recorded{or_valid(name, [*valid, 'another metric that `metrics` lists'])}"
            )
    if validation.metric is not None and not validation.active:
        raise ValueError(
            f"validation.metric: '{validation.metric}', but no samples are kept for validation; give "
            "validation.server or validation.clients"
        )
    if target is not None and target_metric == "accuracy" and not 0 <= target <= 1:
        raise ValueError(f"target: {target:g} is not valid: an accuracy is a share, from 0 to 1")
    if stops and target is None:
        raise ValueError("stop_at_target: true, but there is no target to reach; give target")


def check_uploads(method: Method, protection: Any, adversary: Any) -> None:
    """Without model uploads, nothing may change or aggregate models, and the payload must be used."""
    upload = method.upload
    if not upload.is_model:
        for field, part in (("protection", protection), ("adversary", adversary)):
            if part.name != "none":
                raise ValueError(
                    f"{field}: '{part.name}' changes models, but method.upload '{upload.name}' sends none; valid: none"
                )
        if method.aggregator.name != "mean":
            raise ValueError(
                f"method.aggregator: '{method.aggregator.name}' aggregates models, but method.upload "
                f"'{upload.name}' sends none; valid: mean"
            )
        if not (method.server_step.active or method.stateful_clients):
            raise ValueError(
                f"method.upload: '{upload.name}' sends no models, so that the server's model would never change; "
                "valid: model, a method.server_step, or method.stateful_clients = true"
            )
    if method.stateful_clients and upload.is_model:
        raise ValueError(
            f"method.stateful_clients: true keeps clients on their own weights, so that no client would use the "
            f"uploaded models (method.upload '{upload.name}'); valid: upload = \"outputs\""
        )
    for term in method.terms:
        if term.uses_outputs and upload.bytes_kind != term.outputs_kind:
            raise ValueError(
                f"method.terms: '{term.name}' needs mean outputs, which method.upload '{upload.name}' does not "
                f'send; valid: upload = "{term.outputs_kind}"'
            )


def check_convergence(method: Method, convergence_tol: float | None) -> None:
    """What is compared from round to round must change."""
    upload = method.upload
    changes = upload.content != "nothing" or method.server_step.active
    if convergence_tol is not None and not changes:
        raise ValueError(
            f"convergence_tol: {convergence_tol:g}, but with method.upload '{upload.name}' and no method.server_step "
            "the server's model never changes; valid: no convergence_tol"
        )


def check_evaluate_model(method: Method, evaluate_model: str | None) -> None:
    """The model to evaluate must exist."""
    if evaluate_model == "each" and not (method.stateful_clients or method.personal.keeps):
        raise ValueError(
            "evaluate_model: 'each' needs clients that keep their own weights (method.stateful_clients) or have "
            "personal models (method.personal); valid: server, device"
        )
    if evaluate_model not in (None, "each") and method.personal.keeps_layers:
        raise ValueError(
            f"evaluate_model: '{evaluate_model}' has no whole model to evaluate, because '{method.personal.name}' "
            "keeps layers at each client; valid: each"
        )
    if evaluate_model == "server" and method.stateful_clients:
        raise ValueError(
            "evaluate_model: 'server' has no model to evaluate where clients keep their own weights "
            "(method.stateful_clients); valid: device, each"
        )


def check_raw_samples(method: Method, policy: Policy, unsafe: bool) -> None:
    """Raw samples leave a client only with ``unsafe = true``."""
    if unsafe:
        return
    sharing = method.sharing
    for part in (sharing, method.server_step):
        if sends_raw_samples(part):
            raise ValueError(
                f"unsafe: false does not allow '{part.name}', which sends raw samples; "
                "set unsafe = true to run it as an upper bound"
            )
    if getattr(sharing, "samples_per_mean", None) == 1:
        raise ValueError(
            "method.sharing.samples_per_mean: 1 would send raw samples as 'means'; "
            'valid: 2 or more, or "all" (or unsafe = true and policy.min_mean = 1)'
        )
    if policy.min_mean == 1 and sharing.plan.leaves and sharing.shares_means:
        raise ValueError(
            "policy.min_mean: 1 would let a single sample leave a client as a 'mean'; valid: 2 or more "
            "(or unsafe = true)"
        )


def sends_raw_samples(part: Any) -> bool:
    """Whether a part, or the class of one, sends raw samples to the server or to other clients."""
    needs_raw = getattr(part, "breaks_privacy", False) or getattr(part, "reads", ()) == ("raw",)
    return bool(needs_raw or getattr(getattr(part, "plan", None), "form", "") == "raw")


FORMS = {
    "inputs": ("the model's inputs", "means"),
    "stored": ("samples as stored", ""),
    "seeds": ("seeds", "mixed-seeds, xor-seeds"),
    "raw": ("raw samples", "raw"),
    "statistics": ("statistics of channels", "channel-statistics"),
    "hidden": ("hidden states", "hidden-means, features"),
    "moments": ("moments of features", "feature-statistics"),
    "nothing": ("nothing", ""),
}
"""What each form of shared entries is, and which sharings have it, for messages."""


def check_sharing(method: Method, channel: Any) -> None:
    """Shared data must be of a form that the objective or the server step reads, and must arrive."""
    sharing, objective, step = method.sharing, method.objective, method.server_step
    plan = sharing.plan
    form = plan.form if plan.active else "nothing"
    readers = {
        "objective": objective.reads if objective.needs else (),
        "server_step": step.reads if plan.active else (),
    }
    for field, reads in readers.items():
        if reads and form not in reads:
            raise ValueError(
                f"method.sharing: '{sharing.name}' shares {FORMS[form][0]}, but method.{field} "
                f"'{getattr(method, field).name}' reads {' or '.join(FORMS[one][0] for one in reads)}; valid: "
                f"{', '.join(filter(None, (FORMS[one][1] for one in reads)))}"
            )
    if plan.active and not any(readers.values()):
        raise ValueError(
            f"method.sharing: '{sharing.name}' shares data that neither the objective '{objective.name}' nor the "
            f"server step '{step.name}' reads; valid: none, or one that reads {FORMS[form][0]}"
        )
    if plan.to == "own" and getattr(objective, "exclude_own", False):
        raise ValueError(
            f"method.objective.exclude_own: true leaves nothing to mix with, because '{sharing.name}' gives a client "
            "only its own data; valid: false"
        )
    if form == "hidden" and getattr(sharing, "layer", None) != getattr(objective, "layer", None):
        raise ValueError(
            f"method.sharing.layer: {getattr(sharing, 'layer', None)} and method.objective.layer: "
            f"{getattr(objective, 'layer', None)} differ; both must name the same layer of hidden states"
        )
    if sharing.secure_aggregated and channel.loses:
        raise ValueError(
            f"method.sharing: '{sharing.name}' sums the data that clients share once, but the channel "
            f"'{channel.name}' loses transmissions; valid: means, or another channel"
        )
    if step.reads and plan.to in ("own", "nobody") and sharing.server is None:
        raise ValueError(
            f"method.server_step: '{step.name}' trains on shared data, but those of '{sharing.name}' never leave the "
            "clients; valid: a sharing that reaches the server, such as means"
        )
    if not plan.leaves and getattr(sharing, "server_average", 1) > 1:
        raise ValueError(
            f"method.sharing.server_average: {sharing.server_average}: means of '{sharing.name}' never reach "
            "the server, which could not average them; valid: 1"
        )


def check_sums(method: Method) -> None:
    """A server step that inspects single uploads must get them, and not only a sum."""
    step = method.server_step
    if step.works_on != "aggregate" and not method.upload.is_model:
        raise ValueError(
            f"method.server_step: '{step.name}' works with the clients' models, but method.upload "
            f"'{method.upload.name}' sends none; valid: model"
        )
    if method.aggregator.secure_aggregated and step.works_on == "uploads":
        raise ValueError(
            f"method.server_step: '{step.name}' needs single uploads, which '{method.aggregator.name}' "
            "hides from the server; valid: aggenhance-secure, or another aggregator"
        )


def check_training(method: Method, train: Train, protection: Any) -> None:
    """Fields of ``[train]`` must fit the optimiser, and objectives and protections its steps."""
    optimizer, default = train.optimizer, Train.model_fields["lr_decay"].default
    if train.schedule is not None:
        if train.lr_decay not in (1.0, default):
            raise ValueError(f"train.lr_decay: {train.lr_decay:g} and train.schedule are both given; give one of them")
        if train.schedule.needs_length:
            raise ValueError(f"train.schedule.length: must be given for '{train.schedule.name}' over rounds")
    if train.momentum and not optimizer.is_sgd:
        raise ValueError(
            f"train.momentum: {train.momentum:g} is of SGD, but train.optimizer is '{optimizer.name}'; valid: 0"
        )
    if train.weight_decay and not optimizer.state_keys:
        raise ValueError(
            f"train.weight_decay: {train.weight_decay:g}: give it in the options of train.optimizer "
            f"'{optimizer.name}'; valid: 0"
        )
    if train.optimizer_state == "keep" and not train.state_keys:
        raise ValueError(
            f"train.optimizer_state: 'keep', but the optimizer '{optimizer.name}' has no state here that clients keep; "
            "valid: reset, or SGD with momentum, adam or adamw"
        )
    if train.accumulate > 1 and len(method.objective.phases()) > 1:
        raise ValueError(
            f"train.accumulate: {train.accumulate}: '{method.objective.name}' in method.objective makes several steps "
            "for each batch; valid: 1"
        )
    if getattr(protection, "on", None) == "gradients" and not train.optimizer.is_sgd:
        raise ValueError(
            "protection.on: 'gradients' is noise in units of the learning rate, by which SGD multiplies gradients, but "
            f"train.optimizer is '{train.optimizer.name}'; valid: another `on`, or sgd"
        )


def _keeps_state(kind: type[ClientPart]) -> bool:
    """Whether a kind of part keeps something from round to round, at the server or at a client."""
    own, none = (kind.init_server_state, kind.init_client_state), ClientPart
    return own != (none.init_server_state, none.init_client_state)


def check_client_parts(method: Method, train: Train, channel: Any, protection: Any) -> None:
    """Parts that keep something at clients: what they need of other fields, and what covers models only."""
    objective = method.objective
    for base in with_bases(objective)[1:]:
        if _keeps_state(type(base)):
            raise ValueError(
                f"method.objective.base: '{base.name}' keeps a state from round to round, which '{objective.name}' "
                "does not pass on; valid: another base"
            )
        base.require_possible(method, train)
    if objective.tracks and type(method.personal).objective is not Personal.objective:
        raise ValueError(
            f"method.personal: '{method.personal.name}' takes several steps inside each step, but '{objective.name}' "
            "in method.objective renews its state once a step; valid: another personal"
        )
    for slot, part in client_parts(method).items():
        part.require_possible(method, train)
        if part.broadcasts and channel.loses:
            raise ValueError(
                f"channel: '{channel.name}' loses downlinks, but '{part.name}' needs the server's state in every "
                "round; valid: ideal"
            )
        if not part.sends:
            continue
        if not part.broadcasts:
            raise ValueError(
                f"method.{slot}: '{part.name}' has sends = True, which needs broadcasts = True: what clients send has "
                "the names and shapes of the table that the server sends"
            )
        where = "method.objective" if slot == "objective" else "method.terms"
        if not method.upload.is_model:
            raise ValueError(
                f"{where}: '{part.name}' goes with models, but method.upload '{method.upload.name}' sends none"
            )
        if method.aggregator.secure_aggregated:
            raise ValueError(
                f"{where}: '{part.name}' sends more beside the model, which method.aggregator "
                f"'{method.aggregator.name}' would not mask; valid: another aggregator"
            )
        if protection.name != "none":
            raise ValueError(
                f"protection: '{protection.name}' changes models only, but '{part.name}' in {where} sends more beside "
                "them; valid: none"
            )
    personal, step = method.personal, method.server_step
    # Until 0.3 prefixes of tensors.
    if personal.keeps not in ("", "layers", "personal"):
        raise ValueError(f"method.personal: '{personal.name}' has keeps = '{personal.keeps}'; valid: layers, personal")
    if personal.keeps and not (method.upload.is_model and method.upload.trains):
        raise ValueError(
            f"method.personal: '{personal.name}' trains beside a global model, but method.upload "
            f"'{method.upload.name}' sends none; valid: upload = \"model\""
        )
    if personal.keeps_layers and (step.works_on != "aggregate" or step.reads or step.breaks_privacy):
        raise ValueError(
            f"method.server_step: '{step.name}' trains a whole model at the server, but '{personal.name}' keeps layers "
            "at each client; valid: none, or an optimiser such as fedadam"
        )


def check_steps(method: Method, train: Train) -> None:
    """Parts that count a client's steps, or divide them between layers: what they need of training."""
    plain = train.optimizer.is_sgd and not train.schedule_in_round and train.accumulate == 1
    if method.aggregator.counts_steps and not (plain and train.optimizer_state == "reset"):
        raise ValueError(
            f"method.aggregator: '{method.aggregator.name}' computes how far the steps of SGD move a client; valid: "
            "train.optimizer sgd with its state reset, without schedule_in_round, accumulate 1"
        )
    inert = not train.momentum and not any(term.proximal_mu for term in method.terms)
    if method.aggregator.counts_steps and len(method.objective.phases()) > 1 and not inert:
        raise ValueError(
            f"method.aggregator: '{method.aggregator.name}' does not know how momentum and proximal terms act in the "
            f"two steps a batch of '{method.objective.name}'; valid: neither of them, or another aggregator"
        )
    personal = method.personal
    if personal.own_steps(2) is not None and train.accumulate > 1:
        raise ValueError(
            f"train.accumulate: {train.accumulate}: '{personal.name}' changes its layers within an epoch, and a group "
            "of batches would be for both; valid: 1"
        )
