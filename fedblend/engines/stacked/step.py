"""One training step of K clients as one traced program; every tensor of a client has a leading dimension K."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from fedblend._kernels.lowrank import Rows, Weights
from fedblend._kernels.simplify import changed_in_place, simplify
from fedblend._kernels.tracing import trace
from fedblend.core.context import Batch, Context
from fedblend.core.objective import checked_loss
from fedblend.core.trees import strip_prefix
from fedblend.engines.nets import FunctionalNet
from fedblend.engines.sgd import Gradient, Precision, computing_in
from fedblend.engines.stacked.dropout import Drop
from fedblend.engines.stacked.layers import CannotStack, dropouts
from fedblend.methods.objectives.output_cache import OutputCache

CONTEXT = ("pool", "start", "global_outputs", "client_state", "server_state", "counts")
"""Fields of :class:`fedblend.core.context.Context` with tensors, whose names begin with the field and a slash."""


@dataclass(frozen=True)
class Inputs:
    """The tensors that one step reads; every one has a leading dimension K, except ``shared_tensors``.

    Tensors for the objective's context (:data:`CONTEXT`) are shared by all clients or stacked by client.
    """

    params: list[Weights]
    """Parameters [K, ...] in the order of the model's names; large ones may be low-rank updates."""
    x: torch.Tensor
    """Samples [K, B, ...] as stored, before scaling."""
    y: torch.Tensor
    """Targets [K, B, ...]."""
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)
    """The objective's random numbers of this step [K, ...]."""
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    """Dropout masks [K, ...] in the order of the layers' calls."""
    client_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors for the objective that differ by client [K, ...]."""
    shared_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors for the objective that all clients share."""

    def plain(self, but: Collection[int] = ()) -> Inputs:
        """Return the inputs with low-rank parameters as plain tensors, except those at the positions ``but``."""
        params = [_tensor(p) if i not in but else p for i, p in enumerate(self.params)]
        return replace(self, params=params)

    def tree(self) -> tuple[Any, ...]:
        """Return all tensors as plain containers, in the order of the fields."""
        return (self.params, self.x, self.y, self.drawn, self.masks, self.client_tensors, self.shared_tensors)

    def shapes(self) -> tuple[Any, ...]:
        """Return the shapes that a traced step depends on; those of the parameters follow from the model."""
        tables = (self.drawn, self.masks, self.client_tensors, self.shared_tensors)
        return (self.x.shape, *(t.shape for table in tables for t in table.values()))


