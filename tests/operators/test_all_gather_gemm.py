"""Which all-gather + GEMM sites are found, in the graphs that Dynamo, AOTAutograd and Inductor make.

Every case is also computed by four ranks in lock-step, before and after the rewrite, bit for bit.
Legend: x [B, S, K] = [4, 2, 8] is a rank's shard, w [N, K] (a Linear's weight), N = 16. Each function adds a number of
its own to x, so that no two of them gather the same tensor.
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

from mkcompile.ops.all_gather_gemm import FORM_INPUT, FORM_TRANSPOSED, FORM_WEIGHT, FORM_WEIGHT_TRANSPOSED
from mkcompile.passes.site import Site
from tests.captured import Captured, assert_same_values, capture, capture_each
from tests.regions import ScatterToSequence, all_gather

WORLD_SIZE = 4
GROUP = "0"
Function = Callable[[Tensor, Tensor, Tensor], Any]
c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.usefixtures("group")


def gathered(x: Tensor, dim: int) -> Tensor:
    return all_gather(x, dim, GROUP)


def flat_gathered(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD_SIZE, GROUP))


def along_batch(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 1, 0) @ w.t()


def along_sequence(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 2, 1) @ w.t()


def along_columns(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """The inner dimension, of 2 columns a rank: torch's async TP leaves it alone below 1024."""
    return gathered((x + 3)[..., :2], 2) @ w.t()


