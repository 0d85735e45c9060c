"""Places a small graph in layers from left to right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 148, 40, 36, 12
_SWEEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Top left corners by node, and the size of the whole. Units: pixels."""

    corners: Mapping[str, tuple[float, float]]
    width: float
    height: float


def place(graph: nx.DiGraph) -> Placed:
    """Layers by longest path; sources are pulled to their first reader; order in a layer by the neighbours' mean."""
    layer_of = _layers(graph)
    columns: list[list[str]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    for name in graph:
        columns[layer_of[name]].append(name)
    for sweep in range(_SWEEPS):
        _sort_columns(graph, columns, forward=sweep % 2 == 0)
    tallest = max((len(column) for column in columns), default=0)
    height = max(tallest * (BOX_HEIGHT + GAP_Y) - GAP_Y, 0)
    corners = {}
    for x, column in enumerate(columns):
        top = (height - (len(column) * (BOX_HEIGHT + GAP_Y) - GAP_Y)) / 2
        for y, name in enumerate(column):
            corners[name] = (float(x * (BOX_WIDTH + GAP_X)), top + y * (BOX_HEIGHT + GAP_Y))
    return Placed(corners=corners, width=max(len(columns) * (BOX_WIDTH + GAP_X) - GAP_X, 0), height=height)


def _layers(graph: nx.DiGraph) -> dict[str, int]:
    layer_of: dict[str, int] = {}
    order = list(nx.topological_sort(graph))
    for name in order:
        layer_of[name] = max((layer_of[one] + 1 for one in graph.predecessors(name)), default=0)
    for name in reversed(order):
        readers = [layer_of[one] for one in graph.successors(name)]
        if readers and graph.in_degree(name) == 0:
            layer_of[name] = min(readers) - 1
    return layer_of


def _sort_columns(graph: nx.DiGraph, columns: list[list[str]], *, forward: bool) -> None:
    row_of = {name: row / max(len(column), 1) for column in columns for row, name in enumerate(column)}

    def mean(name: str) -> float:
        around = list(graph.predecessors(name) if forward else graph.successors(name))
        return sum(row_of[one] for one in around) / len(around) if around else row_of[name]

    for column in columns if forward else reversed(columns):
        column.sort(key=mean)
        row_of.update({name: row / max(len(column), 1) for row, name in enumerate(column)})
