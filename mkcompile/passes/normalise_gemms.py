"""GEMMs in other clothes: batched products with one batch, scaled addends of a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mkcompile.passes.gemm import factor_of, is_scale, reaches_gemm
from mkcompile.passes.graph import (
    ALL_REDUCE,
    GEMMS,
    REDUCE_SCATTER,
    VIEWS,
    WAIT,
    adds,
    aten,
    is_call,
    only_user,
    peel,
    shape_of,
    value,
)
from mkcompile.passes.scatter import SPLITS

PRODUCTS = (*GEMMS, aten.bmm.default)


def single_batches_to_mm(graph: fx.Graph) -> None:
    """`bmm` of one batch (einsum makes them) becomes `mm` between views."""
    for bmm in graph.find_nodes(op="call_function", target=aten.bmm.default):
        batches = shape_of(bmm)[0]
        if not isinstance(batches, int) or batches != 1:
            continue
        with graph.inserting_before(bmm):
            x, w = (add_node(graph, aten.squeeze.dim, operand, 0) for operand in bmm.args)
            product = add_node(graph, aten.unsqueeze.default, add_node(graph, aten.mm.default, x, w), 0)
        product.meta = {**bmm.meta, "val": product.meta["val"]}
        bmm.replace_all_uses_with(product)
        graph.erase_node(bmm)


def unit_permutes_to_views(graph: fx.Graph) -> None:
    """A permute that moves only dimensions of size 1 changes no order; it becomes a squeeze and unsqueezes."""
    for permute in graph.find_nodes(op="call_function", target=aten.permute.default):
        source, order = permute.args[:2]
        shape = shape_of(source)
        order = [int(dim) % len(shape) for dim in order]
        if not _is_near_product(permute):
            continue
        units = [dim for dim, size in enumerate(shape) if isinstance(size, int) and size == 1]
        rest = [dim for dim in order if dim not in units]
        if not units or rest != sorted(rest) or any(user.op == "output" for user in permute.users):
            continue
        with graph.inserting_before(permute):
            node = add_node(graph, aten.squeeze.dims, source, units)
            for place, dim in enumerate(order):
                if dim in units:
                    node = add_node(graph, aten.unsqueeze.default, node, place)
        permute.replace_all_uses_with(node)
        graph.erase_node(permute)


def _is_near_product(permute: fx.Node) -> bool:
    """Between a product and what surrounds it; elsewhere it disturbs nothing."""
    if is_call(peel(permute.args[0]), (*PRODUCTS, *WAIT)):  # type: ignore[arg-type]
        return True
    readers = [user for one in permute.users for user in (one.users if is_call(one, VIEWS) else [one])]
    return any(is_call(user, (*PRODUCTS, *ALL_REDUCE, *REDUCE_SCATTER, *SPLITS)) for user in readers)


def unscale_addends(graph: fx.Graph) -> None:
    """`a + c * (x @ w)`, where it is reduced and x is no larger than the product, becomes `a + (c * x) @ w` (LoRA).

    Not in float16 where `c * x` may overflow though the product is in range.
    """
    for add in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not adds(add) or not _is_reduced(add):
            continue
        for addend, other in (add.args[:2], add.args[1::-1]):
            if reaches_gemm(other):
                _move_scale_to_input(graph, addend)


def _move_scale_to_input(graph: fx.Graph, addend: Any) -> None:
    """Find `views(scale(views(mm)))` with no other readers, and scale the mm's input instead."""
    scale = _through_own_views(addend)
    if scale is None or not is_scale(scale) or scale.kwargs or len(scale.users) != 1:
        return
    mm = _through_own_views(scale.args[0])
    if mm is None or not is_call(mm, (aten.mm.default,)) or len(mm.users) != 1:
        return
    x, w = mm.args
    inner, columns = shape_of(w)  # type: ignore[arg-type]
    if not isinstance(inner, int) or not isinstance(columns, int) or inner > columns:
        return
    if value(scale).dtype != value(mm).dtype or (value(mm).dtype == torch.float16 and abs(factor_of(scale)) > 1):
        return
    with graph.inserting_before(mm):
        mm.args = (add_node(graph, scale.target, x, scale.args[1]), w)
    scale.replace_all_uses_with(scale.args[0])  # type: ignore[arg-type]
    graph.erase_node(scale)


def _through_own_views(node: Any) -> fx.Node | None:
    """The node behind views that nothing else reads."""
    while is_call(node, VIEWS) and len(node.users) == 1:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _is_reduced(node: fx.Node, depth: int = 8) -> bool:
    """Does a reducing collective read the node through views, sums and the slicing in front of a reduce-scatter?"""
    user = only_user(node)
    if user is None or depth == 0:
        return False
    if is_call(user, (*ALL_REDUCE, *REDUCE_SCATTER, *SPLITS)):
        return True
    return is_call(user, (*VIEWS, aten.add.Tensor)) and _is_reduced(user, depth - 1)


def add_node(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call with its fake value, at the graph's insertion point."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(one.meta["val"] if isinstance(one, fx.Node) else one for one in args))
    return node
