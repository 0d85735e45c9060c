"""Products of 8-bit floats beside collectives: which sites are found, and that they compute what the graph did.

Every case is also computed by four ranks in lock-step, before and after the rewrite, bit for bit.
Legend: x [B, S, K] = [4, 8, 16], w [N, K] (a Linear's weight) in float8_e4m3fn; one scale for each tensor (`of_x`,
`of_w`), or one for each row of x (`of_rows` [B * S, 1]) and of w (`of_columns` [1, N]).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as nnf

from mkcompile.passes.judge import judge_for
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Site
from mkcompile.plan.decide import Policy
from mkcompile.plan.topology import preset
from tests.captured import Captured, assert_same_values, capture, capture_each

WORLD_SIZE = 4
GROUP = "0"
E4M3, BYTES = torch.float8_e4m3fn, torch.uint8
BATCH, ROWS, INNER, COLUMNS = 4, 8, 16, 32
SEED = 1  # no scale is zero
Function = Callable[..., Any]
c10d = torch.ops._c10d_functional

needs_row_scales = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 has no product with a scale for each row on the CPU"
)
pytestmark = pytest.mark.usefixtures("group")


def scaled(x: Tensor, w: Tensor, scales: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """`x @ w.t()` of scaled operands, with the leading dimensions of x."""
    out = torch._scaled_mm(x.reshape(-1, x.shape[-1]), w.t(), *scales, out_dtype=torch.bfloat16, **options)
    return out.reshape(*x.shape[:-1], w.shape[0])


def reduced(y: Tensor) -> Tensor:
    return funcol.all_reduce(y, "sum", GROUP)


def scattered(y: Tensor, dim: int) -> Tensor:
    return funcol.reduce_scatter_tensor(y, "sum", dim, GROUP)


def flat_gathered(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD_SIZE, GROUP))


def to_reduction(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return reduced(scaled(x, w, (of_x, of_w)))


def to_reduction_with_bias(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return reduced(scaled(x, w, (of_x, of_w), bias=bias, use_fast_accum=True))


def sum_to_reduction(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return reduced(scaled(x, w, (of_x, of_w)) + scaled(x, w, (of_w, of_x)))


def to_scatter_of_batch(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return scattered(scaled(x, w, (of_x, of_w)), 0)


def to_scatter_of_sequence(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return scattered(scaled(x, w, (of_x, of_w)), 1)


def to_scatter_of_columns(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return scattered(scaled(x, w, (of_x, of_w)), 2)


def to_scatter_of_rows(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return scattered(scaled(x[0], w, (of_x, of_w)), 0)


def gathered_batch(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return scaled(flat_gathered(x), w, (of_x, of_w))


def gathered_as_bytes(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return scaled(flat_gathered(x.view(BYTES)).view(E4M3), w, (of_x, of_w), bias=bias)


def gathered_sequence_in_pieces_of_bytes(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    """As torchao does it: `cat` knows no 8-bit floats on some devices."""
    pieces = [piece.view(BYTES) for piece in flat_gathered(x).split(BATCH)]
    return scaled(torch.cat(pieces, 1).view(E4M3), w, (of_x, of_w))


def gathered_sequence_as_bytes(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    """One view behind the `cat`."""
    return scaled(torch.cat(flat_gathered(x.view(BYTES)).chunk(WORLD_SIZE), 1).view(E4M3), w, (of_x, of_w))


def gathered_columns(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    whole = torch.cat(flat_gathered(x[..., : INNER // WORLD_SIZE].contiguous().view(BYTES)).chunk(WORLD_SIZE), 2)
    return scaled(whole.view(E4M3), w, (of_x, of_w))


def gathered_for_two_weights(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> list[Tensor]:
    g = flat_gathered(x.view(BYTES)).view(E4M3)
    return [scaled(g, w, (of_x, of_w)), scaled(g, w[:COLUMNS], (of_x, of_w * 2), bias=bias)]


def gathered_and_kept(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> list[Tensor]:
    g = flat_gathered(x.view(BYTES)).view(E4M3)
    return [scaled(g, w, (of_x, of_w)), g.float().sum(1)]


REDUCED = {
    to_reduction: "scaled_gemm_all_reduce",
    to_reduction_with_bias: "scaled_gemm_all_reduce",
    sum_to_reduction: "scaled_gemm_all_reduce",
    to_scatter_of_batch: "scaled_gemm_reduce_scatter",
    to_scatter_of_sequence: "scaled_gemm_reduce_scatter",
    to_scatter_of_columns: "scaled_gemm_reduce_scatter",
    to_scatter_of_rows: "scaled_gemm_reduce_scatter",
}
GATHERED = [
    gathered_batch,
    gathered_as_bytes,
    gathered_sequence_in_pieces_of_bytes,
    gathered_sequence_as_bytes,
    gathered_columns,
    gathered_for_two_weights,
    gathered_and_kept,
]
# With a scale for each row: how many rows the product has.
BY_ROW: dict[Function, int] = {
    to_reduction: BATCH * ROWS,
    to_scatter_of_sequence: BATCH * ROWS,
    gathered_sequence_in_pieces_of_bytes: BATCH * ROWS * WORLD_SIZE,
}


def inputs(rows_of_scales: int = 0) -> list[Tensor]:
    x, w = torch.zeros(BATCH, ROWS, INNER).to(E4M3), torch.zeros(COLUMNS, INNER).to(E4M3)
    scales = [torch.ones(()), torch.ones(())]
    if rows_of_scales:
        scales = [torch.ones(rows_of_scales, 1), torch.ones(1, COLUMNS)]
    return [x, w, *scales, torch.zeros(COLUMNS, dtype=torch.bfloat16)]


def only(function: Function, *given: Tensor) -> Captured:
    (graph,) = capture(function, *given)
    return graph


@pytest.fixture(scope="module")
def reductions(group: None) -> tuple[Captured, dict[str, Site]]:
    return capture_each(list(REDUCED), *inputs())


@pytest.mark.parametrize("function", REDUCED, ids=lambda function: function.__name__)
def test_a_scaled_product_before_a_reduction_is_fused(
    reductions: tuple[Captured, dict[str, Site]], function: Function
) -> None:
    site = reductions[1][function.__name__]
    assert site.operator == REDUCED[function], (site.reason, site.detail)
    problem = site.problem
    assert problem is not None
    assert (problem.dtype, problem.dtype_bytes, problem.out_bytes, problem.scales) == ("float8_e4m3fn", 1, 2, "tensor")


def test_scaled_products_before_reductions_compute_the_same(reductions: tuple[Captured, dict[str, Site]]) -> None:
    graph, _ = reductions
    assert graph.calls == Counter(REDUCED.values()) and not graph.left
    assert_same_values(graph, WORLD_SIZE, seed=SEED)


@pytest.mark.parametrize("function", GATHERED, ids=lambda function: function.__name__)
def test_scaled_products_of_a_gathered_tensor_are_fused(function: Function) -> None:
    graph = only(function, *inputs())
    assert graph.operators == Counter(all_gather_scaled_gemm=1) and not graph.left
    assert graph.calls == Counter(all_gather_scaled_gemm=1)
    assert_same_values(graph, WORLD_SIZE, seed=SEED)


@needs_row_scales
@pytest.mark.parametrize("function", BY_ROW, ids=lambda function: function.__name__)
def test_a_scale_for_each_row_is_fused(function: Function) -> None:
    graph = only(function, *inputs(BY_ROW[function]))
    assert sum(graph.calls.values()) == 1 and not graph.left
    problem = graph.sites[0].problem
    assert problem is not None and problem.scales == "row"
    assert_same_values(graph, WORLD_SIZE, seed=SEED)


def test_symbolic_rows() -> None:
    x, *rest = inputs()
    for function in (to_scatter_of_batch, gathered_sequence_in_pieces_of_bytes):
        torch._dynamo.mark_dynamic(x, 1)
        graph = only(function, x, *rest)
        assert sum(graph.calls.values()) == 1 and not graph.left
        assert_same_values(graph, WORLD_SIZE, seed=SEED)


def test_a_network_of_scaled_products_is_fused_in_parts() -> None:
    def network(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
        hidden = nnf.relu(scaled(flat_gathered(x), w, (of_x, of_w))).to(E4M3)
        return scattered(scaled(hidden, w.t().contiguous(), (of_x, of_w)), 1)

    graph = only(network, *inputs())
    assert graph.operators == Counter(all_gather_scaled_gemm=1, scaled_gemm_reduce_scatter=1)
    assert_same_values(graph, WORLD_SIZE, tolerance=2**-7, seed=SEED)  # large sums, which are rounded


def scaled_result(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return reduced(scaled(x, w, (of_x, of_w), scale_result=of_x))


def two_accumulations(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return reduced(scaled(x, w, (of_x, of_w)) + scaled(x, w, (of_w, of_x), use_fast_accum=True))


def beside_a_plain_product(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return reduced(scaled(x, w, (of_x, of_w)) + x.bfloat16() @ w.t().bfloat16())


def read_as_the_weight(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    return torch._scaled_mm(w, flat_gathered(x[0]).t(), of_w, of_x, out_dtype=torch.bfloat16)


def reads_gathered_scales(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
    of_rows = flat_gathered(of_x.reshape(1, 1).expand(BATCH * ROWS // WORLD_SIZE, 1).contiguous())
    return scaled(x, w, (of_rows, of_w.reshape(1, 1).expand(1, COLUMNS).contiguous()))


REFUSED: dict[Function, Reason] = {
    scaled_result: Reason.SCALES,
    two_accumulations: Reason.UNEQUAL_PRODUCTS,
    beside_a_plain_product: Reason.UNEQUAL_PRODUCTS,
    read_as_the_weight: Reason.GEMM_KIND,
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_refused_with_its_reason(function: Function) -> None:
    assert_refused(function, REFUSED[function])


@needs_row_scales
def test_gathered_scales_are_left_alone() -> None:
    assert_refused(reads_gathered_scales, Reason.SCALES_GATHERED)


def assert_refused(function: Function, reason: Reason) -> None:
    (site,) = only(function, *inputs()).sites
    assert site.operator is None and site.reason is reason, (site.reason, site.detail)


def test_no_gain_is_predicted_while_there_is_no_kernel() -> None:
    judge = judge_for(preset("8xh200"), Policy())
    for function in (to_reduction, gathered_batch):
        (graph,) = capture(function, *inputs(), judge=judge)
        assert graph.sites[0].reason is Reason.DTYPE and not graph.calls
