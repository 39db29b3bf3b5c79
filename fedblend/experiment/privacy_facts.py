"""Privacy of an experiment's parts as plain data, which a run directory keeps: raw samples, and noise.

Commands that read a run need these facts, and neither import nor build the run's parts.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fedblend.core.engine import client_parts
from fedblend.core.objective import ClientPart
from fedblend.core.protection import Mechanism
from fedblend.core.sharing import hides
from fedblend.experiment.checks import sends_raw_samples
from fedblend.experiment.config import Experiment
from fedblend.methods.protections import NoProtection


def privacy_facts(experiment: Experiment) -> dict[str, Any]:
    """The facts of a run about privacy.

    ``raw_samples``: whether raw samples leave clients. ``noise``: :func:`noise_facts`, where anything protects
    uploads or shared data, such as clipping, noise or secure sums: reports then have an epsilon or the reason for none.
    """
    method = experiment.method
    size = getattr(method.sharing, "samples_per_mean", None)
    # The last group of a client, or of a class, may then be of one sample.
    single = method.sharing.plan.leaves and size is not None and experiment.policy.min_mean == 1
    facts: dict[str, Any] = {"raw_samples": single or any(map(sends_raw_samples, (method.sharing, method.server_step)))}
    protects = not isinstance(experiment.protection, NoProtection) or hides(method.sharing)
    sums = method.aggregator.works_on == "sums" or method.sharing.plan.who == "groups"
    return facts | ({"noise": noise_facts(experiment)} if protects or sums else {})


def noise_facts(experiment: Experiment) -> dict[str, dict[str, Any] | str]:
    """The noise on each kind of payload, "weights" and "means", or why it gives no (epsilon, delta).

    The noise is a table of the fields of :class:`Mechanism`, and ``keeps``: whether secret cohorts hide nothing more,
    because clients keep something on which their later uploads depend, or cohorts are not drawn uniformly. "means" is
    missing where nothing is shared.
    """
    noises = {"weights": _weights_noise(experiment), "means": _means_noise(experiment)}
    keeps = clients_keep(experiment) or experiment.selection.by != "chance"
    return {
        kind: asdict(noise) | {"keeps": keeps} if isinstance(noise, Mechanism) else noise
        for kind, noise in noises.items()
        if noise
    }


def clients_keep(experiment: Experiment) -> bool:
    """Whether clients keep something from round to round on which their uploads depend.

    Such an upload also depends on earlier cohorts, and no proof covers what drawing these in secret would gain.
    """
    method = experiment.method
    parts = client_parts(method).values()
    return (
        experiment.begins_at_clients
        or experiment.train.optimizer_state == "keep"
        or method.personal.keeps == "layers"
        or any(type(part).init_client_state is not ClientPart.init_client_state for part in parts)
    )


def _weights_noise(experiment: Experiment) -> Mechanism | str:
    """The noise on uploads, or why it gives no (epsilon, delta)."""
    noise, method, selection = experiment.protection.mechanism(), experiment.method, experiment.selection
    if isinstance(experiment.protection, NoProtection) and method.aggregator.works_on == "sums":
        return "the server receives exact sums of uploads, to which no noise is added"
    if isinstance(noise, str):
        return noise
    step, server, shared = method.server_step, method.sharing.server, _means_noise(experiment)
    late = experiment.slow is not None and experiment.slow.late == "next-round"
    at_server, sized = noise.at_server, "noise at the server is sized for"
    plain = f'{sized} a plain mean of uploads; method.aggregator = {{name = "mean", by = "clients"}} is one'
    clipped = f"{sized} a sum of clipped updates, and adversaries' updates are not clipped (adversary)"
    reasons = (
        (step.works_on == "raw", f"the server step '{step.name}' uses raw samples"),
        (server is not None, f"the server trains on the samples of client {server} without noise (method.sharing)"),
        (selection.by_losses, f"losses without noise decide which clients take part (selection '{selection.name}')"),
        (late, "late uploads count in later rounds, for which no guarantee is proven here (slow.late)"),
        (isinstance(shared, str) and shared, f"the model is trained on shared data, and {shared}"),
        (at_server and not method.aggregator.is_plain_mean, plain),
        (at_server and experiment.adversary.share, clipped),
        (at_server and step.uses_uploads, f"the server step '{step.name}' uses uploads before noise is added to them"),
    )
    return next((reason for holds, reason in reasons if holds), noise)


def _means_noise(experiment: Experiment) -> Mechanism | str:
    """The noise on shared data, or why it gives no (epsilon, delta); "" where nothing is shared."""
    sharing = experiment.method.sharing
    return sharing.mechanism() if sharing.plan.leaves else ""
