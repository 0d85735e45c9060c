"""Which GEMM + all-reduce sites are found, in the graphs that Dynamo, AOTAutograd and Inductor make of small functions.

Every case is also computed by four ranks in lock-step, before and after the rewrite, bit for bit.
Legend: x [B, S, K], w [N, K] (a Linear's weight), v [K, N].
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
from tests.regions import CopyToRegion

WORLD_SIZE = 4
GROUP = "0"
FUSED = Counter(gemm_all_reduce=1)
pytestmark = pytest.mark.usefixtures("group")


def reduced(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x, op, GROUP)


def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(x, w))


def with_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(x, w, bias / WORLD_SIZE))


def bias_by_hand(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t() + bias)


def bias_broadcast_from_left(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(bias[None, None, :] + x @ w.t())


def bias_after(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t()) + bias


def two_dimensions(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x[0] @ w.t())


def average(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t(), "avg")


def raw_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w[:, :8].reshape(8, 16))


def sliced_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t()[:, 4:12])


def two_products(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t() + (x * 2) @ w.t())


def three_products_and_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(x, w, bias) + torch.relu(x) @ w.t() + (x + 1) @ w.t())


def joined_inputs(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.cat([x, torch.relu(x)], -1) @ torch.cat([w, w], 1).t())


def lora(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    low = x @ w[:2].t()
    return reduced(x @ w.t() + low @ w.t()[:2])


def scaled_lora(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    low = x @ w[:2].t()
    return reduced(x @ w.t() + (low @ w.t()[:2]) * 2.0)


def scaled(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x @ w.t()) * 0.5)


def divided_twice(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(((x @ w.t()) / 2).reshape(-1, 4) / 4)


def einsum(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.einsum("bsk,nk->bsn", x, w))


def batch_of_one(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.bmm(x[:1], w.t()[None]))


def used_twice(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = reduced(x @ w.t())
    return y + 1, torch.relu(y)


def waited_twice(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = torch.ops._c10d_functional.all_reduce(x @ w.t(), "sum", GROUP)
    one, other = torch.ops._c10d_functional.wait_tensor(y), torch.ops._c10d_functional.wait_tensor(y)
    return torch.ops._c10d_functional.wait_tensor(one) + torch.relu(other)


def other_view_reduced(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x @ w.t()).reshape(-1, 4, 2))


def transposed(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x @ w.t()).transpose(1, 2).reshape(2, -1) * 2)


SINGLE_SITES = [
    linear,
    with_bias,
    bias_by_hand,
    bias_broadcast_from_left,
    bias_after,
    two_dimensions,
    average,
    raw_weight,
    sliced_weight,
    two_products,
    three_products_and_bias,
    joined_inputs,
    lora,
    scaled_lora,
    scaled,
    divided_twice,
    einsum,
    batch_of_one,
    used_twice,
    waited_twice,
    other_view_reduced,
    transposed,
]


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 4, 8, dtype=dtype), torch.randn(16, 8, dtype=dtype), torch.randn(16, dtype=dtype)]


@pytest.fixture(scope="module")
def captured(group: None) -> tuple[Captured, dict[str, Site]]:
    return capture_each(SINGLE_SITES, *inputs())


@pytest.mark.parametrize("function", SINGLE_SITES, ids=lambda function: function.__name__)
def test_the_site_is_found(captured: tuple[Captured, dict[str, Site]], function: Callable[..., object]) -> None:
    _, sites = captured
    site = sites[function.__name__]
    assert site.operator == "gemm_all_reduce", (site.reason, site.detail)


def test_rewritten_graph_computes_the_same(captured: tuple[Captured, dict[str, Site]]) -> None:
    graph, _ = captured
    assert graph.calls == Counter(gemm_all_reduce=len(SINGLE_SITES)) and not graph.left
    assert_same_values(graph, WORLD_SIZE)


@pytest.mark.parametrize("function", [with_bias, einsum, two_products])
def test_symbolic_rows(function: Callable[..., object]) -> None:
    x, w, bias = inputs()
    torch._dynamo.mark_dynamic(x, 1)
    (graph,) = capture(function, x, w, bias)
    assert graph.operators == FUSED
    assert any(isinstance(size, torch.SymInt) for node in graph.after.graph.nodes for size in _shape(node))
    assert_same_values(graph, WORLD_SIZE)


def _shape(node: torch.fx.Node) -> tuple[object, ...]:
    val = node.meta.get("val")
    return tuple(val.shape) if isinstance(val, Tensor) else ()


def test_backward_of_column_parallel_linear() -> None:
    def column(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(nnf.linear(CopyToRegion.apply(x, 0, GROUP), w))

    x, w, _ = (one.requires_grad_() for one in inputs())
    forward, backward = capture(column, x, w, backward=True)
    assert not forward.sites
    assert backward.operators == FUSED
    assert_same_values(backward, WORLD_SIZE)


@pytest.mark.parametrize("num_linears", [2, 3])
def test_gradients_of_linears_that_share_an_input_become_one_all_reduce(num_linears: int) -> None:
    def columns(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [nnf.linear(CopyToRegion.apply(x, 0, GROUP), w) for w in weights]

    x = torch.randn(2, 4, 8, requires_grad=True)
    weights = [torch.randn(16, 8, requires_grad=True) for _ in range(num_linears)]
    _, backward = capture(columns, x, *weights, backward=True)
    assert backward.operators == FUSED
    assert backward.sites[0].problem is not None
    assert backward.sites[0].problem.num_gemms == num_linears
    assert_same_values(backward, WORLD_SIZE)


def reduced_in_float32(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x @ w.t()).float()).reshape(-1, 16).bfloat16() + 1


def test_a_cast_that_is_undone_after_the_reduction() -> None:
    (graph,) = capture(reduced_in_float32, *inputs(torch.bfloat16))
    assert graph.operators == FUSED
    assert_same_values(graph, WORLD_SIZE)


def test_rows_with_bfloat16() -> None:
    (graph,) = capture(with_bias, *inputs(torch.bfloat16))
    assert graph.operators == FUSED
    assert_same_values(graph, WORLD_SIZE, tolerance=2**-7)
