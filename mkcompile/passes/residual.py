"""A residual to which a reduced product is added takes it up in place: the kernel adds what it stores anyway.

`h + reduced` becomes `h += reduction` where `h` is an intermediate of the graph that nothing reads afterwards. The
graph stays functional: the call stands in it as `auto_functionalized_v2`, which Inductor makes a call in place after
all its other passes, with a copy in front if one of them has made that necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config

from mkcompile.config import ResultPolicy
from mkcompile.ops.gemm_all_reduce import GemmAllReduce, GemmAllReduceAdd
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter, GemmReduceScatterAdd
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import Call, overload
from mkcompile.passes.facts import has_streams, may_alias
from mkcompile.passes.graph import aten, is_call, is_collective, is_in_place, only_user, peel, shape_of, value
from mkcompile.passes.reason import Residual
from mkcompile.passes.rewrite import keep_meta

# Does the kernel that a problem is planned with add in place? Of a group by name.
Adds = Callable[[str, Problem], bool]

# By operator: the type of its calls, and the operator that works in place.
_IN_PLACE_OF: Mapping[object, tuple[type[Call], torch._ops.OpOverload]] = {
    overload(plain): (plain, overload(in_place))
    for plain, in_place in ((GemmAllReduce, GemmAllReduceAdd), (GemmReduceScatter, GemmReduceScatterAdd))
}
_OTHER_SHAPE = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.squeeze.default,
                aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)  # fmt: skip
_ADD = (aten.add.Tensor,)


def anywhere(group: str, problem: Problem) -> bool:
    """The answer for no machine in particular: wherever it is legal."""
    return True


def add_in_place(
    graph: fx.Graph, problems: Mapping[fx.Node, Problem], adds: Adds | None, results: ResultPolicy
) -> dict[fx.Node, Residual]:
    """Rewrite the additions behind these fused calls that can be done in place; what became of each, by call."""
    in_order = [node for node in graph.nodes if node in problems and node.target in _IN_PLACE_OF]
    nowhere = _nowhere_in(graph, results) if in_order else None
    outcome: dict[fx.Node, Residual] = {}
    for call in in_order:
        found = _addition(call)
        if found is None:
            continue
        if adds is None or nowhere is not None:
            outcome[call] = nowhere or Residual.APART
        else:
            outcome[call] = _try(call, found, problems[call], adds)
    return outcome


def _nowhere_in(graph: fx.Graph, results: ResultPolicy) -> Residual | None:
    """Why nothing is added in place in the whole graph."""
    if results != "ordinary":
        return Residual.PLANNED
    if inductor_config.cpp_wrapper:  # generates no code for such an operator (torch 2.13)
        return Residual.CPP_WRAPPER
    return Residual.STREAMS if has_streams(graph) else None


def _try(call: fx.Node, addition: _Addition, problem: Problem, adds: Adds) -> Residual:
    refused = _unlike(addition) or _alive(call, addition)
    if refused is None and not adds(str(call.args[-2]), problem):
        refused = Residual.KERNEL
    if refused is None:
        _rewrite(call, addition)
    return refused or Residual.ADDED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Addition:
    """`add` of `residual` and of `operand`, a view of the result, or the result itself."""

    add: fx.Node
    operand: fx.Node
    residual: fx.Node


def _addition(call: fx.Node) -> _Addition | None:
    """The first sum of two tensors that reads the result."""
    node = call
    while True:
        for user in node.users:
            if is_call(user, _ADD) and all(isinstance(one, fx.Node) for one in user.args[:2]):
                one, other = user.args[:2]
                residual = other if one is node else one
                return _Addition(add=user, operand=node, residual=residual)  # type: ignore[arg-type]
        only = only_user(node)
        if only is None or not is_call(only, _OTHER_SHAPE):
            return None
        node = only


def _unlike(addition: _Addition) -> Residual | None:
    """Why the sum is no plain one of two tensors that lie alike."""
    if addition.residual is addition.operand or len(addition.operand.users) > 1:
        return Residual.RESULT_READ
    if addition.add.kwargs.get("alpha", 1) != 1:
        return Residual.SCALED
    values = [value(one) for one in (addition.residual, addition.operand, addition.add)]
    if len({one.dtype for one in values}) > 1:
        return Residual.DTYPE
    if any(isinstance(size, torch.SymInt) for one in values for size in one.shape):
        return Residual.SYMBOLIC
    if len({one.shape for one in values}) > 1:
        return Residual.SHAPE
    return None if all(one.is_contiguous() for one in values) else Residual.LAYOUT


def _alive(call: fx.Node, addition: _Addition) -> Residual | None:
    """Why the residual's memory may not be written to in the place of the sum."""
    memory = _same_memory(addition.residual)
    readers = _readers(memory) - {addition.add}
    if any(node.op != "call_function" for node in memory):
        return Residual.INPUT
    if any(user.op == "output" for user in readers):
        return Residual.OUTPUT
    if call in readers:
        return Residual.OPERAND
    if any(value(node).numel() != value(addition.residual).numel() for node in memory if _is_tensor(node)):
        return Residual.PART
    place = max(call, addition.residual)
    is_late = any(node > place for node in (memory | readers))
    return Residual.READ_LATER if is_late or _is_written_between(call, place) else None


