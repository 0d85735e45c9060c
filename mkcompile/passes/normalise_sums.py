"""Sums of reductions become the reduction of a sum: one collective in the place of two.

A backward pass has one collective for each column-parallel linear that read the same input (q, k and v; gate and up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mkcompile.passes.graph import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    VIEWS,
    WAIT,
    adds,
    aten,
    erase_with_waits,
    is_call,
    shape_of,
    value,
)
from mkcompile.passes.normalise_gemms import add_node
from mkcompile.passes.reduction import REDUCE_OPS
from mkcompile.passes.scatter import Scatter, scatter_before
from mkcompile.passes.sizes import same_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduced:
    """An addend: `views(wait(collective(layout(source))))`, where nothing else reads any of it."""

    collective: fx.Node
    source: fx.Node
    dim: int
    layout: tuple[fx.Node, ...]
    tail: tuple[fx.Node, ...]


def fold_sums(graph: fx.Graph) -> None:
    """`reduce(a) + reduce(b)` becomes `reduce(a + b)`, for all-reduce and reduce-scatter, sum and avg.

    Not in float16, where a rank's `a + b` may overflow though both reductions and their sum are in range.
    """
    for add in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not adds(add):
            continue
        left, right = (_reduced(addend) for addend in add.args[:2])
        if left is not None and right is not None and _may_fold(left, right):
            _fold(graph, add, left, right)


def _reduced(node: Any) -> _Reduced | None:
    tail: list[fx.Node] = []
    while is_call(node, (*VIEWS, *WAIT)) and len(node.users) == 1:
        tail.insert(0, node)
        node = node.args[0]
    if not is_call(node, (*ALL_REDUCE, *REDUCE_SCATTER)) or len(node.users) != 1:
        return None
    if node.args[1] not in REDUCE_OPS or not any(is_call(one, WAIT) for one in tail):
        return None
    if is_call(node, ALL_REDUCE):
        return _Reduced(collective=node, source=node.args[0], dim=-1, layout=(), tail=tuple(tail))
    scatter = scatter_before(node)
    if not isinstance(scatter, Scatter):
        return None
    return _Reduced(
        collective=node, source=scatter.source, dim=scatter.dim, layout=tuple(sorted(scatter.nodes)), tail=tuple(tail)
    )


def _may_fold(left: _Reduced, right: _Reduced) -> bool:
    one, other = left.collective, right.collective
    if one is other or one.target is not other.target or one.args[1:] != other.args[1:] or left.dim != right.dim:
        return False
    if value(left.source).dtype != value(right.source).dtype or value(left.source).dtype == torch.float16:
        return False
    same_sources = same_shape(shape_of(left.source), shape_of(right.source))
    return same_sources and same_shape(shape_of(left.tail[-1]), shape_of(right.tail[-1]))


def _fold(graph: fx.Graph, add: fx.Node, left: _Reduced, right: _Reduced) -> None:
    """Sum the sources right before the old sum, then repeat the left addend's way from source to sum."""
    with graph.inserting_before(add):
        summed = add_node(graph, aten.add.Tensor, left.source, right.source)
        moved = {left.source: summed}
        for node in (*left.layout, left.collective, *left.tail):
            moved[node] = graph.node_copy(node, lambda old: moved.get(old, old))
    result = moved[left.tail[-1]]
    add.replace_all_uses_with(result)
    graph.erase_node(add)
    for addend in (left, right):
        for node in reversed(addend.tail):
            graph.erase_node(node)
        erase_with_waits(graph, addend.collective)
