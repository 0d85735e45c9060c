"""What torch's own pass (`torch._inductor.fx_passes.micro_pipeline_tp`, async TP) would fuse, we fuse.

Its pattern finders run on the graphs of this folder's programs, next to ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.fx_passes import micro_pipeline_tp as async_tp

from mkcompile.passes.graph import collectives
from tests.captured import Captured, capture, capture_each
from tests.operators import test_all_gather_gemm as gathers
from tests.operators import test_gemm_reduce_scatter as scatters
from tests.operators import test_scaled_gemms as scaled

WORLD_SIZE = 4
pytestmark = pytest.mark.usefixtures("group")


def would_fuse(graph: fx.Graph) -> set[fx.Node]:
    """The collectives that async TP would replace. It asks last dimensions for 1024 columns, which is left out here."""
    found: set[fx.Node] = set()
    for gather in async_tp.find_all_gather_patterns(graph):
        products = async_tp._find_consumer_matmuls(gather.res_node)
        if any(gather.res_node not in one.arg_ancestor_nodes for one in products):
            found.add(gather.ag_node)
    for scatter in async_tp.find_reduce_scatter_patterns(graph):
        is_read_once = len(scatter.input_node.users) == 1
        if is_read_once and async_tp._find_producer_matmul(scatter.input_node) is not None:
            found.add(scatter.wait_tensor_node.args[0])  # type: ignore[arg-type]
    return found


def compared(graph: Captured) -> tuple[set[str], set[str]]:
    """Names of the collectives that async TP would fuse, and of those that we do."""
    nodes = list(collectives(graph.before.graph))
    assert len(nodes) == len(graph.sites)
    ours = {node.name for node, site in zip(nodes, graph.sites, strict=True) if site.operator is not None}
    return {node.name for node in would_fuse(graph.before.graph)}, ours


def all_in_one(functions: Sequence[Callable[..., Any]], given: list[Tensor]) -> list[Captured]:
    graph, _ = capture_each(functions, *given)
    return [graph]


def one_by_one(functions: Sequence[Callable[..., Any]], given: list[Tensor]) -> list[Captured]:
    return [graph for function in functions for graph in capture(function, *given)]


# Programs, their inputs, and how many of them async TP fuses at least.
PROGRAMS: dict[str, tuple[Callable[[], list[Captured]], int]] = {
    "gathers": (lambda: all_in_one(gathers.SINGLE_SITES, gathers.inputs()), 5),
    "scatters": (lambda: all_in_one(scatters.SINGLE_SITES, scatters.inputs()), 5),
    "scaled scatters": (lambda: one_by_one(list(scaled.REDUCED), scaled.inputs()), 3),
    "scaled gathers": (lambda: one_by_one(scaled.GATHERED, scaled.inputs()), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_async_tp_fuses_is_fused(name: str) -> None:
    graphs, at_least = PROGRAMS[name]
    num_theirs = 0
    for graph in graphs():
        theirs, ours = compared(graph)
        assert theirs <= ours
        num_theirs += len(theirs)
    assert num_theirs >= at_least
    torch._dynamo.reset()
