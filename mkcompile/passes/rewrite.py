"""Puts a match's operator into the graph in the place of the nodes that it computes. The graph stays sorted."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import NodeSource, NodeSourceAction

from mkcompile.ops.registry import arguments, overload
from mkcompile.passes.fake_call import to_values
from mkcompile.passes.graph import aten, inputs_of, shape_of, value
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Match, Output
from mkcompile.passes.sizes import SizeNodes, same_shape
from mkcompile.passes.strides import is_read_by_strides, outermost_first, same_strides

# What later passes, profilers and error messages read from a node; kept from the node that is replaced.
KEPT_META = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "seq_nr",
    "custom",
    "partitioner_tag",
    "original_aten",
)


class Rewriter:
    """Rewrites one graph, match after match; old nodes are left for dead-code elimination.

    `calls` has the operator's call by collective.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._sizes = SizeNodes(graph)
        self._replaced: dict[fx.Node, fx.Node] = {}
        self.calls: dict[fx.Node, fx.Node] = {}

    def apply(self, match: Match, plan_key: str) -> Reason | None:
        """Rewrite one match; a Reason where the graph does not allow it, which is then unchanged."""
        call = replace(match.call, plan_key=plan_key)  # type: ignore[type-var]
        args = self._current(arguments(call))
        inputs = set(inputs_of(args))
        outputs = [output.node for output in match.outputs]
        deferred = _dependents_before(max(inputs), outputs)
        if not inputs.isdisjoint(deferred):
            return Reason.DEPENDENCY_CYCLE
        anchor = max(*inputs, min(outputs))
        stop = anchor.next
        args = self._with_size_nodes(args, anchor, deferred)
        with self._graph.inserting_before(stop):
            fused = self._graph.call_function(overload(type(call)), args)
            fused.meta["val"] = fused.target(*(to_values(arg) for arg in args))  # type: ignore[operator]
            keep_meta(fused, outputs[0])
        self.calls.update(dict.fromkeys(match.collectives, fused))
        last = fused
        for output in match.outputs:
            last = self._replace(fused, output, last, deferred)
        for node in deferred:
            last.append(node)
            last = node
        return None

    def _current(self, arg: Any) -> Any:
        """The argument with nodes that earlier rewrites replaced exchanged for what replaced them."""
        if isinstance(arg, fx.Node):
            while arg in self._replaced:
                arg = self._replaced[arg]
            return arg
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._current(one) for one in arg)
        return arg

    def _with_size_nodes(self, arg: Any, after: fx.Node, deferred: Container[fx.Node]) -> Any:
        """The argument with symbolic sizes exchanged for nodes; new ones are put behind `after`."""
        if isinstance(arg, torch.SymInt):
            return self._sizes.argument(arg, after, deferred)
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._with_size_nodes(one, after, deferred) for one in arg)
        return arg

    def _replace(self, fused: fx.Node, output: Output, last: fx.Node, deferred: Container[fx.Node]) -> fx.Node:
        """Route the old node's users to the fused result; returns the last node that was added."""
        node = fused
        if output.index is not None:
            node = last = self._add(last, output.node, getitem, (fused, output.index))
        for old in output.after:
            node = last = self._add(last, old, old.target, (node, *old.args[1:]), old.kwargs)
        wanted = shape_of(output.node)
        if not same_shape(shape_of(node), wanted):
            stop = last.next
            sizes = [self._sizes.argument(size, stop.prev, deferred) for size in wanted]
            node = last = self._add(stop.prev, output.node, aten.reshape.default, (node, sizes))
        if not same_strides(node, output.node) and is_read_by_strides(output.node):
            node = last = self._laid_out_as(output.node, node, last)
        _keep_memory(node, output.node)
        output.node.replace_all_uses_with(node)
        self._replaced[output.node] = node
        return last

    def _laid_out_as(self, old: fx.Node, node: fx.Node, last: fx.Node) -> fx.Node:
        """A copy with the old node's dimensions in the order in which they lay in memory."""
        order = outermost_first(value(old).stride())
        back = [order.index(dim) for dim in range(len(order))]
        ordered = self._add(last, old, aten.permute.default, (node, order))
        contiguous = {"memory_format": torch.contiguous_format}
        copy = self._add(ordered, old, aten.clone.default, (ordered,), contiguous)
        return self._add(copy, old, aten.permute.default, (copy, back))

    def _add(
        self,
        behind: fx.Node,
        like: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        with self._graph.inserting_after(behind):
            node = self._graph.call_function(target, args, dict(kwargs or {}))
        node.meta["val"] = target(*(to_values(arg) for arg in args), **node.kwargs)
        keep_meta(node, like)
        return node


def keep_meta(node: fx.Node, old: fx.Node) -> None:
    """Take over what later passes, profilers and error messages read."""
    node.meta.update({name: old.meta[name] for name in KEPT_META if name in old.meta})
    node.meta["from_node"] = [NodeSource(old, "mkcompile", NodeSourceAction.REPLACE)]


def _keep_memory(node: fx.Node, old: fx.Node) -> None:
    """The fake value of the old node, if laid out alike: values of views share its storage.

    By storages Inductor decides whether a copy may be left out, and so whether two results become one.
    """
    if same_strides(node, old) and value(node).dtype == value(old).dtype:
        node.meta["val"] = value(old)


def _dependents_before(last_input: fx.Node, outputs: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """The nodes up to the last input that depend on an output, in graph order (a dict for its order).

    Random numbers are drawn in eager's order: behind the first draw that depends on an output, all do.
    """
    deferred: dict[fx.Node, None] = {}
    tainted = set(outputs)
    node = min(tainted)
    has_drawn = False
    while node <= last_input:
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not tainted.isdisjoint(node.all_input_nodes) or (draws and has_drawn):
            tainted.add(node)
            deferred[node] = None
            has_drawn |= draws
        node = node.next
    return deferred
