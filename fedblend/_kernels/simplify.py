"""Simplify a traced step: remove operations without effect, and give gradients as factors for the optimizer.

vmap and autograd add about a dozen views to each operation. On batches of ten samples the time of each call counts
(benchmarks/profile_step.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from fedblend._kernels.lowrank import use_low_rank
from fedblend._kernels.operators import RAW, join_pools, makes
from fedblend._kernels.tracing import trace

aten = torch.ops.aten

VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.detach.default,
}
"""Operations whose result has their input's numbers in another shape."""

IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.relu.default: aten.relu_.default,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""Elementwise operations, and the operation that overwrites their first argument with the same result."""

COMPARED = 2
"""First results of a program that are compared with those of its function."""

NEAR = 1e-2
"""Relative difference of norms that is allowed: kernels round in another order, and a maximum may be a tie."""

TINY = 1e-12
"""Absolute difference of norms that is always allowed."""


class TracedFunction:
    """A function of tensors as a flat program, traced at the first call with tensors of these shapes and types.

    A function whose operations depend on values cannot be traced, and is called directly. Tracing misses some such
    functions, so the first two results of a program are compared with those of the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.compared: dict[Any, int] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Compute the function's result without a derivative; several results are a flat list."""
        kind = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if kind not in self.programs:
            self.programs[kind] = self._trace(tensors)
        times = self.compared.get(kind, 0)
        with torch.no_grad():
            if times == COMPARED or self.programs[kind] is self.function:
                return self.programs[kind](*tensors)
            self.compared[kind] = times + 1
            return self._compare(kind, tensors)

    def _compare(self, kind: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the program's result if it is close to the function's; otherwise drop the program."""
        expected = self.function(*tensors)
        try:
            result = self.programs[kind](*tensors)
            if are_close(result, expected):
                return result
        except RuntimeError:
            # Some recorded operations cannot be called again, such as those of fused recurrent layers.
            pass
        self.programs[kind] = self.function
        return expected

    def _trace(self, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        # With copies, since tracing calls the function, and the function may change its arguments.
        copies = [tensor.clone() for tensor in tensors]
        same = all(copy.stride() == tensor.stride() for copy, tensor in zip(copies, tensors, strict=True))
        try:
            graph = trace(self.function, *(copies if same else tensors))
        except RuntimeError:
            # An error of the function itself is raised again at its call.
            return self.function
        if changed_in_place(graph.graph):
            return self.function
        simplify(graph, factors=False)
        return graph


def are_close(result: Any, expected: Any) -> bool:
    """Whether trees of tensors have equal shapes and types, and each tensor differs by at most 1 % of its norm."""
    pairs = list(zip(tree_leaves(result), tree_leaves(expected), strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    return all(_is_close(a, b) for a, b in pairs if a.is_floating_point())


def _is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    both = torch.stack([result.flatten(), expected.flatten()]).double()
    if not bool(both.isfinite().all()):
        return torch.equal(both[0].isfinite(), both[1].isfinite())
    return bool((both[0] - both[1]).norm() <= NEAR * both[1].norm() + TINY)


def simplify(graph: GraphModule, factors: bool = True) -> set[int]:
    """Rewrite a traced step in place without a change of its results.

    With ``factors``, gradients that are matrix products are returned as their factors. Returns the positions of the
    weights that the step then takes as low-rank updates.
    """
    _merge_repeats(graph.graph)
    rules = (_remove_identities, _shorten_views, join_pools)
    for rule in (*rules, *([_factor_gradients] if factors else [])):
        for node in list(graph.graph.nodes):
            rule(graph.graph, node)
        graph.graph.eliminate_dead_code()
    low_rank = _use_low_rank(graph.graph) if factors else set()
    for node in list(graph.graph.nodes):
        _overwrite_input(graph.graph, node)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            # The kernels are called without PyTorch's dispatcher.
            node.target = RAW.get(node.target, node.target)
    # Inputs and outputs are flat lists.
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    return low_rank


def _merge_repeats(graph: Graph) -> None:
    """Merge equal operations with equal arguments, in a graph where no operation changes a tensor."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(_changes(node) for node in calls):
        return
    known: dict[Any, Node] = {}
    for node in calls:
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if first is not node and not is_random:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.target is not operator.getitem and (schema is None or schema.is_mutable)


def _is_changed(node: Node) -> bool:
    """Whether an operation changes a tensor in place, itself or through a view of it."""
    return any(_changes(user) or (_is_view(user) and _is_changed(user)) for user in node.users)


def _can_merge(node: Node, other: Node) -> bool:
    """Whether two tensors with the same numbers may share memory: no operation changes either."""
    return not _is_changed(node) and not _is_changed(_base(other))


def _is_view(node: Node) -> bool:
    """Whether a node's result shares memory with an argument, by its operation's schema."""
    schema = getattr(node.target, "_schema", None)
    has_alias = schema is not None and any(value.alias_info is not None for value in schema.returns)
    return has_alias or node.target in VIEWS or node.target is operator.getitem


def _remove_identities(graph: Graph, node: Node) -> None:
    """Remove products with one and sums with zeros, where no later operation changes either tensor."""
    if node.target is aten.mul.Scalar and node.args[1] == 1 and _can_merge(node, cast(Node, node.args[0])):
        node.replace_all_uses_with(cast(Node, node.args[0]))
    if node.target is aten.add.Tensor and not node.kwargs:
        for zeros, other in (node.args, node.args[::-1]):
            is_zero = isinstance(zeros, Node) and zeros.target is aten.zeros_like.default and len(zeros.users) == 1
            if is_zero and isinstance(other, Node) and _layout(other) == _layout(node) and _can_merge(node, other):
                node.replace_all_uses_with(other)
                return


def _overwrite_input(graph: Graph, node: Node) -> None:
    """Run an elementwise operation in place if only it reads its input, which is still in the cache."""
    if node.target not in IN_PLACE or node.kwargs:
        return
    first = node.args[0]
    if not isinstance(first, Node) or len(first.users) > 1 or not _is_fresh(first):
        return
    output, value = node.meta.get("val"), first.meta.get("val")
    if output is None or value is None or output.dtype != value.dtype or _layout(node) != _layout(first):
        return
    if node.target is aten.threshold_backward.default:
        node.kwargs = {"grad_input": first}
    node.target = IN_PLACE[node.target]
    node.meta["fresh"] = True


def _is_fresh(node: Node) -> bool:
    """Whether a node allocates the memory of its result."""
    if node.meta.get("fresh") or makes(node):
        return True
    return getattr(node.target, "_schema", None) is not None and not _is_view(node)


def _layout(node: Node) -> tuple[object, ...] | None:
    """Shape, strides and offset of a node's result, if it is one tensor; strides of axes of size 1 count as 0."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    return (value.shape, strides, value.storage_offset())


def _base(node: Node, views: Callable[[Node], bool] = lambda node: node.target in VIEWS) -> Node:
    """The node of which this one is a view, through any number of views."""
    while node.args and views(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def changed_in_place(graph: Graph) -> set[Node]:
    """The arguments and constants of a traced function that it changes."""
    calls = [node for node in graph.nodes if node.op == "call_function" and _changes(node)]
    roots = {_base(one, _is_view) for node in calls for one in _written(node)}
    return {root for root in roots if root.op in ("placeholder", "get_attr")}


def _written(node: Node) -> list[Node]:
    """The arguments that an operation changes, by its schema; all arguments if it has none."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.all_input_nodes
    arguments = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    written = [arguments.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [one for one in tree_leaves(written) if isinstance(one, Node)]


def _shorten_views(graph: Graph, node: Node) -> None:
    """Replace a view of a view by an earlier one of the same layout, or by one view of the base tensor."""
    if node.target not in VIEWS:
        return
    other = node.args[0]
    while isinstance(other, Node):
        if _layout(other) == _layout(node):
            node.replace_all_uses_with(other)
            return
        if other.target not in VIEWS:
            break
        other = other.args[0]
    base = _base(node)
    value, viewed = base.meta.get("val"), node.meta["val"]
    if not isinstance(value, torch.Tensor) or node.args[0] is base:
        return
    if value.is_contiguous() and viewed.is_contiguous() and value.numel() == viewed.numel():
        with graph.inserting_before(node):
            view = graph.call_function(aten.view.default, (base, list(viewed.shape)))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)


def _factor_gradients(graph: Graph, node: Node) -> None:
    """Return a gradient that is a matrix product, or a sum of matrix products, as the factors.

    The optimizer then adds the products to the weights in one call. The gradient of a large layer, whose rank is the
    batch size, is never written to memory.
    """
    if node.op == "output":
        *gradients, values = cast(list[Any], node.args[0])
        node.args = ([*(_products(graph, node, g) or g for g in gradients), values],)


def _use_low_rank(graph: Graph) -> set[int]:
    """Take large weights whose gradients are factors as low-rank updates, and return their positions."""
    nodes = list(graph.nodes)
    *gradients, _ = cast(list[Any], nodes[-1].args[0])
    factored = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tuple)]
    taken = {i for i in factored if use_low_rank(nodes[i])}
    graph.eliminate_dead_code()
    return taken


def _products(graph: Graph, before: Node, node: Any) -> tuple[tuple[Node, Node], ...]:
    """The factors (a, b) of the matrix products whose sum a node is; empty for any other node."""
    if not isinstance(node, Node):
        return ()
    if node.target is aten.bmm.default:
        return (cast(tuple[Node, Node], node.args),)
    if node.target is aten.add.Tensor:
        parts = [_products(graph, before, part) for part in node.args]
        return parts[0] + parts[1] if all(parts) else ()
    if node.target is aten.transpose.int and node.args[1:] == (1, 2):
        inner = _products(graph, before, node.args[0])
        return tuple((_transposed(graph, before, b), _transposed(graph, before, a)) for a, b in inner)
    return ()


def _transposed(graph: Graph, before: Node, node: Node) -> Node:
    """A node of the transposed matrices [K, n, m] of ``node``; for a transpose, its input."""
    if node.target is aten.transpose.int and node.args[1:] == (1, 2):
        return cast(Node, node.args[0])
    with graph.inserting_before(before):
        return graph.call_function(aten.transpose.int, (node, 1, 2))
