"""Which feed-forward networks are found, in the graphs that Dynamo, AOTAutograd and Inductor make.

Every case is also computed by four ranks in lock-step, before and after the rewrite.
Legend: x [B, S, K] = [4, 8, 8], up [2 H, K] and down [N, H] (Linear's weights), H = 12, N = 8. Each function adds a
number of its own to x, so that no two of them share a gather.
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

from mkcompile.ops.problem import Problem
from mkcompile.passes.judge import kernels_first
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Site
from mkcompile.plan.decide import Policy
from mkcompile.plan.topology import preset
from tests.captured import Captured, assert_same_values, capture, capture_each
from tests.regions import GatherFromSequence, ScatterToSequence, all_gather

WORLD_SIZE = 4
GROUP = "0"
TOLERANCE = 1e-5
HIDDEN = 12
Function = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("group")


def reduced(y: Tensor) -> Tensor:
    return funcol.all_reduce(y, "sum", GROUP)


def scattered(y: Tensor, dim: int = 1) -> Tensor:
    return funcol.reduce_scatter_tensor(y, "sum", dim, GROUP)


def gathered(x: Tensor, dim: int = 1) -> Tensor:
    return all_gather(x, dim, GROUP)


def relu(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(nnf.linear(x + 1, up[:HIDDEN])), down))


def relu_squared(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(nnf.linear(x + 2, up[:HIDDEN])) ** 2, down))


def gelu(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.gelu(nnf.linear(x + 3, up[:HIDDEN], bias[:HIDDEN])), down, bias[:8]))


def gelu_tanh(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.gelu(nnf.linear(x + 4, up[:HIDDEN]), approximate="tanh"), down))


def silu(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.silu(nnf.linear(x + 5, up[:HIDDEN])), down))


def bias_by_hand(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.gelu((x + 6) @ up[:HIDDEN].t() + bias[:HIDDEN]) @ down.t() + bias[:8])


def two_dimensions(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.relu((x[0] + 7) @ up[:HIDDEN].t()) @ down.t())


def bias_after(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(nnf.linear(x + 8, up[:HIDDEN])), down)) + bias[:8]


def gated(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    x = x + 9
    return reduced(nnf.linear(nnf.silu(nnf.linear(x, up[:HIDDEN])) * nnf.linear(x, up[HIDDEN:]), down))


def gated_gelu(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    x = x + 10
    gate = nnf.gelu(nnf.linear(x, up[:HIDDEN], bias[:HIDDEN]), approximate="tanh")
    return reduced(nnf.linear(nnf.linear(x, up[HIDDEN:], bias[HIDDEN:]) * gate, down))


def packed(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    gate, value = nnf.linear(x + 11, up).chunk(2, -1)
    return reduced(nnf.linear(nnf.silu(gate) * value, down))


def packed_with_bias_of_rows(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    gate, value = nnf.linear(x[0] + 12, up, bias).chunk(2, -1)
    return reduced(nnf.linear(nnf.silu(gate) * value, down))


def packed_slices(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    both = nnf.linear(x + 13, up)
    return reduced(nnf.linear(nnf.silu(both[..., :HIDDEN]) * both[..., HIDDEN:], down))


def scaled_result(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(nnf.linear(x + 14, up[:HIDDEN])), down) * 0.5)


def to_scatter(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return scattered(nnf.linear(nnf.relu(nnf.linear(x + 15, up[:HIDDEN])), down))


def to_scatter_of_columns(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return scattered(nnf.linear(nnf.relu(nnf.linear(x + 16, up[:HIDDEN])), down), 2)


REDUCED: list[Function] = [
    relu,
    relu_squared,
    gelu,
    gelu_tanh,
    silu,
    bias_by_hand,
    two_dimensions,
    bias_after,
    gated,
    gated_gelu,
    packed,
    packed_with_bias_of_rows,
    packed_slices,
    scaled_result,
    to_scatter,
    to_scatter_of_columns,
]


def sequence_parallel(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    g = gathered(x + 1)
    return scattered(nnf.linear(nnf.silu(nnf.linear(g, up[:HIDDEN])) * nnf.linear(g, up[HIDDEN:]), down))


def sequence_parallel_packed(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    gate, value = nnf.linear(gathered(x + 2), up, bias).chunk(2, -1)
    return scattered(nnf.linear(nnf.silu(gate) * value, down, bias[:8]))


def sequence_first(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return scattered(nnf.linear(nnf.gelu(nnf.linear(gathered(x + 3, 0), up[:HIDDEN], bias[:HIDDEN])), down), 0)


def batch_of_one(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return scattered(nnf.linear(nnf.relu(nnf.linear(gathered((x + 4)[:1]), up[:HIDDEN])), down))


def each_its_own_gather(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    x = x + 5
    gate, value = nnf.linear(gathered(x), up[:HIDDEN]), nnf.linear(gathered(x), up[HIDDEN:])
    return scattered(nnf.linear(nnf.silu(gate) * value, down))


def gathered_and_reduced(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(nnf.linear(gathered(x + 6), up[:HIDDEN])), down))


def gathered_columns(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(nnf.linear(gathered((x + 7)[..., :2], 2), up[:HIDDEN])), down))


GATHERED: list[Function] = [
    gathered_columns,
    sequence_parallel,
    sequence_parallel_packed,
    sequence_first,
    batch_of_one,
    each_its_own_gather,
    gathered_and_reduced,
]


def inputs(dtype: torch.dtype = torch.float32, rows: int = 8, **settings: Any) -> list[Tensor]:
    shapes = ((4, rows, 8), (2 * HIDDEN, 8), (8, HIDDEN), (2 * HIDDEN,))
    return [torch.randn(shape, dtype=dtype, **settings) for shape in shapes]


def name_of(case: Any) -> str:
    return str(getattr(case, "__name__", ""))


def networks_first(problem: Problem) -> float:
    """A judge that takes a network before its parts, whatever their sizes."""
    return 2.0 if problem.operator == "ffn" else 0.5


def only_call(graph: Captured) -> dict[str, Any]:
    """The arguments of the one fused network, by name."""
    (node,) = graph.after.graph.find_nodes(op="call_function", target=torch.ops.mkcompile.ffn.default)
    names = [one.name for one in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=True))


@pytest.fixture(scope="module")
def captured(group: None) -> tuple[Captured, dict[str, Site]]:
    return capture_each(REDUCED, *inputs())


@pytest.mark.parametrize("function", REDUCED, ids=name_of)
def test_a_network_before_a_reduction_is_found(captured: tuple[Captured, dict[str, Site]], function: Function) -> None:
    _, sites = captured
    site = sites[function.__name__]
    assert site.operator == "ffn", (site.reason, site.detail)


def test_rewritten_networks_compute_the_same(captured: tuple[Captured, dict[str, Site]]) -> None:
    graph, _ = captured
    assert graph.calls == Counter(ffn=len(REDUCED)) and not graph.left
    for target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.erf.default):
        assert not graph.after.graph.find_nodes(op="call_function", target=target)
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


@pytest.mark.parametrize("function", GATHERED, ids=name_of)
def test_a_network_takes_the_gather_of_its_input(function: Function) -> None:
    (graph,) = capture(function, *inputs())
    assert graph.calls == Counter(ffn=1) and not graph.left
    assert only_call(graph)["gather_dim"] >= 0
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


def test_biases_activation_and_gate_reach_the_operator() -> None:
    (graph,) = capture(gated_gelu, *inputs())
    call = only_call(graph)
    assert (call["activation"], call["gated"], len(call["w_up"])) == ("gelu_tanh", True, 2)
    assert all(one is not None for one in call["bias_up"]) and call["bias_down"] is None
    (graph,) = capture(gelu, *inputs())
    call = only_call(graph)
    assert (call["activation"], call["gated"], call["bias_down"] is not None) == ("gelu", False, True)


def test_inference_keeps_nothing_for_backward() -> None:
    for function in (gated, packed, sequence_parallel):
        (graph,) = capture(function, *inputs())
        assert not any(only_call(graph)["saved"])


def test_what_is_used_elsewhere_is_returned() -> None:
    def function(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> list[Tensor]:
        g = gathered(x)
        gate, value = nnf.linear(g, up[:HIDDEN]), nnf.linear(g, up[HIDDEN:])
        hidden = nnf.silu(gate) * value
        return [scattered(nnf.linear(hidden, down)), g.sum(), value.sum(0)]

    (graph,) = capture(function, *inputs())
    assert only_call(graph)["saved"] == [True, False, True, False]
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


def test_a_value_inside_the_activation_is_recomputed_from_its_product() -> None:
    def function(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> list[Tensor]:
        activated = nnf.silu(nnf.linear(x, up[:HIDDEN]))
        return [reduced(nnf.linear(activated * nnf.linear(x, up[HIDDEN:]), down)), activated.sum(1)]

    (graph,) = capture(function, *inputs())
    assert only_call(graph)["saved"] == [False, True, False, False]
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


def test_other_gemms_may_read_the_gathered_input() -> None:
    def function(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> list[Tensor]:
        g = gathered(x)
        return [scattered(nnf.linear(nnf.relu(nnf.linear(g, up[:HIDDEN])), down)), nnf.linear(g, up[:4])]

    (graph,) = capture(function, *inputs(), judge=networks_first)
    assert graph.calls == Counter(ffn=1) and not graph.left
    assert only_call(graph)["saved"] == [True, False, False]
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


@pytest.mark.parametrize("is_packed", [False, True])
def test_training_returns_what_backward_reads(is_packed: bool) -> None:
    def function(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g = GatherFromSequence.apply(x, 1, GROUP)
        gate, value = nnf.linear(g, up).chunk(2, -1) if is_packed else (nnf.linear(g, up[i::2]) for i in (0, 1))
        return ScatterToSequence.apply(nnf.linear(nnf.silu(gate) * value, down), 1, GROUP)

    x, up, down, _ = inputs(requires_grad=True)
    forward, backward = capture(function, x, up, down, backward=True)
    assert forward.calls == Counter(ffn=1) and not forward.left
    assert only_call(forward)["saved"] == [True] * (3 if is_packed else 4)
    assert backward.calls == Counter(all_gather_gemm=1, gemm_reduce_scatter=1) and not backward.left
    for graph in (forward, backward):
        assert_same_values(graph, WORLD_SIZE, TOLERANCE)


def test_a_network_without_gain_leaves_its_collectives_to_the_smaller_operators() -> None:
    def no_networks(problem: Problem) -> float | Reason:
        return Reason.NO_GAIN if problem.operator == "ffn" else 1.0

    (graph,) = capture(sequence_parallel, *inputs(), judge=no_networks)
    assert graph.operators == Counter(all_gather_gemm=1, gemm_reduce_scatter=1)
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


REDUCTIONS = frozenset({"gemm_reduce_scatter/push", "gemm_all_reduce/staged"})


@pytest.mark.parametrize(
    ("available", "dtype", "wanted"),
    [
        (REDUCTIONS, torch.bfloat16, Counter(gemm_all_reduce=1)),
        (REDUCTIONS | {"ffn/two_phase"}, torch.bfloat16, Counter(ffn=1)),
        (REDUCTIONS, torch.float32, Counter(ffn=1)),  # no kernel takes either of them
        (None, torch.bfloat16, Counter(ffn=1)),  # no machine to run on
    ],
)
def test_a_network_without_a_kernel_hides_no_reduction_that_has_one(
    available: frozenset[str] | None, dtype: torch.dtype, wanted: Counter[str]
) -> None:
    def function(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return reduced(nnf.linear(nnf.relu(nnf.linear(x, up)), down))

    judge = kernels_first(preset("4xh200"), Policy(available=available))
    x, up, down = (torch.randn(shape, dtype=dtype) for shape in ((4, 8, 8), (16, 8), (8, 16)))
    (graph,) = capture(function, x, up, down, judge=judge)
    assert graph.operators == wanted


@pytest.mark.parametrize("dynamic_dim", [0, 1])
@pytest.mark.parametrize("function", [gated, packed, to_scatter, sequence_parallel, gathered_and_reduced], ids=name_of)
def test_symbolic_rows(function: Function, dynamic_dim: int) -> None:
    x, *weights = inputs()
    torch._dynamo.mark_dynamic(x, dynamic_dim)
    (graph,) = capture(function, x, *weights)
    assert graph.calls == Counter(ffn=1) and not graph.left
    assert not any(only_call(graph)["saved"])
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


def test_all_sizes_symbolic() -> None:
    (graph,) = capture(sequence_parallel, *inputs(), dynamic=True, judge=networks_first)
    assert graph.calls == Counter(ffn=1) and not graph.left
    assert_same_values(graph, WORLD_SIZE, TOLERANCE)


@pytest.mark.parametrize("function", [gated, gelu, relu_squared, sequence_parallel], ids=name_of)
def test_networks_in_bfloat16(function: Function) -> None:
    (graph,) = capture(function, *inputs(torch.bfloat16))
    assert graph.calls == Counter(ffn=1) and not graph.left
    assert_same_values(graph, WORLD_SIZE, tolerance=2**-6)
