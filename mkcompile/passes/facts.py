"""What the runtime may know of a call's place in its graph: whether its result stays inside, what runs beside it.

Facts go into the call's plan key. They hold for every order that Inductor may run the graph in, and are the same on all
ranks, since the graph is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._inductor import config as inductor_config

from mkcompile.config import ResultPolicy
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.passes.graph import CAST, VIEWS, WAIT, aten, is_call, is_in_place, prims
from mkcompile.plan import key

_OURS = "mkcompile"
# Operators of these namespaces talk to other ranks, or lie about streams.
_COMMUNICATION = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem", "_dtensor")
_STREAMS = "streams"
# Copies that Inductor may leave out, and updates that it may do in place: the result can then be the argument itself.
_MAY_VANISH = (
    *VIEWS,
    *CAST,
    aten._unsafe_index_put.default,
    aten.as_strided_scatter.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
    aten.diagonal_scatter.default,
    aten.index_put.default,
    aten.pow.Tensor_Scalar,
    aten.repeat.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    prims.device_put.default,
)


def mark(graph: fx.Graph, results: ResultPolicy) -> None:
    """Write the facts of each fused call into its plan key; that a result stays, only where results are planned.

    Bodies of higher-order operators are marked before the graph that holds them, which knows what runs beside them.
    """
    calls, bodies = _calls(graph), _bodies(graph)
    if not calls and not bodies:
        return
    can_plan = results == "planned" and _can_plan_results(graph)
    alone = _alone(graph, [*calls, *bodies], bodies)
    for node in bodies.keys() - alone:
        for body in bodies[node]:
            _not_alone(body)
    for node in calls:
        facts = [key.ALONE] if node in alone else []
        if can_plan and _namespace(node) == _OURS and _opname(node) == GemmAllReduce.NAME and _stays(node):
            facts.append(key.STAYS)
        _set_plan_key(node, key.with_facts(_plan_key(node), facts))


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if _plan_key(node)]


def _plan_key(node: fx.Node) -> str:
    """Empty for what is no call of ours, or one by hand."""
    if is_in_place(node):
        return str(node.kwargs["plan_key"])
    return str(node.args[-1]) if _namespace(node) == _OURS else ""


def _set_plan_key(node: fx.Node, plan_key: str) -> None:
    if is_in_place(node):
        node.update_kwarg("plan_key", plan_key)
    else:
        node.args = (*node.args[:-1], plan_key)


def _bodies(graph: fx.Graph) -> dict[fx.Node, list[fx.Graph]]:
    """The graphs that each higher-order operator runs."""
    found: dict[fx.Node, list[fx.Graph]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
            continue
        held = [getattr(graph.owning_module, str(one.target), None) for one in _attributes(node)]
        bodies = [one.graph for one in held if isinstance(one, fx.GraphModule)]
        if bodies:
            found[node] = bodies
    return found


def _attributes(node: fx.Node) -> list[fx.Node]:
    return [one for one in node.all_input_nodes if one.op == "get_attr"]


def _not_alone(graph: fx.Graph) -> None:
    """Beside the whole graph runs a collective that is not in it."""
    for node in _calls(graph):
        plan_key = _plan_key(node)
        _set_plan_key(node, key.with_facts(plan_key, sorted(key.facts_of(plan_key) - {key.ALONE})))
    for bodies in _bodies(graph).values():
        for body in bodies:
            _not_alone(body)


def _namespace(node: fx.Node) -> str:
    target = node.target
    return target.namespace if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else ""


def _opname(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return str(node.target._opname)


def _can_plan_results(graph: fx.Graph) -> bool:
    """Inductor's Python code on one stream frees what is dead; a graph of its own would have to own the memory."""
    if inductor_config.cpp_wrapper or inductor_config.triton.cudagraphs:
        return False
    return not has_streams(graph)


def has_streams(graph: fx.Graph) -> bool:
    """Does it run some of its nodes in streams of its own?"""
    return any(_namespace(node) == _STREAMS or "stream" in node.meta.get("custom", ()) for node in graph.nodes)


def _stays(call: fx.Node) -> bool:
    """Neither the result nor anything that may be the same memory is returned, saved, written to or communicated."""
    seen, left = {call}, [call]
    while left:
        for user in left.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if not _only_reads(user):
                return False
            if may_alias(user):
                left.append(user)
    return True


def _only_reads(user: fx.Node) -> bool:
    if is_call(user, WAIT) or _is_getitem(user):
        return True
    if _namespace(user) in ("", *_COMMUNICATION):  # outputs, higher-order operators and whatever else is not known
        return False
    if _opname(user).startswith("_foreach"):  # may be done in place
        return False
    return not user.target._schema.is_mutable  # type: ignore[union-attr]


def may_alias(user: fx.Node) -> bool:
    """Can a call's result be the memory of an argument? Of operators that are not known it can."""
    if is_call(user, (*_MAY_VANISH, *WAIT)) or _is_getitem(user):
        return True
    if not isinstance(user.target, torch._ops.OpOverload):
        return not is_in_place(user)
    return any(one.alias_info is not None for one in user.target._schema.returns)


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _alone(graph: fx.Graph, calls: list[fx.Node], bodies: dict[fx.Node, list[fx.Graph]]) -> set[fx.Node]:
    """The calls beside which no other collective of the graph can run: each has been waited for before, or comes after.

    A higher-order operator whose body communicates is a collective, and a call that what is in its body is judged by.
    One bit for each call, collective and wait: a node has the bits of all that it depends on.
    """
    others = [*_collectives(graph), *(node for node, held in bodies.items() if any(map(_communicates, held)))]
    if not others:
        return set(calls)
    bits = {node: 1 << i for i, node in enumerate(dict.fromkeys([*calls, *others, *_waits(graph)]))}
    depends = _dependences(graph, bits)
    ending = {node for node in bodies if all(map(_ends_all, bodies[node]))}

    def apart(call: fx.Node, other: fx.Node) -> bool:
        is_over = other in ending and bool(depends[call] & bits[other])
        return call is other or is_over or _apart(call, other, bits, depends)

    return {call for call in calls if all(apart(call, other) for other in others)}


def _collectives(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if _namespace(node) in _COMMUNICATION and not is_call(node, WAIT))


def _communicates(graph: fx.Graph) -> bool:
    inner = (body for bodies in _bodies(graph).values() for body in bodies)
    return any(True for _ in _collectives(graph)) or any(map(_communicates, inner))


def _ends_all(graph: fx.Graph) -> bool:
    """Is every collective waited for in the graph itself?"""
    inner = (body for bodies in _bodies(graph).values() for body in bodies)
    return all(any(is_call(user, WAIT) for user in node.users) for node in _collectives(graph)) and all(
        map(_ends_all, inner)
    )


def _waits(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if is_call(node, WAIT))


def _dependences(graph: fx.Graph, bits: dict[fx.Node, int]) -> dict[fx.Node, int]:
    depends: dict[fx.Node, int] = {}
    for node in graph.nodes:
        mask = bits.get(node, 0)
        for source in node.all_input_nodes:
            mask |= depends[source]
        depends[node] = mask
    return depends


def _apart(call: fx.Node, other: fx.Node, bits: dict[fx.Node, int], depends: dict[fx.Node, int]) -> bool:
    if depends[other] & bits[call]:
        return True
    return any(depends[call] & bits[user] for user in other.users if is_call(user, WAIT))