def batch_of_one(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered((x + 4)[:1], 1) @ w.t()


def columns_of_one_row(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered((x + 5)[:1, :1, :2], 2) @ w.t()


def two_dimensions(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x[0] + 6, 0) @ w.t()


def by_slices(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    whole = flat_gathered(x + 7)
    return torch.cat([whole[4 * i : 4 * i + 4] for i in range(WORLD_SIZE)], 1) @ w.t()


def by_sizes(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(flat_gathered(x + 8).split([4, 4, 4, 4]), 1) @ w.t()


def by_views(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Several reshapes, as Megatron's [S, B, H] leaves them."""
    return flat_gathered(x + 9).view(2, 8, 2, 8).view(16, 2, 8).view(32, 8) @ w.t()


def with_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return nnf.linear(gathered(x + 10, 1), w, bias)


def bias_by_hand(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 11, 1) @ w.t() + bias


def bias_by_hand_first(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return bias + gathered(x[0] + 12, 0) @ w.t()


def bias_with_unit_dimensions(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 13, 1) @ w.t() + bias.view(1, 1, 16)


def raw_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 14, 1) @ w.reshape(8, 16)


def sliced_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 15, 1) @ w.t()[:, 4:12]


def three_linears(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    g = gathered(x + 16, 1)
    return [nnf.linear(g, w), nnf.linear(g, w + 1, bias), g @ (w * 2).t() + bias]


def used_elsewhere(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    g = gathered(x + 17, 1)
    return [g @ w.t(), g.sum(1)]


def returned(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    g = gathered(x + 18, 1)
    return [g @ w.t(), g]


def returned_as_rows(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    g = gathered((x + 19)[:1], 1)
    return [g @ w.t(), g.view(8, 8)]


def einsum(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("bsk,nk->bsn", gathered(x + 20, 1), w)


def batched_with_one_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.bmm(gathered(x[0] + 21, 0)[None], w.t()[None])


def transposed(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a weight: g^T y."""
    return gathered(x[0] + 22, 0).t() @ w[:, :4].reshape(8, 8)[:8]


def of_weights(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """y g, where the gathered tensor is the weight [K, N] itself."""
    return w @ gathered(x[0] + 23, 0)


def of_transposed_weights(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """y g^T, as a Linear with a gathered weight, or as the logits of a contrastive loss."""
    return w @ gathered(x[0] + 24, 0).t()


def heads_joined(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Shards with split heads, which the GEMM reads joined."""
    return gathered((x + 25).view(4, 2, 2, 4), 1).flatten(2) @ w.t()


def rows_by_hand_in_heads(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return flat_gathered((x + 26).view(8, 2, 4)).view(32, 8) @ w.t()


def ranks_moved_to_the_sequence(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """As vLLM gathers along a dimension."""
    return flat_gathered(x + 27).view(WORLD_SIZE, 4, 2, 8).movedim(0, 1).reshape(4, 8, 8) @ w.t()


def ranks_moved_to_the_columns(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return (
        flat_gathered((x + 28)[..., :2].contiguous()).view(WORLD_SIZE, 4, 2, 2).movedim(0, 2).reshape(4, 2, 8) @ w.t()
    )


def unbound(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(flat_gathered(x + 29).view(WORLD_SIZE, 4, 2, 8).unbind(0), 1) @ w.t()


SINGLE_SITES: list[Function] = [
    along_batch,
    along_sequence,
    along_columns,
    batch_of_one,
    columns_of_one_row,
    two_dimensions,
    by_slices,
    by_sizes,
    by_views,
    with_bias,
    bias_by_hand,
    bias_by_hand_first,
    bias_with_unit_dimensions,
    raw_weight,
    sliced_weight,
    three_linears,
    used_elsewhere,
    returned,
    returned_as_rows,
    einsum,
    batched_with_one_weight,
    transposed,
    of_weights,
    of_transposed_weights,
    heads_joined,
    rows_by_hand_in_heads,
    ranks_moved_to_the_sequence,
    ranks_moved_to_the_columns,
    unbound,
]


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(4, 2, 8, dtype=dtype), torch.randn(16, 8, dtype=dtype), torch.randn(16, dtype=dtype)]


def name_of(case: Any) -> str:
    return str(getattr(case, "__name__", ""))


@pytest.fixture(scope="module")
def captured(group: None) -> tuple[Captured, dict[str, Site]]:
    return capture_each(SINGLE_SITES, *inputs())


@pytest.mark.parametrize("function", SINGLE_SITES, ids=name_of)
def test_the_site_is_found(captured: tuple[Captured, dict[str, Site]], function: Function) -> None:
    _, sites = captured
    site = sites[function.__name__]
    assert site.operator == "all_gather_gemm", (site.reason, site.detail)


def test_rewritten_graph_computes_the_same(captured: tuple[Captured, dict[str, Site]]) -> None:
    graph, _ = captured
    assert graph.calls == Counter(all_gather_gemm=len(SINGLE_SITES)) and not graph.left
    assert not graph.after.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert_same_values(graph, WORLD_SIZE)


def only_call(graph: Captured) -> dict[str, Any]:
    """The arguments of the one fused call, by name."""
    (node,) = graph.after.graph.find_nodes(op="call_function", target=torch.ops.mkcompile.all_gather_gemm.default)
    names = [one.name for one in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=True))


def test_three_linears_share_one_gather_and_keep_their_biases() -> None:
    (graph,) = capture(three_linears, *inputs())
    call = only_call(graph)
    assert call["forms"] == [FORM_INPUT] * 3
    assert [one is not None for one in call["bias"]] == [False, True, True]
    assert not call["return_gathered"]


def test_the_gathered_tensor_is_returned_only_where_it_is_needed() -> None:
    for function, needed in ((along_sequence, False), (used_elsewhere, True), (returned, True)):
        (graph,) = capture(function, *inputs())
        assert only_call(graph)["return_gathered"] is needed


@pytest.mark.parametrize(
    ("function", "form"),
    [(transposed, FORM_TRANSPOSED), (of_weights, FORM_WEIGHT), (of_transposed_weights, FORM_WEIGHT_TRANSPOSED)],
    ids=name_of,
)
def test_the_gathered_tensor_may_be_either_operand(function: Function, form: int) -> None:
    (graph,) = capture(function, *inputs())
    assert only_call(graph)["forms"] == [form]


def test_duplicate_gathers_of_an_inference_graph_become_one() -> None:
    def each_its_own(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        return [nnf.linear(gathered(x, 1), w), nnf.linear(gathered(x, 1), w, bias)]

    (graph,) = capture(each_its_own, *inputs())
    assert graph.calls == Counter(all_gather_gemm=1) and not graph.left
    assert only_call(graph)["forms"] == [FORM_INPUT] * 2
    assert_same_values(graph, WORLD_SIZE)


def test_a_product_whose_weight_comes_from_the_gathered_tensor_is_left_out() -> None:
    """As when activations are gathered again and recomputed in a backward graph."""

    def dependent(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        g = gathered(x[0], 0)
        y = g @ w.t()
        return [y, y.relu().t() @ g]

    (graph,) = capture(dependent, *inputs())
    call = only_call(graph)
    assert call["forms"] == [FORM_INPUT] and call["return_gathered"]
    assert_same_values(graph, WORLD_SIZE)


def test_a_weight_that_is_made_after_the_gather_is_fused() -> None:
    def late_weight(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        g = gathered(x, 1)
        y = g @ w.t()
        return [y, g @ (w.sin() * 2).t(), y.sum(0)]

    (graph,) = capture(late_weight, *inputs())
    assert only_call(graph)["forms"] == [FORM_INPUT] * 2
    assert_same_values(graph, WORLD_SIZE)


@pytest.mark.parametrize("batch", [1, 3])
def test_both_gradients_of_a_row_parallel_linear_share_one_gather(batch: int) -> None:
    x = torch.randn(batch, 8, 8, requires_grad=True)
    w, bias = torch.randn(16, 8, requires_grad=True), torch.randn(16, requires_grad=True)
    _, backward = capture(
        lambda x, w, b: ScatterToSequence.apply(nnf.linear(x, w, b), 1, GROUP), x, w, bias, backward=True
    )
    call = only_call(backward)
    assert sorted(call["forms"]) in ([FORM_INPUT, FORM_TRANSPOSED], [FORM_INPUT, FORM_WEIGHT])
    assert call["return_gathered"]  # for the gradient of the bias
    assert_same_values(backward, WORLD_SIZE)


def test_training_returns_the_gathered_input_for_backward() -> None:
    x, w, bias = (one.requires_grad_() for one in inputs())
    forward, backward = capture(
        lambda x, w, b: nnf.linear(funcol.all_gather_tensor_autograd(x, 1, GROUP), w, b), x, w, bias, backward=True
    )
    assert only_call(forward)["return_gathered"] and not forward.left
    assert_same_values(forward, WORLD_SIZE)
    assert backward.calls == Counter(gemm_reduce_scatter=1)


@pytest.mark.parametrize("dynamic_dim", [0, 1])
@pytest.mark.parametrize("function", [along_batch, along_sequence, used_elsewhere, with_bias], ids=name_of)
def test_symbolic_rows(function: Function, dynamic_dim: int) -> None:
    x, w, bias = inputs()
    torch._dynamo.mark_dynamic(x, dynamic_dim)
    (graph,) = capture(function, x, w, bias)
    assert graph.operators == Counter(all_gather_gemm=1)
    assert_same_values(graph, WORLD_SIZE)


def test_all_sizes_symbolic() -> None:
    (graph,) = capture(three_linears, *inputs(), dynamic=True)
    assert graph.operators == Counter(all_gather_gemm=1)
    assert not only_call(graph)["return_gathered"]
    assert_same_values(graph, WORLD_SIZE)


def test_rows_with_bfloat16() -> None:
    (graph,) = capture(three_linears, *inputs(torch.bfloat16))
    assert graph.operators == Counter(all_gather_gemm=1)
    assert_same_values(graph, WORLD_SIZE, tolerance=2**-7)
