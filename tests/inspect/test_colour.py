"""Nodes are given to the sites that they belong to."""

from __future__ import annotations

import networkx as nx

from mkcompile.inspect.colour import as_digraph, grow
from mkcompile.inspect.report import Report


def test_every_removed_node_belongs_to_a_site(tensor_report: Report, sequence_report: Report) -> None:
    for pair in (*tensor_report.graphs, *sequence_report.graphs):
        removed = pair.before.names() - pair.after.names()
        assert removed
        assert {node.name for node in pair.before.nodes if node.site is not None} >= removed


def test_a_site_is_one_connected_piece_around_its_collective(sequence_report: Report) -> None:
    for row in sequence_report.collectives:
        pair = sequence_report.graphs[row.graph]
        part = [node.name for node in pair.before.nodes if node.site == row.site]
        assert row.node in part
        near = {one for name in part for one in nx.all_neighbors(as_digraph(pair.before), name)}
        assert nx.is_weakly_connected(as_digraph(pair.before).subgraph({*part, *near}))


def test_each_operator_of_the_graph_after_has_one_site(sequence_report: Report) -> None:
    operators = [node for pair in sequence_report.graphs for node in pair.after.nodes if node.role == "fused"]
    assert sorted(node.site or 0 for node in operators) == [one.site for one in sequence_report.collectives]


def test_nodes_go_to_the_nearest_seed() -> None:
    path = nx.path_graph([f"n{i}" for i in range(7)], create_using=nx.DiGraph)
    parts = grow(path, {0: ["n0"], 1: ["n6"]}, {"n1", "n2", "n4", "n5"})
    assert parts == {0: {"n0", "n1", "n2"}, 1: {"n6", "n5", "n4"}}
