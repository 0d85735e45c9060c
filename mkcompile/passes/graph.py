"""Questions about post-grad FX graphs: what is a collective, a GEMM, a view; who uses it; which shape has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from mkcompile.ops.groups import resolve

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

ALL_REDUCE = (c10d.all_reduce.default,)
ALL_GATHER = (c10d.all_gather_into_tensor.default,)
REDUCE_SCATTER = (c10d.reduce_scatter_tensor.default,)
ALL_TO_ALL = (c10d.all_to_all_single.default,)
WAIT = (c10d.wait_tensor.default,)

# The same elements in the same row-major order, of another shape or in other memory; the source is argument 0.
VIEWS = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
)
GEMMS = (aten.mm.default, aten.addmm.default)
SCALED_GEMMS = (aten._scaled_mm.default,)
CAST = (prims.convert_element_type.default, aten._to_copy.default)


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


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or by name, else the default."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def peel(node: fx.Node, targets: tuple[Any, ...] = VIEWS) -> fx.Node:
    """The node behind a chain of views."""
    while is_call(node, targets):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_in_place(node: fx.Node) -> bool:
    """Is it a call of one of our operators that work in place? The graph holds it in functional form."""
    if node.op != "call_function" or node.target is not torch.ops.higher_order.auto_functionalized_v2:
        return False
    operator = node.args[0]
    return isinstance(operator, torch._ops.OpOverload) and operator.namespace == "mkcompile"


def world_size_of(group: str) -> int:
    """The number of ranks in a named process group.

    Raises: GroupError where this rank has none of that name.
    """
    return resolve("mkcompile", group).size()


def only_user(node: fx.Node) -> fx.Node | None:
    """The single user of a node, else None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def adds(node: Any) -> bool:
    """Is it `a + b` of two nodes, unscaled?"""
    if not is_call(node, (aten.add.Tensor,)) or argument(node, 2, "alpha", 1) != 1:
        return False
    return all(isinstance(one, fx.Node) for one in node.args[:2])


def erase_with_waits(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a collective with its waits as far as nothing uses them; dead-code elimination keeps waits."""
    for user in list(node.users):
        if is_call(user, WAIT):
            erase_with_waits(graph, user)
    if not node.users:
        graph.erase_node(node)


def erase_dead(graph: fx.Graph) -> None:
    """Erase calls without effect that nothing uses. (torch's own elimination checks the whole graph each time.)"""
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and not node.is_impure():
            graph.erase_node(node)


def inputs_of(call_args: Iterable[Any]) -> Iterator[fx.Node]:
    """All nodes in (nested) arguments."""
    for arg in call_args:
        if isinstance(arg, fx.Node):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from inputs_of(arg)
