"""Trace a function of tensors: the flat list of its operations, without the layers of vmap and autograd.

PyTorch's ``make_fx`` gives the same list, but loads PyTorch's compiler in every process, and makes a fake tensor of
each tensor to record its shape.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

OPERATORS = torch.library.Library("fedblend", "DEF")


def opaque(name: str, function: Callable[..., Any], stacked: Callable[..., Any] | None = None) -> Any:
    """Register a function of annotated tensors as one operator, which a trace records as one call.

    The operator has no derivative. ``stacked`` is its rule for :func:`torch.vmap`.
    """
    # Not with `custom_op`, which loads PyTorch's compiler at the first call.
    OPERATORS.define(name + torch.library.infer_schema(function, mutates_args=()))
    OPERATORS.impl(name, function, "CompositeExplicitAutograd")
    if stacked is not None:
        torch.library.register_vmap(f"fedblend::{name}", stacked, lib=OPERATORS)
    return getattr(torch.ops.fedblend, name).default


class DataDependentError(RuntimeError):
    """The operations of a traced function depend on the values of its tensors."""


def trace(function: Callable[..., Any], *arguments: Any) -> GraphModule:
    """Trace a function whose operations depend on the shapes of its tensors, but not on their values.

    The module takes the leaves of the arguments' tree, and returns the leaves of the result's tree, or the result
    where that is one tensor. Each node's ``meta["val"]`` has the shape, strides and type of its result, but no memory.
    Raises :class:`DataDependentError` where an operation needs a tensor's values.
    """
    _load_vmap()
    leaves, tree = tree_flatten(arguments)
    recorder = Recorder()
    # Detached into separate tensors: one argument passed twice may be two tensors in a later call.
    inputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for i, leaf in enumerate(inputs):
        recorder.record(leaf, recorder.graph.placeholder(f"input{i}"))
    with _without_autocast_cache(), recorder:
        result = function(*tree_unflatten(inputs, tree))
    results = [recorder.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(result)]
    recorder.graph.output(results[0] if isinstance(result, torch.Tensor) else results)
    return GraphModule(recorder.constants, recorder.graph)


@functools.cache
def _load_vmap() -> None:
    """Let ``torch.vmap`` import what it needs, before anything is recorded.

    The first call in PyTorch 2.6 imports PyTorch's compiler, which computes with tensors as it is imported.
    """
    torch.vmap(torch.neg)(torch.zeros(1))


class Recorder(TorchDispatchMode):
    """Records operations in a graph, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.nodes: Any = WeakTensorKeyDictionary()
        self.constants: dict[str, torch.Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to skip PyTorch's compiler, the compiler would have to be loaded."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation and record it."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or _shape_depends(func, args):
            raise DataDependentError(f"{func} needs the values of a tensor, which are unknown when a step is traced")
        if func is aten.lift_fresh.default:
            # A constant tensor, copied in each call.
            func = aten.lift_fresh_copy.default
        node = self.graph.call_function(func, map_aggregate(args, self._to_node), map_aggregate(kwargs, self._to_node))
        result = func(*args, **kwargs)
        self.record(result, node)
        return result

    def record(self, result: Any, node: Node) -> None:
        """Store ``node`` as the origin of a tensor, or of each of several tensors."""
        if isinstance(result, torch.Tensor):
            node.meta["val"] = without_memory(result)
            self.nodes[result] = node
        elif isinstance(result, tuple | list):
            for i, item in enumerate(result):
                self.record(item, self.graph.call_function(operator.getitem, (node, i)))

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node that computed a tensor, or a new constant for a tensor from outside the function."""
        if tensor not in self.nodes:
            name = f"constant{len(self.constants)}"
            self.constants[name] = tensor
            self.record(tensor, self.graph.create_node("get_attr", name))
        node: Node = self.nodes[tensor]
        return node

    def _to_node(self, value: Any) -> Any:
        return self.node_of(value) if isinstance(value, torch.Tensor) else value


def _shape_depends(func: Any, args: Any) -> bool:
    """Whether the shape of an operation's result depends on values; for indexing, only masks have this effect."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, type and device whose storage is empty."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    room = tensor.storage_offset() + (1 + reach if tensor.numel() else 0)
    empty = torch.empty(room, dtype=tensor.dtype, device=tensor.device)
    empty = empty.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    empty.untyped_storage().resize_(0)
    return empty


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Turn off the autocast cache: a tensor that was cast before is no operation of this trace."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
