"""Which methods fit into a Flower app of the user's own, and why others do not."""

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

ELSEWHERE = "run the whole experiment over Flower instead: fedblend federation app"


def fitting(spec: Any) -> Method:
    """A method from a preset's name or a table, as in an experiment file. Raises :class:`FedblendError` if it is none.

    What fits: models as uploads; any objective that is one loss a batch, with or without means that are shared once;
    terms on weights; AggEnhance at the server. The aggregator is the strategy's that is wrapped.
    """
    try:
        method = Method.model_validate(spec)
    except pydantic.ValidationError as error:
        raise FedblendError(explain(error, "method")) from None
    why = (
        _of_upload(method) or of_sharing(method.sharing) or _of_objective(method) or _of_server_step(method.server_step)
    )
    if why:
        raise FedblendError(f"method '{method.name}' does not fit into an app of your own: {why}; {ELSEWHERE}")
    return method


def of_sharing(sharing: Sharing) -> str:
    """Why a sharing does not fit; empty where it does."""
    name = sharing.name
    if not sharing.active:
        return ""
    if sharing.unsafe:
        return f"the sharing '{name}' gives raw samples away"
    if sharing.for_server or not sharing.leaves_client:
        return f"what '{name}' makes does not go out to other clients, and nothing else is done with it here"
    if sharing.secure_aggregated:
        return f"'{name}' masks what is shared in several exchanges, and a strategy asks once"
    if sharing.each_round or sharing.refresh is not None:
        return f"'{name}' shares again while training goes on, and a strategy asks once"
    return ""


def _of_upload(method: Method) -> str:
    if not isinstance(method.upload, Model) or method.upload.from_round > 1 or method.stateful_clients:
        return (
            f"its clients send '{method.upload.name}' or do not train in every round; Flower's strategies want models"
        )
    if not isinstance(method.aggregator, WeightedMean) or method.aggregator != WeightedMean():
        return f"the aggregator '{method.aggregator.name}' has no place: the strategy that is wrapped aggregates"
    return ""


def _of_objective(method: Method) -> str:
    objective = method.objective
    if objective.breaks_privacy:
        return f"the objective '{objective.name}' needs raw samples"
    if len(objective.phases()) > 1:
        return f"the objective '{objective.name}' makes two steps a batch, and your loop makes one"
    if objective.needs and not method.sharing.active:
        return f"the objective '{objective.name}' needs what no sharing gives: {', '.join(objective.needs)}"
    if method.personal.active:
        return f"'{method.personal.name}' trains a second model at each client, and your loop trains one"
    kept = ("init_client_state", "init_server_state")
    if any(
        getattr(type(part), hook) is not getattr(ClientPart, hook)
        for part in (objective, *method.terms)
        for hook in kept
    ):
        return "a part of its loss keeps something at clients from round to round"
    if any(term.uses_outputs for term in method.terms):
        return "a term of its loss needs mean outputs of all clients"
    return ""


def _of_server_step(step: Any) -> str:
    if not step.active:
        return ""
    if step.breaks_privacy:
        return f"the server step '{step.name}' needs raw samples"
    if step.queries_clients:
        return f"the server step '{step.name}' puts questions to clients in the middle of a round"
    if not step.looks_at_uploads:
        return f"the server step '{step.name}' works on what clients share with the server"
    return ""
