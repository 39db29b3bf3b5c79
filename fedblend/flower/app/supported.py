"""Which methods run in a Flower app of the user's own, and why other methods do not."""

from __future__ import annotations

from collections.abc import Iterator
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
    if why := next(_faults(method), ""):
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
    if sharing.plan.who == "groups":
        return f"'{name}' masks shared data in several exchanges, and a strategy has one exchange"
    if plan.repeats or sharing.refresh is not None:
        return f"'{name}' shares again during training, and a strategy shares once"
    return ""


def _faults(method: Method) -> Iterator[str]:
    upload, objective, step, aggregator = method.upload, method.objective, method.server_step, method.aggregator
    if not isinstance(upload, Model) or upload.from_round > 1 or method.stateful_clients:
        yield f"its clients send '{upload.name}' or do not train in every round; Flower's strategies need models"
    if why := fault_of_sharing(method.sharing):
        yield why
    if objective.counts_labels:
        yield f"the objective '{objective.name}' needs a client's samples by class, and your loop gives single batches"
    if len(objective.phases()) > 1:
        yield f"the objective '{objective.name}' makes two steps a batch, and your loop makes one"
    if other := sorted(set(objective.needs) - {"x", "y"}):
        yield f"the objective '{objective.name}' needs {', '.join(other)}, and a strategy shares inputs and targets"
    if objective.needs and not method.sharing.plan.active:
        yield f"the objective '{objective.name}' needs data that no sharing provides: {', '.join(objective.needs)}"
    elif objective.needs and method.sharing.plan.form not in objective.reads:
        yield f"the objective '{objective.name}' needs {objective.reads[0]} samples, unlike '{method.sharing.name}'"
    if method.personal.keeps:
        yield f"'{method.personal.name}' keeps a model or layers at each client, and your loop has one whole model"
    parts, hooks = (objective, *method.terms), ("init_client_state", "init_server_state")
    if any(getattr(type(part), hook) is not getattr(ClientPart, hook) for part in parts for hook in hooks):
        yield "a part of its loss keeps state at clients from round to round"
    if any(term.outputs_kind for term in method.terms):
        yield "a term of its loss needs mean outputs of all clients"
    if step.active and step.works_on == "raw":
        yield f"the server step '{step.name}' needs raw samples"
    if step.active and step.works_on == "answers":
        yield f"the server step '{step.name}' sends queries to clients during a round"
    if step.active and step.reads:
        yield f"the server step '{step.name}' trains on data that clients share with the server"
    if not isinstance(aggregator, WeightedMean) or aggregator != WeightedMean():
        yield f"the aggregator '{aggregator.name}' would not be used: the wrapped strategy aggregates"
