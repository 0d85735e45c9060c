"""Symbolic sizes as graph nodes: which node already holds this size."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mkcompile.passes.graph import shape_of


class SizeNodes:
    """Finds, for each symbolic size, a node of the graph that computes it (the earliest one)."""

    def __init__(self, graph: fx.Graph) -> None:
        self._by_expression: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                self._by_expression.setdefault(val.node.expr, node)

    def argument(self, size: int | torch.SymInt) -> int | fx.Node | None:
        """The size as an argument: an int, or the node that holds it, or None if no node does."""
        if isinstance(size, int):
            return size
        return self._by_expression.get(size.node.expr)

    def arguments(self, node: fx.Node) -> list[int | fx.Node]:
        """The node's shape as reshape arguments; at most one size that no node holds becomes -1."""
        found = [self.argument(size) for size in shape_of(node)]
        assert found.count(None) <= 1, f"{node}: no nodes hold the sizes {shape_of(node)}"
        return [-1 if size is None else size for size in found]
