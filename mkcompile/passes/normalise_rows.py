"""Products of one row, which Inductor writes as sums of products where it tunes by coordinate descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mkcompile.passes.graph import CAST, aten, is_call, only_user, prims, shape_of, value
from mkcompile.passes.normalise_gemms import add_node
from mkcompile.passes.sizes import same_size

_HALVES = (torch.bfloat16, torch.float16)
# In the meta of products that are sums again, unless an operator takes them.
_MARK = "mkcompile_row"


def rows_to_mm(graph: fx.Graph) -> None:
    """`cast((cast(x).unsqueeze(2) * cast(w).unsqueeze(0)).sum(1))` of one row becomes `mm`.

    Shapes: x [1, K], w [K, N], of one 16-bit dtype. What was float32 before is left: its product is more exact.
    """
    for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        rounded, operands = only_user(total), _operands(total)
        if operands is None or rounded is None or not is_call(rounded, CAST):
            continue
        if value(rounded).dtype != value(operands[0]).dtype:
            continue
        with graph.inserting_before(rounded):
            product = add_node(graph, aten.mm.default, *operands)
        product.meta = {**rounded.meta, "val": product.meta["val"], _MARK: True}
        rounded.replace_all_uses_with(product)
        _erase_unused(graph, rounded)


def mm_to_rows(graph: fx.Graph) -> None:
    """What no operator has taken is as it was."""
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        if product.meta.pop(_MARK, False):
            cast = prims.convert_element_type.default
            with graph.inserting_before(product):
                x, w = (add_node(graph, cast, one, torch.float32) for one in product.args)
                x, w = add_node(graph, aten.unsqueeze.default, x, 2), add_node(graph, aten.unsqueeze.default, w, 0)
                products = add_node(graph, aten.mul.Tensor, x, w)
                total = add_node(graph, aten.sum.dim_IntList, products, [1])
                rounded = add_node(graph, cast, total, value(product).dtype)
            for node in (x, w, products, total, rounded):
                node.meta = {**product.meta, "val": node.meta["val"]}
            product.replace_all_uses_with(rounded)
            graph.erase_node(product)


def _operands(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The row and the matrix, before they were cast."""
    product: Any = total.args[0]
    if total.args[1:] != ([1],) or total.kwargs or value(total).dtype != torch.float32:
        return None
    if not is_call(product, (aten.mul.Tensor,)) or only_user(product) is not total:
        return None
    x, w = (_cast_before(one, dim) for one, dim in zip(product.args, (2, 0), strict=True))
    if x is None or w is None or value(x).dtype != value(w).dtype or len(shape_of(w)) != 2:
        return None
    rows, *inner = shape_of(x)
    is_row = isinstance(rows, int) and rows == 1 and len(inner) == 1
    # One of the two may have been broadcast along k.
    return (x, w) if is_row and same_size(inner[0], shape_of(w)[0]) else None


def _cast_before(node: Any, dim: int) -> fx.Node | None:
    """What was cast and then given another dimension here."""
    if not is_call(node, (aten.unsqueeze.default,)) or node.args[1] != dim or not is_call(node.args[0], CAST):
        return None
    source: fx.Node = node.args[0].args[0]
    is_widened = value(node).dtype == torch.float32 and value(source).dtype in _HALVES
    return source if is_widened else None


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a chain as far as nothing else reads it."""
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if not source.users and is_call(source, (*CAST, aten.unsqueeze.default, aten.mul.Tensor, aten.sum.dim_IntList)):
            _erase_unused(graph, source)
