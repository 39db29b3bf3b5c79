"""A traced step with nothing in it that computes nothing, and gradients that the optimizer can add at once.

vmap and autograd leave, around each operation, a dozen that only look at the same numbers in another shape,
and on batches of ten the time that each call takes counts (benchmarks/profile_step.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from fedblend import _kernels
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
"""Operations that give their input's numbers in another shape."""

IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.relu.default: aten.relu_.default,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""Elementwise operations, and what does the same to their first argument itself."""


COMPARED = 2
"""Results of a program that are compared with its function's own."""

NEAR = 1e-2
"""Share of its norm by which a result may differ: kernels round otherwise, and a maximum may be a tie."""

TINY = 1e-12
"""What a result may differ by at least."""


class TracedFunction:
    """A function of tensors as a flat program, which is traced when it is first called with tensors of such shapes.

    A function that asks for numbers of tensors cannot be traced, and is called itself. Not all of that can be seen:
    the first two results of a program, of other numbers as a rule, are compared with the function's own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.compared: dict[Any, int] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """What the function gives, without a derivative; several results as a flat list."""
        kind = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if kind not in self.programs:
            self.programs[kind] = self._traced(tensors)
        times = self.compared.get(kind, 0)
        with torch.no_grad():
            if times == COMPARED or self.programs[kind] is self.function:
                return self.programs[kind](*tensors)
            self.compared[kind] = times + 1
            return self._compared(kind, tensors)

    def _compared(self, kind: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        """What the program gives if that is what the function gives; else the function's from now on."""
        own = self.function(*tensors)
        try:
            made = self.programs[kind](*tensors)
            if alike(made, own):
                return made
        except RuntimeError:
            # An operation that cannot be called as it was noted, such as those of fused recurrent layers.
            pass
        self.programs[kind] = self.function
        return own

    def _traced(self, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        # Of copies, since the function is called meanwhile, and may change what it is given.
        copies = [tensor.clone() for tensor in tensors]
        same = all(copy.stride() == tensor.stride() for copy, tensor in zip(copies, tensors, strict=True))
        try:
            graph = trace(self.function, *(copies if same else tensors))
        except RuntimeError:
            # Where the function itself is at fault it says so when it is called.
            return self.function
        if changed_in_place(graph.graph):
            return self.function
        simplify(graph, factors=False)
        return graph


def alike(made: Any, wanted: Any) -> bool:
    """Whether results are the same tensors but for rounding: each within a hundredth of its norm."""
    pairs = list(zip(tree_leaves(made), tree_leaves(wanted), strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    return all(_are_near(a, b) for a, b in pairs if a.is_floating_point())


def _are_near(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    both = torch.stack([made.flatten(), wanted.flatten()]).double()
    if not bool(both.isfinite().all()):
        return torch.equal(both[0].isfinite(), both[1].isfinite())
    return bool((both[0] - both[1]).norm() <= NEAR * both[1].norm() + TINY)


def simplify(graph: GraphModule, factors: bool = True) -> set[int]:
    """Rewrite a traced step in place; its results stay the same numbers, some gradients as ``factors`` if so asked.

    Gives the places of the weights that it takes as low-rank updates.
    """
    _without_repeats(graph.graph)
    rules = (_remove_identities, _with_direct_views, _kernels.join_pools)
    for rule in (*rules, *([_with_products_apart] if factors else []), _kernels.use_dense):
        for node in list(graph.graph.nodes):
            rule(graph.graph, node)
        graph.graph.eliminate_dead_code()
    low_rank = _with_low_rank(graph.graph) if factors else set()
    for node in list(graph.graph.nodes):
        _in_its_place(graph.graph, node)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            # Our kernels without the dispatcher's detour.
            node.target = _kernels.RAW.get(node.target, node.target)
    # Inputs and outputs come and go as flat lists.
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    return low_rank


def _without_repeats(graph: Graph) -> None:
    """Let what the same operation makes of the same arguments be made once, where no operation changes a tensor."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(_changes(node) for node in calls):
        return
    known: dict[Any, Node] = {}
    for node in calls:
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node and not _is_random(node):
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.target is not operator.getitem and (schema is None or schema.is_mutable)


def _is_changed(node: Node) -> bool:
    """Whether an operation changes a tensor in place, itself or through a view of it."""
    return any(_changes(user) or (_is_view(user) and _is_changed(user)) for user in node.users)


def _may_be_one(node: Node, other: Node) -> bool:
    """Whether two tensors of the same numbers may be one: neither is changed, so that the other would be."""
    return not _is_changed(node) and not _is_changed(_base(other))


def _is_view(node: Node) -> bool:
    """Whether what a node gives shares its numbers with an argument, as far as its operation tells."""
    schema = getattr(node.target, "_schema", None)
    told = schema is not None and any(value.alias_info is not None for value in schema.returns)
    return told or node.target in VIEWS or node.target is operator.getitem


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _remove_identities(graph: Graph, node: Node) -> None:
    """Take out factors of one, and zeros that are added, where nothing changes either afterwards."""
    if node.target is aten.mul.Scalar and node.args[1] == 1 and _may_be_one(node, cast(Node, node.args[0])):
        node.replace_all_uses_with(cast(Node, node.args[0]))
    if node.target is aten.add.Tensor and not node.kwargs:
        for zeros, other in (node.args, node.args[::-1]):
            is_nothing = isinstance(zeros, Node) and zeros.target is aten.zeros_like.default and len(zeros.users) == 1
            if is_nothing and isinstance(other, Node) and _layout(other) == _layout(node) and _may_be_one(node, other):
                node.replace_all_uses_with(other)
                return


def _in_its_place(graph: Graph, node: Node) -> None:
    """Let an elementwise operation overwrite a tensor that nothing else reads, while it is still in the cache."""
    if node.target not in IN_PLACE or node.kwargs:
        return
    first = node.args[0]
    if not isinstance(first, Node) or len(first.users) > 1 or not _is_fresh(first):
        return
    made, given = node.meta.get("val"), first.meta.get("val")
    if made is None or given is None or made.dtype != given.dtype or _layout(node) != _layout(first):
        return
    if node.target is aten.threshold_backward.default:
        node.kwargs = {"grad_input": first}
    node.target = IN_PLACE[node.target]
    node.meta["fresh"] = True


def _is_fresh(node: Node) -> bool:
    """Whether a node makes a tensor of its own, of which no other is a view."""
    if node.meta.get("fresh") or _kernels.makes(node):
        return True
    return getattr(node.target, "_schema", None) is not None and not _is_view(node)


def _layout(node: Node) -> tuple[object, ...] | None:
    """Shape and strides of what a node gives, where that is one tensor; no step is ever made along a single one."""
    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor):
        return None
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(made.shape, made.stride(), strict=True))
    return (made.shape, strides, made.storage_offset())


def _base(node: Node, views: Callable[[Node], bool] = lambda node: node.target in VIEWS) -> Node:
    """The node whose numbers this one shows, through any number of views."""
    while node.args and views(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def changed_in_place(graph: Graph) -> set[Node]:
    """The arguments and constants of a traced function that it changes."""
    calls = [node for node in graph.nodes if node.op == "call_function" and _changes(node)]
    roots = {_base(one, _is_view) for node in calls for one in _written(node)}
    return {root for root in roots if root.op in ("placeholder", "get_attr")}


def _written(node: Node) -> list[Node]:
    """The arguments that an operation changes: what its schema says, all where it has none."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.all_input_nodes
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [one for one in tree_leaves(written) if isinstance(one, Node)]


def _with_direct_views(graph: Graph, node: Node) -> None:
    """Replace a view by an earlier one of the same layout, or by one view of the tensor itself."""
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
    shown, seen = base.meta.get("val"), node.meta["val"]
    if not isinstance(shown, torch.Tensor) or node.args[0] is base:
        return
    if shown.is_contiguous() and seen.is_contiguous() and shown.numel() == seen.numel():
        with graph.inserting_before(node):
            view = graph.call_function(aten.view.default, (base, list(seen.shape)))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)


def _with_products_apart(graph: Graph, node: Node) -> None:
    """Give a gradient that is a matrix product, or a sum of some, as their factors.

    The optimizer then adds the products to the weights in one go; the gradient of a large layer, which is ten
    samples wide, is never written to memory, nor read across the grain where it is a transposed one.
    """
    if node.op == "output":
        *gradients, values = cast(list[Any], node.args[0])
        node.args = ([*(_products(graph, node, g) or g for g in gradients), values],)


def _with_low_rank(graph: Graph) -> set[int]:
    """Let large weights whose gradients are factors come in as a low-rank update of what they were."""
    nodes = list(graph.nodes)
    *gradients, _ = cast(list[Any], nodes[-1].args[0])
    factored = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tuple)]
    taken = {i for i in factored if _kernels.use_low_rank(nodes[i])}
    graph.eliminate_dead_code()
    return taken


def _products(graph: Graph, before: Node, node: Any) -> tuple[tuple[Node, Node], ...]:
    """The factors (a, b) of the matrix products whose sum a node is; none where it is something else."""
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
    """A stack of matrices, each transposed; what is a transpose already is taken back."""
    if node.target is aten.transpose.int and node.args[1:] == (1, 2):
        return cast(Node, node.args[0])
    with graph.inserting_before(before):
        return graph.call_function(aten.transpose.int, (node, 1, 2))
