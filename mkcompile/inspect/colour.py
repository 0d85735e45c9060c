"""Which nodes of the graph before, and of the graph after, belong to which site."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from mkcompile.inspect.capture import CapturedGraph
from mkcompile.inspect.snapshot import GraphView, NodeView
from mkcompile.passes.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """Site numbers by node name, and for each of the pass's sites the number it got.

    Sites that became one operator share a number.
    """

    before: dict[str, int]
    after: dict[str, int]
    numbers: tuple[int, ...]


def as_digraph(graph: GraphView) -> nx.DiGraph:
    """Nodes by name, edges from producer to consumer."""
    digraph = nx.DiGraph()
    for node in graph.nodes:
        digraph.add_node(node.name)
        digraph.add_edges_from((one, node.name) for one in node.inputs)
    return digraph


def colour(captured: CapturedGraph, first: int) -> Colouring:
    """Number the sites from `first` on and find their nodes in both graphs."""
    before, after = as_digraph(captured.before), as_digraph(captured.after)
    vanished = captured.before.names() - captured.after.names()
    seeds = {
        i: site.collective for i, site in enumerate(captured.sites) if site.operator and site.collective in vanished
    }
    parts = _grow(before, seeds, vanished)
    operators = {i: _operator(site, parts.get(i, set()), before, captured.after, after) for i, site in _fused(captured)}
    numbers: list[int] = []
    taken: dict[str, int] = {}
    for i, _ in enumerate(captured.sites):
        operator = operators.get(i)
        number = taken.get(operator.name, first + len(set(numbers))) if operator else first + len(set(numbers))
        if operator:
            taken[operator.name] = number
        numbers.append(number)
    return Colouring(
        before=_names(captured, parts, before, numbers),
        after=_after(captured, taken, after, numbers),
        numbers=tuple(numbers),
    )


def _fused(captured: CapturedGraph) -> Iterable[tuple[int, Site]]:
    return ((i, site) for i, site in enumerate(captured.sites) if site.operator)


def _grow(graph: nx.DiGraph, seeds: dict[int, str], allowed: set[str]) -> dict[int, set[str]]:
    """Divide the allowed nodes among the seeds, each to the nearest that reaches it."""
    owner = {name: i for i, name in seeds.items()}
    queue = deque(owner)
    while queue:
        name = queue.popleft()
        for one in [*graph.predecessors(name), *graph.successors(name)]:
            if one in allowed and one not in owner:
                owner[one] = owner[name]
                queue.append(one)
    parts: dict[int, set[str]] = {i: set() for i in seeds}
    for name, i in owner.items():
        parts[i].add(name)
    return parts


def _operator(
    site: Site, part: set[str], before: nx.DiGraph, after: GraphView, after_edges: nx.DiGraph
) -> NodeView | None:
    """The fused call that took the place of these nodes: the one with the most neighbours in common."""
    around = {one for name in part for one in [*before.predecessors(name), *before.successors(name)]} - part
    calls = [node for node in after.nodes if node.role == "fused" and node.call == f"mkcompile.{site.operator}"]
    if not calls:
        return None
    return max(calls, key=lambda node: len(around & _neighbours(node.name, before, after_edges)))


def _neighbours(name: str, before: nx.DiGraph, after: nx.DiGraph) -> set[str]:
    """The call's inputs, and its users seen through nodes that the rewrite added."""
    found = set(after.predecessors(name))
    queue = deque(after.successors(name))
    while queue:
        one = queue.popleft()
        if one in before:
            found.add(one)
        else:
            queue.extend(after.successors(one))
    return found


def _names(
    captured: CapturedGraph, parts: dict[int, set[str]], before: nx.DiGraph, numbers: list[int]
) -> dict[str, int]:
    site_of = {name: numbers[i] for i, part in parts.items() for name in part}
    for i, site in enumerate(captured.sites):
        if not site.operator and site.collective in before:
            site_of.update(dict.fromkeys(_with_waits(site.collective, before), numbers[i]))
    return site_of


def _after(captured: CapturedGraph, taken: dict[str, int], after: nx.DiGraph, numbers: list[int]) -> dict[str, int]:
    site_of = dict(taken)
    for name, number in taken.items():
        site_of.update((one, number) for one in after.successors(name) if one.startswith("getitem"))
    for i, site in enumerate(captured.sites):
        if not site.operator and site.collective in after:
            site_of.update(dict.fromkeys(_with_waits(site.collective, after), numbers[i]))
    return site_of


def _with_waits(name: str, graph: nx.DiGraph) -> list[str]:
    return [name, *(one for one in graph.successors(name) if one.startswith("wait"))]
