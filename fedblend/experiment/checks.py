"""Fields of an experiment that must agree: a check raises ``ValueError`` that names field, value and what is valid.

They refuse what could not work, what would give raw samples away unasked, and what would do nothing.
"""

from __future__ import annotations

from typing import Any

from fedblend.experiment.fields import Method, Policy


def check_uploads(method: Method, protection: Any, adversary: Any) -> None:
    """Uploads that are no models: nothing may change or combine models, and something must read what is sent."""
    upload = method.upload
    if not upload.is_model:
        for field, made in (("protection", protection), ("adversary", adversary)):
            if made.name != "none":
                raise ValueError(
                    f"{field}: '{made.name}' changes models, but method.upload '{upload.name}' sends none; valid: none"
                )
        if method.aggregator.name != "mean":
            raise ValueError(
                f"method.aggregator: '{method.aggregator.name}' makes one of models, but method.upload "
                f"'{upload.name}' sends none; valid: mean"
            )
        if not (method.server_step.active or method.stateful_clients):
            raise ValueError(
                f"method.upload: '{upload.name}' sends no models, so that the server's would never change; valid: "
                "model, a method.server_step, or method.stateful_clients = true"
            )
    if method.stateful_clients and upload.is_model:
        raise ValueError(
            f"method.stateful_clients: true keeps clients on their own weights, so that a model sent up "
            f"(method.upload '{upload.name}') would come down to nobody; valid: upload = \"outputs\""
        )
    for term in method.terms:
        if term.uses_outputs and upload.bytes_kind != "outputs":
            raise ValueError(
                f"method.terms: '{term.name}' needs mean outputs, which method.upload '{upload.name}' does not "
                'send; valid: upload = "outputs"'
            )


def check_evaluate_model(method: Method, evaluate_model: str | None) -> None:
    """Whose model is evaluated: one that there is."""
    if evaluate_model == "each" and not method.stateful_clients:
        raise ValueError(
            "evaluate_model: 'each' needs clients that keep their own weights (method.stateful_clients); valid: "
            "server, device"
        )
    if evaluate_model == "server" and method.stateful_clients:
        raise ValueError(
            "evaluate_model: 'server' has no model to evaluate where clients keep theirs; valid: device, each"
        )


def check_raw_samples(method: Method, policy: Policy, unsafe: bool) -> None:
    """Raw samples leave a client only where an experiment says that it is ``unsafe``."""
    if unsafe:
        return
    sharing = method.sharing
    for made in (sharing, method.objective, method.server_step):
        if getattr(made, "unsafe", False) or getattr(made, "breaks_privacy", False):
            raise ValueError(
                f"unsafe: false does not allow '{made.name}', which gives raw samples away; "
                "set unsafe = true to run it as an upper bound"
            )
    if getattr(sharing, "samples_per_mean", None) == 1:
        raise ValueError(
            "method.sharing.samples_per_mean: 1 would send raw samples as 'means'; "
            'valid: 2 or more, or "all" (or unsafe = true)'
        )
    if policy.min_mean == 1 and sharing.leaves_client and sharing.bytes_kind == "means":
        raise ValueError(
            "policy.min_mean: 1 would let a single sample leave a client as a 'mean'; valid: 2 or more "
            "(or unsafe = true)"
        )


def check_sharing(method: Method, channel: Any) -> None:
    """What is shared is what somebody reads, and it gets there."""
    sharing, objective, step = method.sharing, method.objective, method.server_step
    if objective.needs and not sharing.active:
        raise ValueError(
            f"method.sharing: '{sharing.name}' gives nothing, but the objective '{objective.name}' needs "
            f"{', '.join(objective.needs)}; valid: means, local-means, noise, hidden-means or raw"
        )
    if sharing.active and not (objective.needs or step.reads_pool):
        raise ValueError(
            f"method.sharing: '{sharing.name}' gives what neither the objective '{objective.name}' nor the server "
            f"step '{step.name}' reads; valid: none, an objective that mixes, or a server step that works on what "
            "clients share (reads_pool)"
        )
    if getattr(sharing, "own_only", False) and getattr(objective, "exclude_own", False):
        raise ValueError(
            f"method.objective.exclude_own: true leaves nothing to mix with, since '{sharing.name}' gives a client "
            "only what is its own; valid: false"
        )
    if getattr(sharing, "layer", None) != getattr(objective, "layer", None):
        raise ValueError(
            f"method.sharing.layer: {getattr(sharing, 'layer', None)} and method.objective.layer: "
            f"{getattr(objective, 'layer', None)} differ; both must name the same layer of hidden states"
        )
    if sharing.secure_aggregated and channel.loses:
        raise ValueError(
            f"method.sharing: '{sharing.name}' sums what clients share once, and the channel '{channel.name}' "
            "loses some of it; valid: means, or another channel"
        )


def check_sums(method: Method) -> None:
    """What the server averages or looks at reaches it, and not only as a sum."""
    sharing, step = method.sharing, method.server_step
    if not sharing.leaves_client and getattr(sharing, "server_average", 1) > 1:
        raise ValueError(
            f"method.sharing.server_average: {sharing.server_average}: means of '{sharing.name}' never reach "
            "the server, which could not average them; valid: 1"
        )
    if method.aggregator.secure_aggregated and step.looks_at_uploads and not step.queries_clients:
        raise ValueError(
            f"method.server_step: '{step.name}' looks at single uploads, which '{method.aggregator.name}' "
            "hides from the server; valid: aggenhance-secure, or another aggregator"
        )
