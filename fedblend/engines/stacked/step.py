"""One training step of many clients as one flat program: every client's weights stacked on a leading dimension."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from fedblend import _kernels
from fedblend._kernels.simplify import changed_in_place, simplify
from fedblend._kernels.tracing import trace
from fedblend.core.objective import Batch, Context
from fedblend.core.trees import strip_prefix
from fedblend.engines.loop import FunctionalNet
from fedblend.engines.sgd import Gradient, Precision, computing_in
from fedblend.engines.stacked.layers import CannotStack, dropouts
from fedblend.methods.objectives.output_cache import OutputCache

CONTEXT = {
    "pool": "pool/",
    "start": "start/",
    "global_outputs": "outputs/",
    "client_state": "client/",
    "server_state": "server/",
}
"""Fields of :class:`fedblend.core.objective.Context`, and the prefixes of their tables."""


@dataclass(frozen=True)
class Inputs:
    """What one step works on; every tensor has a leading dimension of K clients, but for what is ``shared``.

    ``params`` are in the order of the model's names, large ones perhaps as low-rank updates; ``x`` is as stored. What
    an objective may use beside the batch is ``shared`` by all clients, or each client's ``own``: the round's first
    weights (``start/...``), the pool (``pool/...``), mean outputs by label (``outputs/...``), and what parts keep at
    the client and at the server (``client/...``, ``server/...``).
    """

    params: list[_kernels.Weights]
    x: torch.Tensor
    y: torch.Tensor
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)

    def plain(self, but: Collection[int] = ()) -> Inputs:
        """The same with tensors for all parameters, ``but`` for some."""
        params = [_tensor(p) if i not in but else p for i, p in enumerate(self.params)]
        return replace(self, params=params)

    def tree(self) -> tuple[Any, ...]:
        """All tensors as plain containers, in the order of the fields."""
        return (self.params, self.x, self.y, self.drawn, self.masks, self.own, self.shared)

    def shapes(self) -> tuple[Any, ...]:
        """What a traced step depends on; parameters have the model's shapes."""
        tables = (self.drawn, self.masks, self.own, self.shared)
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

    def __call__(self, *tree: Any) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Gradients [K, ...] by parameter (``None`` where the phase uses it not), and what is noted of the step.

        That is losses [K] without terms and, where the step ``watches``, softmax outputs [K, B, C].
        """
        inputs = Inputs(*tree)
        params = [_tensor(p).detach().requires_grad_() for p in inputs.params]
        *_, shared = tree
        stacked = (params, *inputs.tree()[1:-1])

        def one(*tensors: Any) -> tuple[torch.Tensor, ...]:
            return self._of_one_client(Inputs(*tensors, shared))  # type: ignore[call-arg]

        losses, *noted = torch.vmap(one)(*stacked)
        gradients: list[torch.Tensor | None] = [*torch.autograd.grad(losses.sum(), params, allow_unused=True)]
        return gradients, [values.detach() for values in noted]

    def _of_one_client(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        weights = dict(zip(self.names, map(_tensor, inputs.params), strict=True))
        for name, layer in dropouts(self.model).items():
            layer.mask = inputs.masks.get(name)
        tables: dict[str, Any] = {
            field: strip_prefix(prefix, inputs.shared) | strip_prefix(prefix, inputs.own)
            for field, prefix in CONTEXT.items()
        }
        context = Context(self.context.task, self.context.scale, **tables)
        batch = Batch(context.scale(inputs.x), inputs.y)
        net = OutputCache(FunctionalNet(self.model, weights), batch.x)
        try:
            with computing_in(self.precision, inputs.x.device):
                loss = value = self.phase(net, batch, inputs.drawn, context.of_part("objective"))
            for slot, term in self.terms:
                loss = loss + term.loss(weights, net, batch, context.of_part(slot))
            noted = (net.distribution(),) if self.watches else ()
        finally:
            for layer in dropouts(self.model).values():
                layer.mask = None
        return loss, value, *noted

    def trace(self, inputs: Inputs) -> Program:
        """The step as a flat list of tensor operations, for inputs of these shapes.

        Nothing of autograd's or vmap's bookkeeping is left in it. Raises :class:`CannotStack` for a model that changes
        its own weights or buffers.
        """
        graph = trace(self, *inputs.plain().tree())
        given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        if changed_in_place(graph.graph) - set(given[len(inputs.params) :]):
            # A stack's clients share its buffers, and one that is held still must not be touched.
            raise CannotStack("it changes its weights or buffers itself while it trains")
        made = _bytes_made(graph)
        return Program(graph, made, simplify(graph))


@dataclass(frozen=True)
class Program:
    """A traced step, the bytes of all the tensors it makes, and which parameters it takes as low-rank updates."""

    graph: torch.fx.GraphModule
    bytes: int
    low_rank: Collection[int] = ()

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> tuple[list[Gradient], list[torch.Tensor]]:
        """What :class:`Step` gives, some gradients as the factors of a matrix product."""
        made = self.graph(*tree_leaves(inputs.tree()))
        return list(made[: len(inputs.params)]), list(made[len(inputs.params) :])


def outputs_of(model: nn.Module, names: Sequence[str], *tensors: torch.Tensor) -> torch.Tensor:
    """A model's outputs, as a function of its weights in the order of their ``names``, and of inputs."""
    *values, x = tensors
    made: torch.Tensor = functional_call(model, dict(zip(names, values, strict=True)), (x,))
    return made


def _tensor(weights: _kernels.Weights) -> torch.Tensor:
    return weights.tensor() if isinstance(weights, _kernels.Rows) else weights


def _bytes_made(graph: torch.fx.GraphModule) -> int:
    """The sum of the sizes of what the operations give, but for views."""
    total = 0
    for node in graph.graph.nodes:
        made = node.meta.get("val")
        if node.op == "call_function" and isinstance(made, torch.Tensor) and not _is_view(node):
            total += made.numel() * made.element_size()
    return total


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)
