"""At the server: a strategy around any of Flower's, with which its clients and its aggregate follow a method."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import dump
from fedblend.core.server_step import ModelSpec, ServerContext
from fedblend.core.sharing import Payload, Pool, gather
from fedblend.core.upload import fault_of
from fedblend.flower.app.fitting import fitting
from fedblend.flower.app.inputs import Inputs
from fedblend.flower.app.words import SHARE, put, take, tensors_of
from fedblend.flower.audit import digest_of
from fedblend.flower.messages import arrays
from fedblend.flower.sites import read_error
from fedblend.methods.aggregators.mean import as_stored

log = logging.getLogger("flwr")


class Strategy(FlowerStrategy):
    """A Flower strategy that wraps another (``FedAvg()``, ``FedAdam()``, one of your own) and adds a method.

    ``method`` is a preset's name or a table, as in an experiment file; those that do not fit are refused with a reason
    (:func:`~fedblend.flower.app.fitting.fitting`). The wrapped strategy draws nodes, aggregates, evaluates. This one

    - asks all connected nodes once, before the first round, for what the method shares (FedMix's means), and sends
      nodes with a round's message what they do not have yet;
    - sends the objective and its terms along, for :func:`blended_loss`;
    - lets the server step work on the aggregate (AggEnhance), which needs ``model``, the network, and ``lr``, the
      learning rate on points, unless the method names one.

    ``seed`` keys all of its random choices; ``min_mean`` is the fewest samples that a mean may cover. ``timeout`` are
    the seconds in which nodes must share. What it has beside the model (what was shared, AggEnhance's points) lives as
    long as the object: Flower's strategies begin at round 1 and know of no resuming. Raises :class:`FedblendError`.
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
        self.inner, self.method, self.inputs = inner, fitting(method), inputs
        self.model, self.lr, self.seed, self.min_mean, self.timeout = model, lr, seed, min_mean, timeout
        self.pool: Pool | None = None
        self.state: dict[str, torch.Tensor] = {}
        self._start: dict[str, torch.Tensor] = {}
        self._mark: str | None = None
        self._places: dict[int, int] = {}
        self._have: set[int] = set()
        if min_mean < 2:
            raise FedblendError(f"min_mean: {min_mean} would let single samples leave as 'means'; valid: 2 or more")
        if self.method.server_step.active:
            if model is None or (lr is None and self.method.server_step.lr is None):
                raise FedblendError(
                    f"the server step '{self.method.server_step.name}' needs the network and a learning rate: give "
                    "Strategy(..., model=..., lr=...)"
                )
            self.method.server_step.require_possible(ModelSpec(**self._known(model)))

    def summary(self) -> None:
        """Log what is wrapped, and the method."""
        log.info("\t├──> fedblend: %s", self.method.name)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages with the method beside; before the first, nodes are asked to share."""
        # First, since it waits until enough nodes are connected.
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._start = tensors_of(arrays)
        if self.method.sharing.active and self.pool is None:
            self._share(grid)
        return [self._with_method(message, server_round) for message in messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's aggregate, refined by the server step."""
        replies = list(replies)
        answered = {reply.metadata.src_node_id: not reply.has_error() for reply in replies}
        # Who failed may have lost what it was sent: it gets that again.
        self._have = {node for node in self._have if answered.get(node, True)}
        self._have |= {node for node, well in answered.items() if well}
        aggregate, metrics = self.inner.aggregate_train(server_round, replies)
        if aggregate is not None and self.method.server_step.active:
            aggregate = self._refined(server_round, aggregate, replies)
        return aggregate, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The wrapped strategy's."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def _share(self, grid: Grid) -> None:
        """Ask all nodes that are connected for what the method shares."""
        sharing = self.method.sharing
        words = {"sharing": dump(sharing), "min_mean": self.min_mean, "seed": self.seed}
        nodes = sorted(grid.get_node_ids())
        asked = [Message(put(RecordDict(), words), node, f"query.{SHARE}", group_id="0") for node in nodes]
        given: dict[int, Payload] = {}
        faults = dict.fromkeys(nodes, f"no answer within {self.timeout:g} seconds")
        for reply in grid.send_and_receive(asked, timeout=self.timeout):
            node = reply.metadata.src_node_id
            payload, fault = self._payload_of(reply)
            faults.pop(node, None)
            if fault:
                faults[node] = fault
            elif payload:
                given[node] = payload
        for node, fault in faults.items():
            log.warning("fedblend: node %s shares nothing: %s", node, fault)
        if not given:
            raise FedblendError(
                f"no node shares anything: {'; '.join(sorted(set(faults.values()))) or 'too few samples'}"
            )
        self._places = {node: place for place, node in enumerate(sorted(given))}
        entries = gather({self._places[node]: payload for node, payload in given.items()})
        self.pool = sharing.pool(entries, stream(self.seed, "pool"))
        self._mark, self._have = digest_of(self.pool.tensors), set()
        log.info("fedblend: %s entries shared by %s of %s nodes", len(self.pool), len(given), len(nodes))

    def _payload_of(self, reply: Message) -> tuple[Payload, str]:
        """What a node shared, or what is wrong with it; nothing where it has too few samples."""
        if reply.has_error():
            return {}, read_error(reply)
        try:
            _, payload = take(reply.content)
        except FedblendError as error:
            return {}, str(error)
        if not payload:
            return {}, ""
        rows = len(payload.get("x", ()))
        like = {"x": torch.zeros(rows, *self.inputs.shape), "y": torch.zeros(rows, self.inputs.outputs)}
        return payload, (fault_of(payload, like) or "") if rows else "it sent no entries"

    def _with_method(self, message: Message, server_round: int) -> Message:
        """A message of the wrapped strategy's, with what its node does not know yet."""
        node = message.metadata.dst_node_id
        place = self._places.get(node, -1)
        own = np.flatnonzero(self.pool.owner == place) if self.pool is not None and place >= 0 else np.empty(0, int)
        words = {
            "objective": dump(self.method.objective),
            "terms": [dump(term) for term in self.method.terms],
            "round": server_round - 1,
            "seed": self.seed,
            "pool": self._mark,
            "own": [int(own[0]) if len(own) else 0, len(own)],
        }
        lacks = self.pool is not None and node not in self._have
        content = put(message.content, words, arrays(self.pool.tensors) if self.pool is not None and lacks else None)
        told = message.metadata
        return Message(content, node, told.message_type, ttl=told.ttl, group_id=told.group_id)

    def _refined(self, server_round: int, aggregate: ArrayRecord, replies: list[Message]) -> ArrayRecord:
        """The aggregate after the server step, which looks at the uploads that are sound."""
        assert self.model is not None
        like = self.model.state_dict()
        made = {name: as_stored(tensor, like[name].dtype) for name, tensor in tensors_of(aggregate).items()}
        uploads: dict[int, dict[str, torch.Tensor]] = {}
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            tables = [] if reply.has_error() else list(reply.content.array_records.values())
            if len(tables) == 1 and not fault_of(upload := tensors_of(tables[0]), like):
                uploads[len(uploads)] = upload
        step, known = self.method.server_step, self._known(self.model)
        server = ServerContext(
            **known,
            round=server_round - 1,
            lr=self.lr if self.lr is not None else step.lr,
            rng=stream(self.seed, "server", server_round - 1),
            query=lambda question: list(step.respond(uploads, question, ModelSpec(**known)).values()),
            state=self.state,
            start=self._start,
        )
        weights, self.state = step.refine(made, server)
        return arrays(weights)

    def _known(self, model: nn.Module) -> dict[str, Any]:
        return {
            "model": model.eval(),
            "trained": [name for name, p in model.named_parameters() if p.requires_grad],
            "shape": self.inputs.shape,
            "scale": self.inputs.scale,
            "task": self.inputs.task,
        }
