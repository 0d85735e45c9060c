"""Puts a match's operator into the graph in the place of the nodes that it computes. The graph stays sorted."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem

from torch import fx

from mkcompile.ops.registry import arguments, overload
from mkcompile.passes.fake_call import to_values
from mkcompile.passes.graph import aten, inputs_of, shape_of
from mkcompile.passes.reason import Reason
from mkcompile.passes.sizes import SizeNodes
from mkcompile.passes.site import Match, Output


def apply(graph: fx.Graph, match: Match, plan_key: str, sizes: SizeNodes) -> Reason | None:
    """Rewrite one match; a Reason where the graph does not allow it. Old nodes are left for dead-code elimination."""
    call = replace(match.call, plan_key=plan_key)  # type: ignore[type-var]
    args = arguments(call)
    inputs = set(inputs_of(args))
    outputs = [output.node for output in match.outputs]
    deferred = _dependents_before(max(inputs), outputs)
    if not inputs.isdisjoint(deferred):
        return Reason.DEPENDENCY_CYCLE
    anchor = max(*inputs, *outputs[:1])
    with graph.inserting_after(anchor):
        fused = graph.call_function(overload(type(call)), args)
    fused.meta["val"] = fused.target(*(to_values(arg) for arg in args))  # type: ignore[operator]
    last = fused
    for output in match.outputs:
        last = _replace(graph, fused, output, last, sizes)
    for node in deferred:
        last.append(node)
        last = node
    return None


def _dependents_before(last_input: fx.Node, outputs: list[fx.Node]) -> dict[fx.Node, None]:
    """The nodes up to the last input that depend on an output, in graph order (a dict for its order)."""
    deferred: dict[fx.Node, None] = {}
    tainted = set(outputs)
    node = min(outputs)
    while node <= last_input:
        if node not in tainted and not tainted.isdisjoint(node.all_input_nodes):
            tainted.add(node)
            deferred[node] = None
        node = node.next
    return deferred


def _replace(graph: fx.Graph, fused: fx.Node, output: Output, last: fx.Node, sizes: SizeNodes) -> fx.Node:
    """Route the old node's users to the fused result; returns the last node that was added."""
    node = fused
    if output.index is not None:
        with graph.inserting_after(last):
            node = last = graph.call_function(getitem, (fused, output.index))
        node.meta["val"] = fused.meta["val"][output.index]
    wanted = shape_of(output.node)
    if shape_of(node) != wanted:
        source = node
        with graph.inserting_after(last):
            node = last = graph.call_function(aten.reshape.default, (source, sizes.arguments(output.node)))
        node.meta["val"] = source.meta["val"].reshape(wanted)
    output.node.replace_all_uses_with(node)
    return last
