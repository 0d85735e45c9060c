"""One node for what is computed twice: views, gathers, reductions and waits. Inference graphs come without this."""

from __future__ import annotations

from collections.abc import Hashable
from operator import getitem
from typing import Any

from torch import fx

from mkcompile.passes.graph import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CAST,
    REDUCE_SCATTER,
    VIEWS,
    WAIT,
    aten,
    is_call,
    is_collective,
)

ALIASES = (
    *(target for target in VIEWS if target is not aten.clone.default),
    aten.permute.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.expand.default,
    getitem,
    *WAIT,
)
# Torch 2.14 saves one of these for each reader of a gather, and tells backward that their memory differs.
COPIED = (aten.cat.default, *WAIT)
MERGED = (*ALIASES, *CAST, *ALL_GATHER, *ALL_REDUCE, *REDUCE_SCATTER, aten.cat.default)


def fold_nested_waits(graph: fx.Graph) -> None:
    """`wait(wait(x))` becomes `wait(x)`. A wait on an input of the graph stays: its collective began before."""
    for wait in graph.find_nodes(op="call_function", target=WAIT[0]):
        inner = wait.args[0]
        if is_call(inner, WAIT):
            wait.replace_all_uses_with(inner)
            graph.erase_node(wait)


def return_waited(graph: fx.Graph) -> None:
    """A collective that is a result of the graph, and waited for in it, is returned as what the wait returns.

    It is the same tensor. Selective checkpointing saves collectives so, and backward waits again, for nothing.
    """
    output = graph.output_node()
    for wait in graph.find_nodes(op="call_function", target=WAIT[0]):
        begun = wait.args[0]
        if isinstance(begun, fx.Node) and is_collective(begun) and output in begun.users and output not in wait.users:
            output.replace_input_with(begun, wait)


def merge_duplicates(graph: fx.Graph) -> None:
    """Common subexpressions, for views, casts, gathers, reductions and waits only.

    Two results of the graph are never made one: the caller may write into one of them, and backward gives the memory of
    each saved tensor to something else once it has read it. Where equal gathers leave the graph twice, the second
    becomes a copy of the first.
    """
    escaping = _escaping(graph)
    known: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if not is_call(node, MERGED) or not _may_merge(node):
            continue
        twin = known.setdefault(_key(node), node)
        if twin is node:
            continue
        if node in escaping and twin in escaping:
            if is_call(node, COPIED):
                node.target, node.args, node.kwargs = aten.clone.default, (twin,), {}
            continue
        if node in escaping:
            escaping.add(twin)
        node.replace_all_uses_with(twin)
        graph.erase_node(node)


def _may_merge(node: fx.Node) -> bool:
    """Waits only on collectives of this graph that return a new tensor."""
    return not is_call(node, WAIT) or is_call(node.args[0], (*ALL_REDUCE, *ALL_GATHER, *REDUCE_SCATTER, *ALL_TO_ALL))


def _escaping(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory a result of the graph may share."""
    escaping: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user.op == "output" or (user in escaping and is_call(user, ALIASES)) for user in node.users):
            escaping.add(node)
    return escaping


def _key(node: fx.Node) -> Hashable:
    return node.target, _hashable(node.args), _hashable(node.kwargs)


def _hashable(arg: Any) -> Hashable:
    if isinstance(arg, (list, tuple)):
        return tuple(_hashable(one) for one in arg)
    if isinstance(arg, dict):
        return tuple(sorted((name, _hashable(one)) for name, one in arg.items()))
    # 1, 1.0 and True are equal, but not the same argument
    return arg if isinstance(arg, (fx.Node, str)) else (type(arg), arg)
