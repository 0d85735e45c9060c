"""Products of one row as `max-autotune` writes them: fused as other products are, and left as they were where not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from mkcompile.passes.reason import Reason
from tests.captured import Captured, assert_same_values, capture

WORLD_SIZE = 4
TOLERANCE = 2e-2
aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("group")


def product(x: Tensor, w: Tensor) -> Tensor:
    """As Inductor's decomposition of mm, which it does not apply on a CPU."""
    return (x.float().unsqueeze(2) * w.float().unsqueeze(0)).sum(dim=1)


def row_parallel(x: Tensor, w: Tensor) -> Tensor:
    """A token of a decoder."""
    return funcol.all_reduce(product(x.reshape(1, -1), w.t()).to(x.dtype).reshape(1, 1, -1), "sum", "0")


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 1, 16, dtype=dtype), torch.randn(24, 16, dtype=dtype)


def operators_of(graph: torch.fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_is_fused(dtype: torch.dtype) -> None:
    (graph,) = capture(row_parallel, *inputs(dtype))
    assert graph.calls == {"gemm_all_reduce": 1} and not graph.left
    assert not graph.after.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert_same_values(graph, WORLD_SIZE, tolerance=TOLERANCE)


def test_a_row_that_is_not_fused_stays_a_sum_of_products() -> None:
    (graph,) = capture(row_parallel, *inputs(), judge=lambda problem: Reason.NO_GAIN)
    assert graph.sites[0].reason is Reason.NO_GAIN
    assert operators_of(graph.after) == operators_of(graph.before)
    assert_same_values(graph, WORLD_SIZE, tolerance=0.0)


def more_rows(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(product(torch.cat([x[0], x[0]]), w.t()).to(x.dtype), "sum", "0")


def of_a_row_in_float32(x: Tensor, w: Tensor) -> Tensor:
    row = torch.sin(x.float()).reshape(1, -1)
    return funcol.all_reduce((row.unsqueeze(2) * w.t().float().unsqueeze(0)).sum(dim=1).to(x.dtype), "sum", "0")


def not_rounded(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(product(x.reshape(1, -1), w.t()), "sum", "0")


def of_a_number(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(product(x[0, :, :1], w.t()).to(x.dtype), "sum", "0")


def rounded_before(x: Tensor, w: Tensor) -> Tensor:
    row = x.reshape(1, -1).to(torch.float16)
    return funcol.all_reduce((row.unsqueeze(2) * w.t().float().unsqueeze(0)).sum(dim=1).to(x.dtype), "sum", "0")


@pytest.mark.parametrize("function", [more_rows, of_a_row_in_float32, not_rounded, of_a_number, rounded_before])
def test_other_sums_of_products_stay(function: object) -> None:
    graph: Captured
    (graph,) = capture(function, *inputs())  # type: ignore[arg-type]
    assert graph.sites[0].reason is Reason.NO_GEMM
    assert operators_of(graph.after) == operators_of(graph.before)
