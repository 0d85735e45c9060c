"""Collectives that stand at the edge of a graph, so that their GEMM is in another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mkcompile.inspect.rows import Collective, GraphPair
from mkcompile.inspect.snapshot import GraphView
from mkcompile.passes.reason import Reason

REMEDY = (
    "the GEMM on the other side is in another graph; remove the graph break between them, or, if a hook of the "
    "compiled module itself communicates, compile a module that holds this one: a hook of its own is traced apart"
)
_PASSING = ("view", "wait")


def notes_on(rows: Sequence[Collective], graphs: Sequence[GraphPair]) -> list[str]:
    """A sentence for each such collective of forward, where forward has several graphs."""
    if sum(pair.phase != "backward" for pair in graphs) < 2:
        return []
    return [
        f"{row.kind} (site {row.site}) {'ends' if row.kind.startswith('all_gather') else 'begins'} its graph: {REMEDY}"
        for row in rows
        if row.phase != "backward" and row.reason is Reason.NO_GEMM and _at_edge(row, graphs[row.graph].before)
    ]


def _at_edge(row: Collective, graph: GraphView) -> bool:
    """Does a gather's result leave the graph unread, or does what is reduced come from outside?"""
    roles = {node.name: node.role for node in graph.nodes}
    if row.kind.startswith("all_gather"):
        step = {name: [node.name for node in graph.nodes if name in node.inputs] for name in roles}
        return _passes_to(row.node, "output", step, roles)
    return _passes_to(row.node, "input", {node.name: list(node.inputs) for node in graph.nodes}, roles)


def _passes_to(name: str, role: str, step: Mapping[str, list[str]], roles: Mapping[str, str]) -> bool:
    """Over views and waits only."""
    found = step.get(name, [])
    return any(roles[one] == role or (roles[one] in _PASSING and _passes_to(one, role, step, roles)) for one in found)