@dataclass(frozen=True)
class Step:
    """One phase of an objective, with the terms that are added to it, as a function of stacked tensors."""

    model: nn.Module
    names: list[str]
    phase: Callable[..., torch.Tensor]
    terms: Sequence[Any]
    context: Context
    precision: Precision = "float32"
    watches: bool = False
    tracked: Sequence[str] = ()
    """Names of what the objective keeps at clients, where its steps renew that."""
    counted: Sequence[str] = ()
    """Names of the counts of samples that the objective adds to."""
    noted: list[Drop] | None = None
    """Takes the calls of dropout layers, which then drop nothing."""

    def drops(self, inputs: Inputs) -> list[Drop]:
        """Return the calls of dropout layers in a step on inputs of these shapes, in order."""
        noted: list[Drop] = []
        replace(self, noted=noted)(*inputs.plain().tree())
        return noted

    def _note(self, x: torch.Tensor, p: float) -> torch.Tensor:
        assert self.noted is not None
        self.noted.append((tuple(x.shape), p))
        return torch.ones_like(x)

    def __call__(self, *tree: Any) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Return the gradients [K, ...] by parameter, and a list of detached results.

        A gradient is ``None`` where the phase does not use the parameter. The results are the losses [K] without terms,
        what is ``tracked`` [K, ...] and ``counted`` [K] and, where the step ``watches``, softmax outputs [K, B, C].
        """
        inputs = Inputs(*tree)
        params = [_tensor(p).detach().requires_grad_() for p in inputs.params]
        stacked = (params, *inputs.tree()[1:-1])

        def client_loss(*tensors: Any) -> tuple[torch.Tensor, ...]:
            return self._client_loss(Inputs(*tensors, inputs.shared_tensors))  # type: ignore[call-arg]

        losses, *results = torch.vmap(client_loss)(*stacked)
        gradients: list[torch.Tensor | None] = [*torch.autograd.grad(losses.sum(), params, allow_unused=True)]
        return gradients, [values.detach() for values in results]

    def _client_loss(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return one client's loss with terms, its loss without terms, what is tracked and counted, and outputs if it
        watches.
        """
        weights = dict(zip(self.names, map(_tensor, inputs.params), strict=True))
        masks = iter(inputs.masks.values())
        for layer in dropouts(self.model):
            layer.masks = (lambda x, p: next(masks)) if self.noted is None else self._note
        tables: dict[str, Any] = {
            key: strip_prefix(f"{key}/", {**inputs.shared_tensors, **inputs.client_tensors}) for key in CONTEXT
        }
        context = replace(self.context, **tables)
        batch = Batch(context.scale(inputs.x), inputs.y)
        net, own = OutputCache(FunctionalNet(self.model, weights), batch.x), context.of_part("objective")
        try:
            with computing_in(self.precision, inputs.x.device):
                loss = value = checked_loss(self.phase(net, batch, inputs.drawn, own), "method.objective")
            for slot, term in self.terms:
                loss = loss + checked_loss(
                    term.loss(weights, net, batch, context.of_part(slot)), f"method.terms '{term.name}'"
                )
            outputs = (net.distribution(),) if self.watches else ()
        finally:
            for layer in dropouts(self.model):
                layer.masks = None
        tracked = [own.client_state[name] for name in self.tracked] + [own.counts[name] for name in self.counted]
        return loss, value, *tracked, *outputs

    def trace(self, inputs: Inputs) -> Program:
        """Trace the step for inputs of these shapes, as a flat list of tensor operations.

        The program has no overhead of autograd or vmap. Raises :class:`CannotStack` for a model that changes its own
        weights or buffers.
        """
        graph = trace(self, *inputs.plain().tree())
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        if changed_in_place(graph.graph) - set(placeholders[len(inputs.params) :]):
            # The clients of a stack share its buffers, and inactive clients must not change.
            raise CannotStack("it changes its weights or buffers itself while it trains")
        output_bytes = _output_bytes(graph)  # of all operations, before some are fused
        return Program(graph, output_bytes, simplify(graph))


@dataclass(frozen=True)
class Program:
    """A traced step."""

    graph: torch.fx.GraphModule
    """Its tensor operations."""
    bytes: int
    """Bytes of the outputs of all operations; views are not counted."""
    low_rank: Collection[int] = ()
    """Positions of the parameters that the step reads as low-rank updates."""

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> tuple[list[Gradient], list[torch.Tensor]]:
        """Return the results of :class:`Step`; some gradients are factors of a matrix product."""
        results = self.graph(*tree_leaves(inputs.tree()))
        return list(results[: len(inputs.params)]), list(results[len(inputs.params) :])


def outputs_of(model: nn.Module, names: Sequence[str], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute a model's outputs from its weights, in the order of ``names``, and the inputs as last argument."""
    *values, x = tensors
    outputs: torch.Tensor = functional_call(model, dict(zip(names, values, strict=True)), (x,))
    return outputs


def layer_step(layer: nn.Module, x: torch.Tensor, differentiates_input: bool) -> Callable[[], object]:
    """Return a call that computes a layer for K clients with inputs x [K, B, ...], and its derivatives.

    The derivatives are those by the weights and, if ``differentiates_input``, by the input.
    """
    names = [name for name, _ in layer.named_parameters()]
    weights = [p.detach().expand(len(x), *p.shape).contiguous() for p in layer.parameters()]

    def outputs(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda x, *values: outputs_of(layer, names, *values, x))(x, *weights)

    def step(g: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        wanted = leaves if differentiates_input else leaves[1:]
        result = outputs(*leaves)
        return [result.detach(), *torch.autograd.grad(result, wanted, g)] if wanted else [result.detach()]

    given = (torch.ones_like(outputs(x, *weights).detach()), x, *weights)
    graph = trace(step, *given)
    simplify(graph, factors=False)
    return torch.no_grad()(lambda: graph(*given))


def _tensor(weights: Weights) -> torch.Tensor:
    return weights.tensor() if isinstance(weights, Rows) else weights


def _output_bytes(graph: torch.fx.GraphModule) -> int:
    """Return the bytes of the outputs of all operations except views."""
    total = 0
    for node in graph.graph.nodes:
        output = node.meta.get("val")
        if node.op == "call_function" and isinstance(output, torch.Tensor) and not _is_view(node):
            total += output.numel() * output.element_size()
    return total


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)
