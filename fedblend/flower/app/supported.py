"""Which methods run in a Flower app of the user's own, and why other methods do not."""

from __future__ import annotations

from typing import Any

import pydantic

from fedblend.core.errors import FedblendError
from fedblend.core.objective import ClientPart
from fedblend.core.registry import explain
from fedblend.core.sharing import Sharing
from fedblend.experiment.fields import Method
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.uploads import Model


def supported_method(spec: Any) -> Method:
    """Return the method of a preset's name or a table, as in an experiment file.

    Supported are: models as uploads; any objective that is one loss a batch, with or without means that clients share
    once; terms on weights; server steps that need only the uploads and the aggregate. The wrapped strategy is the
    aggregator. Raises :class:`FedblendError` for any other method, and for an invalid one.
    """
    try:
        method = Method.model_validate(spec)
    except pydantic.ValidationError as error:
        raise FedblendError(explain(error, "method")) from None
    why = (
        _fault_of_upload(method)
        or fault_of_sharing(method.sharing)
        or _fault_of_objective(method)
        or _fault_of_server_step(method.server_step)
        or _fault_of_aggregator(method)
    )
    if why:
        raise FedblendError(
            f"method '{method.name}' does not run in an app of your own: {why}; run the whole experiment over Flower "
            "instead: fedblend federation app"
        )
    return method


def fault_of_sharing(sharing: Sharing) -> str:
    """Return why a sharing is not supported; empty where it is."""
    name, plan = sharing.name, sharing.plan
    if not plan.active:
        return ""
    if plan.form == "raw":
        return f"the sharing '{name}' sends raw samples"
    if plan.form == "seeds" or plan.to != "clients" or not plan.leaves:
        return f"a strategy sends shared data to other clients and uses them for nothing else, unlike '{name}'"
    if sharing.secure_aggregated:
        return f"'{name}' masks shared data in several exchanges, and a strategy has one exchange"
    if plan.repeats or sharing.refresh is not None:
        return f"'{name}' shares again during training, and a strategy shares once"
    return ""


def _fault_of_upload(method: Method) -> str:
    if not isinstance(method.upload, Model) or method.upload.from_round > 1 or method.stateful_clients:
        return (
            f"its clients send '{method.upload.name}' or do not train in every round; Flower's strategies need models"
        )
    return ""


def _fault_of_aggregator(method: Method) -> str:
    if not isinstance(method.aggregator, WeightedMean) or method.aggregator != WeightedMean():
        return f"the aggregator '{method.aggregator.name}' would not be used: the wrapped strategy aggregates"
    return ""


def _fault_of_objective(method: Method) -> str:
    objective = method.objective
    if objective.counts_labels:
        return f"the objective '{objective.name}' needs a client's samples by class, and your loop gives single batches"
    if len(objective.phases()) > 1:
        return f"the objective '{objective.name}' makes two steps a batch, and your loop makes one"
    if other := sorted(set(objective.needs) - {"x", "y"}):
        return f"the objective '{objective.name}' needs {', '.join(other)}, and a strategy shares inputs and targets"
    if objective.needs and not method.sharing.plan.active:
        return f"the objective '{objective.name}' needs data that no sharing provides: {', '.join(objective.needs)}"
    if method.personal.keeps:
        return f"'{method.personal.name}' keeps a model or layers at each client, and your loop has one whole model"
    hooks = ("init_client_state", "init_server_state")
    parts = (objective, *method.terms)
    if any(getattr(type(part), hook) is not getattr(ClientPart, hook) for part in parts for hook in hooks):
        return "a part of its loss keeps state at clients from round to round"
    if any(term.uses_outputs for term in method.terms):
        return "a term of its loss needs mean outputs of all clients"
    return ""


def _fault_of_server_step(step: Any) -> str:
    if not step.active:
        return ""
    if step.breaks_privacy:
        return f"the server step '{step.name}' needs raw samples"
    if step.works_on == "answers":
        return f"the server step '{step.name}' sends queries to clients during a round"
    if step.reads:
        return f"the server step '{step.name}' trains on data that clients share with the server"
    return ""
