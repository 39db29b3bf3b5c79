"""At the server of a Flower app of the user's own: a strategy that wraps any Flower strategy and adds a method."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import nn

from fedblend.core.errors import FedblendError, brief, legible
from fedblend.core.random import stream
from fedblend.core.server_step import ModelSpec, ServerContext
from fedblend.core.sharing import Payload, Pool, gather
from fedblend.core.trees import digest_of
from fedblend.core.upload import fault_of, form_fault
from fedblend.experiment.parts import dump
from fedblend.flower.app.inputs import Inputs, is_number
from fedblend.flower.app.supported import supported_method
from fedblend.flower.messages import SHARE_QUERY, attach, detach, fault_of_number, from_record, to_record
from fedblend.flower.sites import error_text, is_sample_count
from fedblend.methods.aggregators.mean import as_stored

log = logging.getLogger("flwr")


class Strategy(FlowerStrategy):
    """A Flower strategy that wraps another (``FedAvg()``, ``FedAdam()``, one of your own) and adds a method.

    The wrapped strategy ``inner`` samples nodes, aggregates and evaluates. This strategy

    - requests what the method shares (FedMix's means) from all connected nodes once, before the first round, and sends
      each node the shared data that it lacks with a round's message;
    - sends the objective and its terms, for :func:`blended_loss`;
    - applies the server step to the aggregate (AggEnhance, FedAdam).

    ``method`` is a preset's name or a table, as in an experiment file
    (:func:`~fedblend.flower.app.supported.supported_method`). A server step needs ``model``, the network, and ``lr``,
    the learning rate on points, unless the method has one. ``seed`` keys all random streams. ``min_mean`` is the fewest
    samples that a mean may cover. ``timeout`` is the number of seconds in which nodes must share.

    Shared data and what a server step keeps (AggEnhance's points, FedAdam's moments) exist as long as the object:
    Flower's strategies begin at round 1 and cannot resume. Raises :class:`FedblendError` for a method that is not
    supported, and for missing or invalid arguments.
    """

    def __init__(
        self,
        inner: FlowerStrategy,
        method: Any,
        inputs: Inputs,
        *,
        model: nn.Module | None = None,
        lr: float | None = None,
        seed: int = 0,
        min_mean: int = 2,
        timeout: float = 600.0,
    ) -> None:
        _require_valid(inner, inputs, model, lr, seed, min_mean, timeout)
        self.inner, self.method, self.inputs = inner, supported_method(method), inputs
        self.lr, self.seed, self.min_mean, self.timeout = lr, seed, min_mean, timeout
        self.model = None if model is None else copy.deepcopy(model).eval()
        """The network in evaluation mode; the user's own keeps its mode."""
        self.pool: Pool | None = None
        self.state: dict[str, torch.Tensor] = {}
        self._start: dict[str, torch.Tensor] = {}
        self._pool_digest: str | None = None
        self._pool_owners: dict[int, int] = {}  # Owner number in the pool of each node that shared
        self._has_pool: set[int] = set()  # Nodes that have received the pool
        if self.method.server_step.active:
            no_rate = getattr(self.method.server_step, "lr", None) is None
            if self.model is None or (lr is None and no_rate):
                what, given = (" and a learning rate", ", lr=...") if no_rate else ("", "")
                needs = f"the server step '{self.method.server_step.name}' needs the network{what}"
                raise FedblendError(f"{needs}: give Strategy(..., model=...{given})")
            _require_fitting(self.model, inputs)
            self.method.server_step.require_possible(ModelSpec(**self._model_spec(self.model)))

    def summary(self) -> None:
        """Log the method and the wrapped strategy."""
        log.info("\t├──> fedblend: %s", self.method.name)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages with the method added; request shared data before the first round."""
        # The wrapped strategy waits until enough nodes are connected, so it is called first.
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._start = from_record(arrays)
        like = self.model.state_dict() if self.model is not None else {}
        if self.method.server_step.active and (fault := form_fault(self._start, like)):
            raise FedblendError(f"Strategy: model: its tensors are not those of the strategy's first arrays: {fault}")
        if self.method.sharing.plan.active and self.pool is None:
            self._share(grid)
        return [self._add_method(message, server_round) for message in messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the wrapped strategy's aggregate after the server step."""
        replies = list(replies)
        succeeded = {reply.metadata.src_node_id: not reply.has_error() for reply in replies}
        # A node that failed may have lost the pool, and receives it again.
        self._has_pool = {node for node in self._has_pool | succeeded.keys() if succeeded.get(node, True)}
        aggregate, metrics = self.inner.aggregate_train(server_round, replies)
        if aggregate is not None and self.method.server_step.active:
            aggregate = self._refined(server_round, aggregate, replies)
        return aggregate, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def _share(self, grid: Grid) -> None:
        sharing = self.method.sharing
        fields = {"sharing": dump(sharing), "min_mean": self.min_mean, "seed": self.seed}
        nodes = sorted(grid.get_node_ids())
        requests = [Message(attach(RecordDict(), fields), node, f"query.{SHARE_QUERY}", group_id="0") for node in nodes]
        payloads: dict[int, Payload] = {}
        faults = dict.fromkeys(nodes, f"no answer within {self.timeout:g} seconds")
        for reply in grid.send_and_receive(requests, timeout=self.timeout):
            node = reply.metadata.src_node_id
            payload, fault = self._read_shared(reply)
            faults.pop(node, None)
            if fault:
                faults[node] = fault
            elif payload:
                payloads[node] = payload
        for node, fault in faults.items():
            log.warning("fedblend: node %s shares nothing: %s", node, fault)
        if not payloads:
            why = "; ".join(sorted(set(faults.values()))) or "too few samples"
            raise FedblendError(f"no node shares anything: {why}")
        self._pool_owners = {node: owner for owner, node in enumerate(sorted(payloads))}
        entries = gather({self._pool_owners[node]: payload for node, payload in payloads.items()})
        self.pool = sharing.pool(entries, stream(self.seed, "pool"))
        self._pool_digest, self._has_pool = digest_of(self.pool.tensors), set()
        log.info("fedblend: %s entries shared by %s of %s nodes", len(self.pool), len(payloads), len(nodes))

    def _read_shared(self, reply: Message) -> tuple[Payload, str]:
        """Return a node's payload, empty where the node has too few samples, and its fault, empty where it is valid."""
        if reply.has_error():
            return {}, error_text(reply)
        try:
            fields, payload = detach(reply.content)
        except FedblendError as error:
            return {}, str(error)
        if not payload:
            return {}, ""
        samples, x = (fields or {}).get("samples"), payload.get("x")
        rows = len(x) if x is not None and x.dim() else 0
        if not is_sample_count(samples):
            return {}, "it states no valid number of its samples"
        if fault := fault_of_number(payload, samples, self.method.sharing.most_entries(samples, self.min_mean)):
            return {}, fault
        if not rows:
            return {}, "it sent no entries"
        like = {"x": torch.zeros(rows, *self.inputs.shape), "y": torch.zeros(rows, self.inputs.outputs)}
        spec = ModelSpec(**self._model_spec(nn.Identity() if self.model is None else self.model))
        return payload, fault_of(payload, like) or self.method.sharing.fault(payload, samples, spec) or ""

    def _add_method(self, message: Message, server_round: int) -> Message:
        """Return the wrapped strategy's message with the method added, and the pool where the node lacks it."""
        node = message.metadata.dst_node_id
        owner = self._pool_owners.get(node)
        own = [] if self.pool is None or owner is None else np.flatnonzero(self.pool.owner == owner).tolist()
        fields = {
            "objective": dump(self.method.objective),
            "terms": [dump(term) for term in self.method.terms],
            "round": server_round - 1,
            "seed": self.seed,
            "pool": self._pool_digest,
            "own": [own[0] if own else 0, len(own)],
        }
        lacks_pool = self.pool is not None and node not in self._has_pool
        pool = to_record(self.pool.tensors) if self.pool is not None and lacks_pool else None
        content, like = attach(message.content, fields, pool), message.metadata
        return Message(content, node, like.message_type, ttl=like.ttl, group_id=like.group_id)

    def _refined(self, server_round: int, aggregate: ArrayRecord, replies: list[Message]) -> ArrayRecord:
        """Return the aggregate after the server step, which reads the valid uploads only."""
        assert self.model is not None
        like = self.model.state_dict()
        weights = {name: as_stored(tensor, like[name].dtype) for name, tensor in from_record(aggregate).items()}
        uploads: dict[int, dict[str, torch.Tensor]] = {}
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            records = [] if reply.has_error() else list(reply.content.array_records.values())
            if len(records) == 1 and not fault_of(upload := from_record(records[0]), like):
                uploads[len(uploads)] = upload
        step, spec = self.method.server_step, self._model_spec(self.model)
        state = self.state or step.init_server_state(ModelSpec(**spec), self._start)
        server = ServerContext(
            **spec,
            round=server_round - 1,
            lr=self.lr if self.lr is not None else step.lr,
            rng=stream(self.seed, "server", server_round - 1),
            query=lambda question: list(step.respond(uploads, question, ModelSpec(**spec)).values()),
            state=state,
            start=self._start,
        )
        refined, self.state = step.refine(weights, server)
        return to_record(refined)

    def _model_spec(self, model: nn.Module) -> dict[str, Any]:
        return {
            "model": model,
            "trained": [name for name, p in model.named_parameters() if p.requires_grad],
            "shape": self.inputs.shape,
            "scale": self.inputs.scale,
            "task": self.inputs.task,
        }


def _require_valid(inner: Any, inputs: Any, model: Any, lr: Any, seed: Any, min_mean: Any, timeout: Any) -> None:
    network = "a torch.nn.Module such as Net(), or None"
    strategy = "a strategy of Flower, such as FedAvg(); the method comes second"
    valid = {
        "inner": (inner, isinstance(inner, FlowerStrategy), strategy),
        "inputs": (inputs, isinstance(inputs, Inputs), "Inputs(shape=..., outputs=...)"),
        "model": (model, model is None or isinstance(model, nn.Module), network),
        "lr": (lr, lr is None or is_number(lr, 0), "a number above 0"),
        "seed": (seed, type(seed) is int and seed >= 0, "a whole number from 0 up"),
        "min_mean": (min_mean, type(min_mean) is int and min_mean >= 2, "2 or more, so that no single samples leave"),
        "timeout": (timeout, is_number(timeout, 0), "a number of seconds above 0"),
    }
    for field, (value, fits, expected) in valid.items():
        if not fits:
            raise FedblendError(f"Strategy: {field}: {brief(value)} is not valid: {expected}")


def _require_fitting(model: nn.Module, inputs: Inputs) -> None:
    device = next((tensor.device for tensor in model.state_dict().values()), None)
    try:
        with torch.no_grad():
            made = str(list(model(torch.zeros(1, *inputs.shape, device=device)).shape))
    except Exception as error:  # the user's network chooses which
        made = legible(f"an error: {error}")
    if made != str([1, inputs.outputs]):
        raise FedblendError(
            f"Strategy: model: inputs of shape {[1, *inputs.shape]} give {made}; valid: a network whose outputs are of "
            f"shape {[1, inputs.outputs]} (Inputs: shape, outputs)"
        )
