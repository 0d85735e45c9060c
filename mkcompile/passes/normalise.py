"""Rewrites that make equal things look equal, before the finders look."""

from __future__ import annotations

from torch import fx


def run(graph: fx.Graph) -> None:
    """Normalise the graph in place."""
