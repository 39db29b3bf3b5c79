"""A function of tensors as the flat list of operations that it makes, without what vmap and autograd do around them.

PyTorch's ``make_fx`` gives the same list, but loads PyTorch's compiler for it, in every process, and makes a fake
tensor of each one to note its shape.
"""

from __future__ import annotations

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
    """A function of tensors, all annotated, as one operator that a trace calls as it is; it cannot be differentiated.

    ``stacked`` is its rule for :func:`torch.vmap`.
    """
    # Not by `custom_op`, which loads PyTorch's compiler at the first call.
    OPERATORS.define(name + torch.library.infer_schema(function, mutates_args=()))
    OPERATORS.impl(name, function, "CompositeExplicitAutograd")
    if stacked is not None:
        torch.library.register_vmap(f"fedblend::{name}", stacked, lib=OPERATORS)
    return getattr(torch.ops.fedblend, name).default


class AskedForNumber(RuntimeError):
    """A function that is traced does what depends on its tensors' numbers."""


def trace(function: Callable[..., Any], *arguments: Any) -> GraphModule:
    """What a function does with tensors like these, whose numbers it must not depend on.

    The module takes the leaves of the arguments' tree, and gives those of the result's, or the one tensor that it is.
    Each node's ``meta["val"]`` tells its shape, strides and type, but has no numbers. Raises :class:`AskedForNumber`
    where a tensor's number is asked for.
    """
    leaves, tree = tree_flatten(arguments)
    recorder = Recorder()
    # Tensors of their own: an argument that is given twice may be two another time.
    given = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for i, leaf in enumerate(given):
        recorder.note(leaf, recorder.graph.placeholder(f"given{i}"))
    with _without_autocast_cache(), recorder:
        made = function(*tree_unflatten(given, tree))
    results = [recorder.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(made)]
    recorder.graph.output(results[0] if isinstance(made, torch.Tensor) else results)
    return GraphModule(recorder.constants, recorder.graph)


class Recorder(TorchDispatchMode):
    """Notes the operations that are made while it is on, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.nodes: Any = WeakTensorKeyDictionary()
        self.constants: dict[str, torch.Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to be kept out of a compiler's sight it would have to be loaded."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and note it."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or _shape_depends(func, args):
            raise AskedForNumber(f"{func} asks for a number of a tensor that is not known when a step is traced")
        if func is aten.lift_fresh.default:
            # A tensor that is made of numbers anew each time.
            func = aten.lift_fresh_copy.default
        node = self.graph.call_function(func, map_aggregate(args, self._noted), map_aggregate(kwargs, self._noted))
        made = func(*args, **kwargs)
        self.note(made, node)
        return made

    def note(self, made: Any, node: Node) -> None:
        """Remember which node makes a tensor, or each tensor of several."""
        if isinstance(made, torch.Tensor):
            node.meta["val"] = outline(made)
            self.nodes[made] = node
        elif isinstance(made, tuple | list):
            for i, one in enumerate(made):
                self.note(one, self.graph.call_function(operator.getitem, (node, i)))

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node that made a tensor; for one that nothing here made, a constant."""
        if tensor not in self.nodes:
            name = f"constant{len(self.constants)}"
            self.constants[name] = tensor
            self.note(tensor, self.graph.create_node("get_attr", name))
        made: Node = self.nodes[tensor]
        return made

    def _noted(self, value: Any) -> Any:
        return self.node_of(value) if isinstance(value, torch.Tensor) else value


def _shape_depends(func: Any, args: Any) -> bool:
    """Whether the shape of what an operation gives depends on numbers; that of indexing does so by masks alone."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, type and device that holds no memory."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    room = tensor.storage_offset() + (1 + reach if tensor.numel() else 0)
    made = torch.empty(room, dtype=tensor.dtype, device=tensor.device)
    made = made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    made.untyped_storage().resize_(0)
    return made


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """What another step has cast is no part of this one."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
