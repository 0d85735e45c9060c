"""Questions about post-grad FX graphs: what is a collective, a GEMM, a view; who uses it; which shape has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_REDUCE = (c10d.all_reduce.default,)
ALL_GATHER = (c10d.all_gather_into_tensor.default,)
REDUCE_SCATTER = (c10d.reduce_scatter_tensor.default,)
WAIT = (c10d.wait_tensor.default,)

VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
GEMMS = (aten.mm.default, aten.addmm.default)


def is_call(node: Any, targets: tuple[Any, ...]) -> bool:
    """Is it a call of one of these overloads?"""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_collective(node: fx.Node) -> bool:
    """Any functional collective (not the wait)."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace == "_c10d_functional" and not is_call(node, WAIT)


def collectives(graph: fx.Graph) -> Iterator[fx.Node]:
    """All collectives in graph order."""
    return (node for node in graph.nodes if is_collective(node))


def value(node: fx.Node) -> Tensor:
    """The node's fake tensor."""
    val: Tensor = node.meta["val"]
    return val


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The node's shape; symbolic sizes stay symbolic."""
    return tuple(value(node).shape)


def only_user(node: fx.Node) -> fx.Node | None:
    """The single user of a node, else None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def inputs_of(call_args: Iterable[Any]) -> Iterator[fx.Node]:
    """All nodes in (nested) arguments."""
    for arg in call_args:
        if isinstance(arg, fx.Node):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from inputs_of(arg)
