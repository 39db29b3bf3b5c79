"""A traced step with nothing in it that computes nothing, and with gradients laid out as the weights are.

vmap and autograd leave, around each operation, a dozen that only look at the same numbers in another shape. Each
costs microseconds, which on batches of ten is as much as the arithmetic.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from fedblend.engines import kernels

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


def simplify(graph: GraphModule) -> None:
    """Rewrite a traced step in place; its results stay the same numbers."""
    for rule in (_without_factors_of_one, _with_direct_views, _with_gradients_in_place, _with_products_apart):
        for node in list(graph.graph.nodes):
            rule(graph.graph, node)
        graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            # Our kernels without the dispatcher's detour.
            node.target = kernels.RAW.get(node.target, node.target)
    # Inputs and outputs come and go as flat lists.
    graph.graph.set_codegen(CodeGen())
    graph.recompile()


def _without_factors_of_one(graph: Graph, node: Node) -> None:
    if node.target is aten.mul.Scalar and node.args[1] == 1:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _layout(node: Node) -> tuple[object, ...] | None:
    """Shape and strides of what a node gives, where that is one tensor."""
    made = node.meta.get("val")
    return (made.shape, made.stride(), made.storage_offset()) if isinstance(made, torch.Tensor) else None


def _base(node: Node) -> Node:
    """The node whose numbers this one shows, through any number of views."""
    while node.target in VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


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


def _with_gradients_in_place(graph: Graph, node: Node) -> None:
    """(a b)^T as b^T a^T: the gradient of a dense layer's weights then lies in memory as the weights do."""
    product = node.args[0] if node.target is aten.transpose.int else None
    if not isinstance(product, Node) or product.target is not aten.bmm.default or node.args[1:] != (1, 2):
        return
    if len(product.users) > 1:
        return
    with graph.inserting_before(node):
        a, b = (_transposed(graph, factor) for factor in product.args)
        made = graph.call_function(aten.bmm.default, (b, a))
    made.meta = {**node.meta, "val": node.meta["val"].contiguous()}
    node.replace_all_uses_with(made)


def _transposed(graph: Graph, node: Any) -> Node:
    """A stack of matrices, each transposed; what is a transpose already is taken back."""
    if node.target is aten.transpose.int and node.args[1:] == (1, 2):
        return node.args[0]
    made = graph.call_function(aten.transpose.int, (node, 1, 2))
    made.meta["val"] = node.meta["val"].transpose(1, 2)
    return made


def _with_products_apart(graph: Graph, node: Node) -> None:
    """Give a gradient that is a product of two matrices as those two.

    The optimizer then adds the product to the weights in one go; the gradient of a large layer, which is ten
    samples wide, is never written to memory.
    """
    if node.op != "output":
        return
    *gradients, values = cast(list[Any], node.args[0])
    node.args = ([*map(_factors, gradients), values],)


def _factors(gradient: Node | None) -> Node | tuple[Node, Node] | None:
    if isinstance(gradient, Node) and gradient.target is aten.bmm.default and len(gradient.users) == 1:
        return gradient.args  # type: ignore[return-value]
    return gradient
