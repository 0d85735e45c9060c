"""The part of a graph around one site, small enough to be drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import networkx as nx

from mkcompile.inspect.colour import as_digraph
from mkcompile.inspect.snapshot import GraphView, NodeView

MOST_BOXES = 26
# Steps out of a site's own nodes that are shown; a refused collective needs more, to show what stands there instead.
_RADIUS_FUSED, _RADIUS_REFUSED = 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What one box stands for: one node, or several alike."""

    node: NodeView
    count: int
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """Boxes by name and the edges between them."""

    boxes: dict[str, Box]
    graph: nx.DiGraph


def around(graph: GraphView, site: int, *, fused: bool) -> Neighbourhood:
    """The site's nodes and those near them; alike siblings (the parts of a split) are one box."""
    nodes = {node.name: node for node in graph.nodes if node.role != "output"}
    digraph = as_digraph(graph).subgraph(nodes)
    inside = [name for name, node in nodes.items() if node.site == site]
    chosen = _near(digraph, inside, _RADIUS_FUSED if fused else _RADIUS_REFUSED)
    leader = _leaders(digraph, chosen, nodes)
    boxes: dict[str, Box] = {}
    for name in (one for one in nodes if one in chosen):
        head = leader[name]
        if head in boxes:
            boxes[head] = replace(boxes[head], count=boxes[head].count + 1)
        else:
            boxes[head] = Box(node=nodes[head], count=1, inside=nodes[head].site == site)
    merged = nx.DiGraph()
    merged.add_nodes_from(boxes)
    edges = ((leader[a], leader[b]) for a, b in digraph.subgraph(chosen).edges)
    merged.add_edges_from((a, b) for a, b in edges if a != b)
    return Neighbourhood(boxes=boxes, graph=merged)


def _near(digraph: nx.DiGraph, inside: Iterable[str], radius: int) -> set[str]:
    chosen = set(inside)
    edge = set(chosen)
    for _ in range(radius):
        edge = {near for name in edge for near in [*digraph.predecessors(name), *digraph.successors(name)]} - chosen
        if len(chosen) + len(edge) > MOST_BOXES and len(chosen) > 1:
            edge = {name for name in edge if digraph.out_degree(name) + digraph.in_degree(name) < MOST_BOXES}
            return chosen | set(sorted(edge)[: max(MOST_BOXES - len(chosen), 0)])
        chosen |= edge
    return chosen


def _leaders(digraph: nx.DiGraph, chosen: set[str], nodes: dict[str, NodeView]) -> dict[str, str]:
    """The first of each group of nodes that do the same to the same inputs for the same readers."""
    first: dict[tuple[object, ...], str] = {}
    leader: dict[str, str] = {}
    for name in (one for one in nodes if one in chosen):
        node = nodes[name]
        sources = tuple(sorted(digraph.predecessors(name)))
        key = (node.call, node.shape, node.site, sources, tuple(sorted(set(digraph.successors(name)) & chosen)))
        leader[name] = first.setdefault(key if sources else (name,), name)
    return leader
