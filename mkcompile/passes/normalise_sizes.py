"""Sizes of intermediate tensors, computed from the graph's inputs instead.

`sym_size(gathered, 1)` would count as a use of the gathered tensor, and would hold its collective in the graph.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from mkcompile.passes.graph import aten
from mkcompile.passes.sizes import computed, size_node


def sizes_from_inputs(graph: fx.Graph) -> None:
    """Replace every `sym_size` of a tensor that is no input, where the inputs' sizes determine it."""
    inputs = _Inputs(graph)
    made: dict[sympy.Expr, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        tensor, size = node.args[0], node.meta["val"]
        if tensor.op == "placeholder" or not isinstance(size, torch.SymInt):
            continue
        wanted = size.node.expr
        if wanted not in made and inputs.determine(wanted):
            made[wanted] = inputs.compute(wanted, node)
            made[wanted].meta["val"] = size
        if wanted in made:
            node.replace_all_uses_with(made[wanted])
            graph.erase_node(node)


class _Inputs:
    """Where the graph's inputs hold the symbols."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes: dict[sympy.Symbol, fx.Node] = {}
        self._dims: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
        for node in graph.find_nodes(op="placeholder"):
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                self._nodes.setdefault(val.node.expr, node)
            elif isinstance(val, torch.Tensor):
                for dim, size in enumerate(val.shape):
                    if isinstance(size, torch.SymInt):
                        self._dims.setdefault(size.node.expr, (node, dim))

    def determine(self, wanted: sympy.Expr) -> bool:
        """Are all symbols of the expression sizes of inputs?"""
        return all(symbol in self._nodes or symbol in self._dims for symbol in wanted.free_symbols)

    def compute(self, wanted: sympy.Expr, before: fx.Node) -> fx.Node:
        """The expression's last node; new nodes are put before `before`."""
        return computed(wanted, before, lambda one: self._nodes.get(one) or size_node(*self._dims[one]))
