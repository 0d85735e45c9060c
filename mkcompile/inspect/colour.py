"""Which nodes of the graph before, and of the graph after, belong to which site."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import networkx as nx

from mkcompile.inspect.capture import CapturedGraph
from mkcompile.inspect.snapshot import GraphView


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
    """Number the sites from `first` on and find their nodes in both graphs.

    A fused site's nodes are those that the rewrite removed, each given to the nearest collective; what normalising
    had removed before that goes with the neighbours it had.
    """
    before, middle, after = (as_digraph(one) for one in (captured.before, captured.normalised, captured.after))
    fused = {i: site for i, site in enumerate(captured.sites) if site.operator}
    parts = grow(middle, {i: [site.collective] for i, site in fused.items()}, set(middle) - set(after))
    calls = {i: _call(str(site.operator), parts[i], middle, captured.after, after) for i, site in fused.items()}
    parts = _with_strays(parts, calls, middle, after)
    numbers = _numbers(calls, len(captured.sites), first)
    old = grow(before, {i: part & set(before) for i, part in parts.items()}, set(before) - set(after))
    site_before = {name: numbers[i] for i, part in old.items() for name in part}
    site_after = {name: numbers[i] for i, call in calls.items() if call for name in _with_results(call, after)}
    for i, site in enumerate(captured.sites):
        if i not in fused:
            for graph, site_of in ((before, site_before), (after, site_after)):
                site_of.update(dict.fromkeys(_with_waits(site.collective, graph), numbers[i]))
    return Colouring(before=site_before, after=site_after, numbers=numbers)


def _numbers(calls: Mapping[int, str], count: int, first: int) -> tuple[int, ...]:
    """One number a site; sites whose nodes became one call share theirs."""
    of_call: dict[str, int] = {}
    numbers: list[int] = []
    free = first
    for i in range(count):
        call = calls.get(i, "")
        if call in of_call:
            numbers.append(of_call[call])
            continue
        numbers.append(free)
        free += 1
        if call:
            of_call[call] = numbers[-1]
    return tuple(numbers)


def grow(graph: nx.DiGraph, seeds: Mapping[int, Iterable[str]], allowed: Collection[str]) -> dict[int, set[str]]:
    """Divide the allowed nodes among the seeds, each to the nearest that reaches it over allowed nodes."""
    owner = {name: i for i, names in seeds.items() for name in names}
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


def _call(operator: str, part: set[str], middle: nx.DiGraph, after: GraphView, edges: nx.DiGraph) -> str:
    """The fused call that took the place of these nodes: the one with the most neighbours in common."""
    around = {one for name in part for one in [*middle.predecessors(name), *middle.successors(name)]} - part
    names = f"mkcompile.{operator}", f"mkcompile.{operator}_add"
    calls = [node.name for node in after.nodes if node.role == "fused" and node.call in names]
    return max(calls, key=lambda name: len(around & _neighbours(name, middle, edges)), default="")


def _with_strays(
    parts: dict[int, set[str]], calls: Mapping[int, str], middle: nx.DiGraph, after: nx.DiGraph
) -> dict[int, set[str]]:
    """Removed nodes that no removed node joins to their collective (an FFN's first GEMMs, where backward needs theirs).

    They go to the call that has the most of their neighbours.
    """
    owned = {name for part in parts.values() for name in part}
    strays = set(middle) - set(after) - owned
    neighbours = {i: _neighbours(call, middle, after) for i, call in calls.items() if call}
    for name in strays:
        near = {*middle.predecessors(name), *middle.successors(name)}
        best = max(neighbours, key=lambda i: len(near & neighbours[i]), default=None)
        if best is not None and near & neighbours[best]:
            parts[best].add(name)
    return parts


def _neighbours(name: str, middle: nx.DiGraph, after: nx.DiGraph) -> set[str]:
    """The call's inputs, and its users seen through nodes that the rewrite added."""
    found = set(after.predecessors(name))
    queue = deque(after.successors(name))
    while queue:
        one = queue.popleft()
        if one in middle:
            found.add(one)
        else:
            queue.extend(after.successors(one))
    return found


def _with_results(call: str, after: nx.DiGraph) -> list[str]:
    return [call, *(one for one in after.successors(call) if one.startswith("getitem"))]


def _with_waits(name: str, graph: nx.DiGraph) -> list[str]:
    if name not in graph:
        return []
    return [name, *(one for one in graph.successors(name) if one.startswith("wait"))]
