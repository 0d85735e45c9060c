"""Each reason for leaving a reduction as it was, produced by a small function that has nothing else wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch.nn import functional as nnf

from mkcompile.ops.problem import Problem
from mkcompile.passes.fuse import fuse, fuse_all
from mkcompile.passes.gemm_all_reduce import find
from mkcompile.passes.graph import ALL_REDUCE
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Refusal, Site
from tests.captured import Captured, assert_same_values, capture, capture_each

WORLD_SIZE = 4
GROUP = "0"
c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.usefixtures("group")


def reduced(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x, op, GROUP)


def scattered(x: Tensor, dim: int) -> Tensor:
    return funcol.reduce_scatter_tensor(x.contiguous(), "sum", dim, GROUP)


def no_gemm(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.relu(x))


def no_gemm_in_a_sum(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x + torch.relu(x))


def maximum(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t(), "max")


def double_precision(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x.double() @ w.t().double())


def product_kept(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t()
    return reduced(y), torch.relu(y)


def pieces_kept(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    pieces = (x @ w.t()).chunk(WORLD_SIZE, 1)
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.cat(pieces), "sum", WORLD_SIZE, GROUP)), pieces[1].sum()


def pieces_returned_together(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    laid_out = torch.cat((x @ w.t()).chunk(WORLD_SIZE, 1))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(laid_out, "sum", WORLD_SIZE, GROUP)), laid_out


def product_returned(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t()
    return reduced(y), y


def activation_between(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.relu(x @ w.t()))


def scaled_by_a_tensor(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x @ w.t()) * bias)


def permuted_before_scatter(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered((x @ w.t()).transpose(0, 1), 0)


def residual_before(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t() + torch.cat([x, x], -1))


def bias_for_each_row(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t() + bias[:8, None])


def bias_for_each_of_as_many_rows(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x.reshape(2, 16, 8) @ w.t() + bias[:, None])


def two_biases(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(x, w, bias) + nnf.linear(x, w, bias))


def scaled_addmm(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.addmm(bias, x[0], w.t(), beta=0.5))


def batched(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.bmm(x, x))


def cast_before(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x @ w.t()).bfloat16())


def read_in_float32(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = reduced((x.bfloat16() @ w.t().bfloat16()).float())
    return y.bfloat16() + torch.relu(y)


def half_precision_scaled_down(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x.half() @ w.t().half()) / WORLD_SIZE)


def padded(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    pieces = list((x @ w.t())[:, :7].split(2, 1))
    pieces[-1] = nnf.pad(pieces[-1], (0, 0, 0, 1))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.cat(pieces), "sum", WORLD_SIZE, GROUP))


def parts_of_columns(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered((x @ w.t()).reshape(4, 8, 4, 4), 3)


def different_rows(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced((x @ w.t()).reshape(32, 16) + (x.reshape(16, 16) @ w.reshape(16, 8).repeat(1, 4)).reshape(32, 16))


def used_before_the_wait(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = c10d.all_reduce(x @ w.t(), "sum", GROUP)
    return c10d.wait_tensor(y) + torch.relu(y)


CASES: list[tuple[Callable[..., object], Reason]] = [
    (no_gemm, Reason.NO_GEMM),
    (no_gemm_in_a_sum, Reason.NO_GEMM),
    (maximum, Reason.REDUCE_OP),
    (double_precision, Reason.DTYPE),
    (product_kept, Reason.PRODUCT_USED_ELSEWHERE),
    (product_returned, Reason.PRODUCT_SAVED),
    (pieces_kept, Reason.PRODUCT_USED_ELSEWHERE),
    (pieces_returned_together, Reason.PRODUCT_SAVED),
    (activation_between, Reason.OP_BETWEEN),
    (scaled_by_a_tensor, Reason.OP_BETWEEN),
    (permuted_before_scatter, Reason.OP_BETWEEN),
    (residual_before, Reason.ADDEND_NOT_GEMM),
    (bias_for_each_row, Reason.BIAS_SHAPE),
    (bias_for_each_of_as_many_rows, Reason.BIAS_SHAPE),
    (two_biases, Reason.SEVERAL_BIASES),
    (scaled_addmm, Reason.GEMM_SCALED),
    (batched, Reason.GEMM_KIND),
    (cast_before, Reason.CAST_BEFORE_REDUCTION),
    (read_in_float32, Reason.CAST_BEFORE_REDUCTION),
    (half_precision_scaled_down, Reason.SCALE_MAY_OVERFLOW),
    (padded, Reason.UNEVEN_SCATTER),
    (parts_of_columns, Reason.SCATTER_SHAPE),
    (different_rows, Reason.UNEQUAL_PRODUCTS),
    (used_before_the_wait, Reason.USED_BEFORE_WAIT),
]


# Nothing is to be done about these but what the sentence itself says.
SELF_EVIDENT = (Reason.REDUCE_OP, Reason.PRODUCT_USED_ELSEWHERE, Reason.OVERLAPS_BETTER_SITE)


def inputs() -> list[Tensor]:
    return [torch.randn(4, 8, 8), torch.randn(16, 8), torch.randn(16)]


@pytest.fixture(scope="module")
def captured(group: None) -> tuple[Captured, dict[str, Site]]:
    return capture_each([function for function, _ in CASES], *inputs())


@pytest.mark.parametrize(("function", "reason"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_refused_with_its_reason(
    captured: tuple[Captured, dict[str, Site]], function: Callable[..., object], reason: Reason
) -> None:
    _, sites = captured
    site = sites[function.__name__]
    assert site.operator is None
    assert site.reason is reason, site.detail


def test_refused_sites_compute_the_same(captured: tuple[Captured, dict[str, Site]]) -> None:
    graph, _ = captured
    assert not graph.calls
    assert_same_values(graph, WORLD_SIZE)


def only_site(function: Callable[..., object], **options: object) -> Site:
    (graph,) = capture(function, *inputs(), **options)  # type: ignore[arg-type]
    (site,) = graph.sites
    return site


def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return reduced(x @ w.t())


@pytest.mark.parametrize("reason", [Reason.POLICY_NEVER, Reason.NO_GAIN])
def test_what_the_judge_says_is_reported(reason: Reason) -> None:
    def judge(problem: Problem) -> Reason:
        return reason

    site = only_site(linear, judge=judge)
    assert site.reason is reason
    assert site.problem is not None


def test_group_of_one_rank() -> None:
    alone = dist.new_group([0]).group_name

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return funcol.all_reduce(x @ w.t(), "sum", alone)

    assert only_site(function).reason is Reason.WORLD_SIZE_ONE


def graph_of_linear() -> fx.Graph:
    (graph,) = capture(linear, *inputs())
    return graph.before.graph


def test_every_reason_is_named_by_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    untested = [reason.name for reason in Reason if f"Reason.{reason.name}" not in tests]
    assert not untested


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_a_sentence_that_says_what_to_do(reason: Reason) -> None:
    assert len(reason.value) > 40 and not reason.value.endswith(".")
    assert ";" in reason.value or reason in SELF_EVIDENT


def test_group_that_is_a_value_of_the_graph() -> None:
    graph = graph_of_linear()
    (collective,) = graph.find_nodes(op="call_function", target=ALL_REDUCE[0])
    collective.args = (*collective.args[:2], next(iter(graph.nodes)))
    refusal = find(collective)
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.GROUP_IS_NODE


def test_result_that_nothing_uses() -> None:
    graph = graph_of_linear()
    output = graph.output_node()
    output.args = ((next(iter(graph.nodes)),),)
    (site,) = fuse(graph, fuse_all)
    assert site.reason is Reason.RESULT_UNUSED
    assert len(graph.find_nodes(op="call_function", target=ALL_REDUCE[0])) == 1
