"""Which GEMM + reduce-scatter sites are found, in the graphs that Dynamo, AOTAutograd and Inductor make.

Every case is also computed by four ranks in lock-step, before and after the rewrite, bit for bit.
Legend: x [B, S, K] = [4, 8, 8], w [N, K] (a Linear's weight), N = 16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as nnf

from mkcompile.passes.site import Site
from tests.captured import Captured, assert_same_values, capture, capture_each
from tests.regions import GatherFromSequence

WORLD_SIZE = 4
GROUP = "0"
FUSED = Counter(gemm_reduce_scatter=1)
c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.usefixtures("group")


def scattered(x: Tensor, dim: int, op: str = "sum") -> Tensor:
    return funcol.reduce_scatter_tensor(x, op, dim, GROUP)


def flat_scattered(x: Tensor, op: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, WORLD_SIZE, GROUP))


def along_batch(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t(), 0)


def along_sequence(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t(), 1)


def along_columns(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t(), 2)


def batch_of_one(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x[:1] @ w.t(), 1)


def batch_of_one_by_views(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return flat_scattered((x[:1] @ w.t()).reshape(8, 16)).reshape(1, 2, 16)


def two_dimensions(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x[0] @ w.t(), 0)


def sequence_first(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Megatron: [S * B, N] read as [S, B, N]."""
    return flat_scattered((x.reshape(32, 8) @ w.t()).reshape(8, 4, 16))


def average(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t(), 1, "avg")


def with_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(nnf.linear(x, w, bias / WORLD_SIZE), 1)


def bias_by_hand(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t() + bias, 2)


def two_products(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t() + torch.relu(x) @ w.t(), 1)


def three_products(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t() + torch.relu(x) @ w.t() + (x + 1) @ w.t(), 1)


def scaled(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.t() / 2, 1)


def by_chunks(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return flat_scattered(torch.cat((x @ w.t()).chunk(WORLD_SIZE, 1)))


def by_sizes(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return flat_scattered(torch.cat((x @ w.t()).split([4, 4, 4, 4], 2)))


def by_slices(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = x @ w.t()
    return flat_scattered(torch.cat([y[:, 0:2], y[:, 2:4], y[:, 4:6], y[:, 6:]], 0))


def by_slices_of_negative_dim(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = x @ w.t()
    return flat_scattered(torch.cat([y[..., 4 * i : 4 * i + 4].contiguous() for i in range(WORLD_SIZE)], -3))


def by_slices_and_views(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return flat_scattered(torch.cat((x @ w.t()).chunk(WORLD_SIZE, 1)).reshape(32, 16))


def heads(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Columns read as 4 heads of 4, one head for each rank."""
    return scattered((x @ w.t()).reshape(4, 8, 4, 4), 2)


def rows_in_parts(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Rows read as [4, 8], columns as [2, 8]; scattered along the 8 rows."""
    return scattered((x @ w.t()).reshape(4, 8, 2, 8), 1)


def ranks_moved_from_the_sequence(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return flat_scattered((x @ w.t()).view(4, WORLD_SIZE, 2, 16).movedim(1, 0).reshape(16, 2, 16))


def ranks_moved_from_the_columns(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return flat_scattered(nnf.linear(x, w, bias).view(4, 8, WORLD_SIZE, 4).movedim(2, 0).reshape(16, 8, 4))


def raw_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(x @ w.reshape(8, 16), 1)


SINGLE_SITES = [
    along_batch,
    along_sequence,
    along_columns,
    batch_of_one,
    batch_of_one_by_views,
    two_dimensions,
    sequence_first,
    average,
    with_bias,
    bias_by_hand,
    two_products,
    three_products,
    scaled,
    by_chunks,
    by_sizes,
    by_slices,
    by_slices_of_negative_dim,
    by_slices_and_views,
    heads,
    rows_in_parts,
    raw_weight,
    ranks_moved_from_the_sequence,
    ranks_moved_from_the_columns,
]


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(4, 8, 8, dtype=dtype), torch.randn(16, 8, dtype=dtype), torch.randn(16, dtype=dtype)]


@pytest.fixture(scope="module")
def captured(group: None) -> tuple[Captured, dict[str, Site]]:
    return capture_each(SINGLE_SITES, *inputs())


@pytest.mark.parametrize("function", SINGLE_SITES, ids=lambda function: function.__name__)
def test_the_site_is_found(captured: tuple[Captured, dict[str, Site]], function: Callable[..., object]) -> None:
    _, sites = captured
    site = sites[function.__name__]
    assert site.operator == "gemm_reduce_scatter", (site.reason, site.detail)


def test_rewritten_graph_computes_the_same(captured: tuple[Captured, dict[str, Site]]) -> None:
    graph, _ = captured
    assert graph.calls == Counter(gemm_reduce_scatter=len(SINGLE_SITES)) and not graph.left
    assert_same_values(graph, WORLD_SIZE)


@pytest.mark.parametrize(("along", "dynamic_dim"), [(along_sequence, 1), (along_sequence, 0), (along_columns, 1)])
def test_symbolic_rows(along: Callable[..., object], dynamic_dim: int) -> None:
    x, w, bias = inputs()
    torch._dynamo.mark_dynamic(x, dynamic_dim)
    (graph,) = capture(along, x, w, bias)
    assert graph.operators == FUSED
    assert_same_values(graph, WORLD_SIZE)


def test_all_sizes_symbolic() -> None:
    (graph,) = capture(along_sequence, *inputs(), dynamic=True)
    assert graph.operators == FUSED
    assert_same_values(graph, WORLD_SIZE)


@pytest.mark.parametrize("num_linears", [1, 2, 3])
def test_gradients_of_linears_that_share_a_gathered_input(num_linears: int) -> None:
    def columns(x: Tensor, *weights: Tensor) -> list[Tensor]:
        gathered = GatherFromSequence.apply(x, 1, GROUP)
        return [nnf.linear(gathered, w) for w in weights]

    x = torch.randn(4, 2, 8, requires_grad=True)
    weights = [torch.randn(16, 8, requires_grad=True) for _ in range(num_linears)]
    _, backward = capture(columns, x, *weights, backward=True)
    assert backward.calls["gemm_reduce_scatter"] == 1 and not backward.left
    assert backward.sites[0].problem is not None
    assert backward.sites[0].problem.num_gemms == num_linears
    assert_same_values(backward, WORLD_SIZE)


def test_gradients_that_were_scattered_one_by_one_are_added_first() -> None:
    def columns(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [nnf.linear(GatherFromSequence.apply(x, 1, GROUP), w) for w in weights]

    x = torch.randn(4, 2, 8, requires_grad=True)
    weights = [torch.randn(16, 8, requires_grad=True) for _ in range(2)]
    _, backward = capture(columns, x, *weights, backward=True)
    assert backward.calls["gemm_reduce_scatter"] == 1 and not backward.left
    assert_same_values(backward, WORLD_SIZE)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_cast_that_is_undone_after_the_reduction(dim: int) -> None:
    def reduced_in_float32(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return scattered((x @ w.t()).float(), dim).bfloat16() + 1

    (graph,) = capture(reduced_in_float32, *inputs(torch.bfloat16))
    assert graph.operators == FUSED and not graph.left
    assert_same_values(graph, WORLD_SIZE)


def test_rows_with_bfloat16() -> None:
    (graph,) = capture(with_bias, *inputs(torch.bfloat16))
    assert graph.operators == FUSED
    assert_same_values(graph, WORLD_SIZE, tolerance=2**-7)