def _readers(memory: set[fx.Node]) -> set[fx.Node]:
    """What reads one of them; a collective reads until it has been waited for."""
    readers = {user for node in memory for user in node.users}
    return readers | {wait for one in readers if is_collective(one) for wait in one.users}


def _is_written_between(call: fx.Node, place: fx.Node) -> bool:
    """Is what the call reads written to, in place, before the place that it would move to?"""
    operands = set(call.all_input_nodes)
    node = call
    while node is not place:
        node = node.next
        if is_in_place(node) and not operands.isdisjoint(_same_memory(node.kwargs["_all_bases"][0])):  # type: ignore[index, arg-type]
            return True
    return False


def _same_memory(residual: fx.Node) -> set[fx.Node]:
    """All that may lie where the residual lies: its views, what it is a view of, and other views of that."""
    seen, left = {residual}, [residual]
    while left:
        node = left.pop()
        near = [user for user in node.users if user.op == "call_function" and may_alias(user)]
        near += node.all_input_nodes if node.op == "call_function" and may_alias(node) else []
        new = [one for one in near if one not in seen]
        seen.update(new)
        left += new
    return seen


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _rewrite(call: fx.Node, addition: _Addition) -> None:
    add, base = addition.add, _base(addition.residual)
    call_type, operator = _IN_PLACE_OF[call.target]
    names = [one.name for one in fields(call_type)]  # type: ignore[arg-type]
    arguments = {**dict(zip(names, call.args, strict=True)), **_seen_as(value(call), base)}
    is_viewed = shape_of(base) != shape_of(add)
    # The sum's own fake value, whose storage its views' values share.
    total_value = value(add).view(shape_of(base)) if is_viewed else value(add)
    with call.graph.inserting_before(max(call, addition.residual).next):
        fused = call.graph.call_function(torch.ops.higher_order.auto_functionalized_v2, (operator,), arguments)
        fused.meta["val"] = (None, total_value)
        keep_meta(fused, call)
        total = call.graph.call_function(getitem, (fused, 1))
        total.meta["val"] = total_value
        keep_meta(total, add)
        if is_viewed:
            total = call.graph.call_function(aten.reshape.default, (total, list(shape_of(add))))
            total.meta["val"] = value(add)
            keep_meta(total, add)
    add.replace_all_uses_with(total)
    _erase(add, call, addition.operand)


def _base(residual: fx.Node) -> fx.Node:
    """What the residual is a view of, unless making it so has copied: Inductor copies views that are written to."""
    base = peel(residual, _OTHER_SHAPE)
    return base if value(base).is_contiguous() else residual


def _seen_as(result: Tensor, base: fx.Node) -> dict[str, Any]:
    """The operator's residual, a view of the base as its result lies, in the words of `auto_functionalized_v2`."""
    shape = tuple(result.shape)
    view = {"_residual_size": shape, "_residual_stride": result.stride(), "_residual_storage_offset": 0}
    is_whole = shape == shape_of(base) and not is_call(base, _OTHER_SHAPE)
    return {"_residual_base_index": 0, "_all_bases": [base], **({} if is_whole else view)}


def _erase(add: fx.Node, call: fx.Node, operand: fx.Node) -> None:
    """The sum, the views in front of it, the call."""
    add.graph.erase_node(add)
    while operand is not call:
        view, (operand,) = operand, operand.all_input_nodes
        view.graph.erase_node(view)
    call.graph.erase_node(call)
