"""Sizes that may be symbolic: compare them without adding guards, and find or build graph nodes that hold them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from mkcompile.passes.graph import aten

Size = int | torch.SymInt


def expression(size: Size) -> sympy.Expr:
    """The size as a sympy expression."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def same_size(a: Size, b: Size) -> bool:
    """Known to be equal, for every value of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return expression(a) == expression(b) or bool(statically_known_true(a == b))


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Known to be equal in every dimension."""
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def computed(wanted: sympy.Expr, before: fx.Node, node_of: Callable[[sympy.Symbol], fx.Node]) -> fx.Node:
    """Nodes in front of `before` that compute the expression, with their values; returns the last. `node_of` gives a
    symbol's node, and may put it there.
    """
    start = before.prev
    with before.graph.inserting_before(before):
        tracer = fx.proxy.GraphAppendingTracer(before.graph)
        symbols = {one: fx.Proxy(node_of(one), tracer) for one in sorted(wanted.free_symbols, key=str)}
        made: fx.Node = sympy_interp(PythonReferenceAnalysis, symbols, wanted).node
    node = start.next
    while node is not before:
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
        node.meta.setdefault("val", node.target(*values))  # type: ignore[operator]
        node = node.next
    return made


def size_node(tensor: fx.Node, dim: int) -> fx.Node:
    """A new node, where the graph inserts now."""
    node = tensor.graph.call_function(aten.sym_size.int, (tensor, dim))
    node.meta["val"] = tensor.meta["val"].shape[dim]
    return node


class SizeNodes:
    """For each symbolic size a node of the graph that holds it, made where there is none."""

    def __init__(self, graph: fx.Graph) -> None:
        self._by_expression: dict[sympy.Expr, fx.Node] = {}
        self._by_symbol: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
        for node in graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                self._by_expression.setdefault(val.node.expr, node)
            elif node.op == "placeholder" and isinstance(val, torch.Tensor):
                self._note_symbols(node, val)

    def _note_symbols(self, node: fx.Node, val: torch.Tensor) -> None:
        for dim, size in enumerate(val.shape):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                self._by_symbol.setdefault(size.node.expr, (node, dim))

    def argument(self, size: Size, after: fx.Node, without: Container[fx.Node] = ()) -> int | fx.Node:
        """The size as an argument of a node that is to follow `after`; nodes that it needs are put behind `after`.

        `without`: nodes that are about to be moved further down.
        """
        if isinstance(size, int):
            return size
        wanted = size.node.expr
        if wanted.is_Integer:
            return int(wanted)
        found = self._by_expression.get(wanted)
        if found is not None and found <= after and found not in without:
            return found
        return computed(wanted, after.next, self._symbol)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        found = self._by_expression.get(symbol)
        return size_node(*self._by_symbol[symbol]) if found is None else found
