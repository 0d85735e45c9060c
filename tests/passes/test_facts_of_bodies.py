"""Calls and collectives in the bodies of higher-order operators: what runs beside what, seen from the graph around."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import mkcompile  # noqa: F401  # the operators
from mkcompile.passes import facts
from mkcompile.plan import key

_c10d = torch.ops._c10d_functional
_invoke = torch.ops.higher_order.invoke_subgraph
ALONE = {key.ALONE}
Build = Callable[[fx.Graph, fx.Node], fx.Node]


def call(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A fused call."""
    plan_key = key.with_facts("always;a problem", [])
    return graph.call_function(torch.ops.mkcompile.gemm_all_reduce.default, ([x], [x], None, "sum", 2, "0", plan_key))


def pending(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A collective that nobody has waited for yet."""
    return graph.call_function(_c10d.all_reduce.default, (x, "sum", "0"))


def waited(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A collective, complete."""
    return graph.call_function(_c10d.wait_tensor.default, (pending(graph, x),))


def module(build: Build, *held: fx.GraphModule) -> fx.GraphModule:
    """A graph of one input and one output that may run `held`, marked as the pass marks it."""
    graph = fx.Graph()
    root = nn.Module()
    for i, one in enumerate(held):
        root.add_module(f"body_{i}", one)
    x = graph.placeholder("x")
    graph.output((build(graph, x),))
    made = fx.GraphModule(root, graph)
    facts.mark(made.graph, "ordinary")
    return made


def run(graph: fx.Graph, x: fx.Node, number: int = 0) -> fx.Node:
    """The higher-order operator."""
    return graph.call_function(_invoke, (graph.get_attr(f"body_{number}"), "name", x))


def facts_in(graph: fx.GraphModule) -> list[set[str]]:
    nodes = graph.graph.nodes
    return [set(key.facts_of(node.args[-1])) for node in nodes if "mkcompile" in str(node.target)]


def flying_over(graph: fx.Graph, x: fx.Node) -> fx.Node:
    other = pending(graph, x)
    result = run(graph, x)
    return graph.call_function(torch.add, (graph.call_function(_c10d.wait_tensor.default, (other,)), result))


def complete_before(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return run(graph, waited(graph, x))


def starts_after(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return waited(graph, run(graph, x))


@pytest.mark.parametrize(
    ("build", "expected"), [(run, ALONE), (complete_before, ALONE), (starts_after, ALONE), (flying_over, set())]
)
def test_a_call_in_a_body_is_alone_where_nothing_flies_over_the_body(build: Build, expected: set[str]) -> None:
    body = module(call)
    assert facts_in(body) == [ALONE], "as far as the body knows"
    module(build, body)
    assert facts_in(body) == [expected]


def test_bodies_in_bodies_are_told_too() -> None:
    inner = module(call)
    module(flying_over, module(run, inner))
    assert facts_in(inner) == [set()]


def call_behind(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, run(graph, x))


def call_before(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return run(graph, call(graph, x))


def call_beside(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.add, (run(graph, x), call(graph, x)))


@pytest.mark.parametrize(
    ("build", "in_body", "expected"),
    [
        (call_behind, waited, ALONE),
        (call_behind, pending, set()),
        (call_before, waited, ALONE),
        (call_before, pending, ALONE),
        (call_beside, waited, set()),
        (call_beside, call, ALONE),
    ],
)
def test_a_body_that_communicates_is_a_collective(build: Build, in_body: Build, expected: set[str]) -> None:
    assert facts_in(module(build, module(in_body))) == [expected]
