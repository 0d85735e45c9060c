"""The rewrite: order of nodes, refused cycles, chained sites, symbolic sizes, what is kept of the old nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.fx.traceback import NodeSource

from mkcompile.ops.problem import Problem
from mkcompile.passes.fuse import fuse, fuse_all
from mkcompile.passes.gemm_all_reduce import find
from mkcompile.passes.graph import ALL_REDUCE
from mkcompile.passes.reason import Reason
from mkcompile.passes.rewrite import Rewriter
from mkcompile.passes.site import Match
from tests.captured import Captured, assert_same_values, capture

WORLD_SIZE = 4
GROUP = "0"
aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("group")


def reduced(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", GROUP)


def only(function: Callable[..., object], *args: Tensor, **options: object) -> Captured:
    (graph,) = capture(function, *args, **options)  # type: ignore[arg-type]
    return graph


def fused_nodes(graph: Captured) -> list[fx.Node]:
    nodes = graph.after.graph.nodes
    return [
        node
        for node in nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "mkcompile"
    ]


def chain(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = reduced(x @ w)
    return x


def test_a_site_that_feeds_the_next_one_is_computed_once() -> None:
    graph = only(chain, torch.randn(8, 8), *(torch.randn(8, 8) for _ in range(4)))
    assert graph.calls == Counter(gemm_all_reduce=4) and not graph.left
    assert_same_values(graph, WORLD_SIZE)


def test_chained_sites_are_right_in_whatever_order_they_are_rewritten() -> None:
    x, weights = torch.randn(8, 8), [torch.randn(8, 16), torch.randn(16, 4), torch.randn(4, 32)]
    for smallest_first in (False, True):

        def judge(problem: Problem, smallest_first: bool = smallest_first) -> float:
            return 1 / problem.flops if smallest_first else float(problem.flops)

        graph = only(chain, x, *weights, judge=judge)
        assert graph.calls == Counter(gemm_all_reduce=3) and not graph.left
        assert_same_values(graph, WORLD_SIZE)


def refuses(refused: set[str]) -> Callable[[Problem], float | Reason]:
    def judge(problem: Problem) -> float | Reason:
        return Reason.NO_GAIN if problem.operator in refused else fuse_all(problem)

    return judge


def mlp(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return reduced(torch.relu(x @ w_up) @ w_down)


@pytest.mark.parametrize(
    ("refused", "expected"),
    [(set(), "ffn"), ({"ffn"}, "gemm_all_reduce"), ({"gemm_all_reduce"}, "ffn")],
)
def test_a_refused_site_falls_back_to_a_smaller_one(refused: set[str], expected: str) -> None:
    args = torch.randn(8, 8), torch.randn(8, 16), torch.randn(16, 8)
    graph = only(mlp, *args, judge=refuses(refused))
    assert graph.calls == Counter({expected: 1}) and not graph.left
    assert_same_values(graph, WORLD_SIZE)


def test_all_of_it_refused_leaves_the_graph_as_it_was() -> None:
    args = torch.randn(8, 8), torch.randn(8, 16), torch.randn(16, 8)
    graph = only(mlp, *args, judge=refuses({"ffn", "gemm_all_reduce"}))
    assert not graph.calls and graph.left == Counter(all_reduce=1)
    assert graph.sites[0].reason is Reason.NO_GAIN


def gather_and_scatter(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(funcol.all_gather_tensor(x, 0, GROUP) @ w, "sum", 0, GROUP)


def test_two_sites_never_compute_one_product() -> None:
    graph = only(gather_and_scatter, torch.randn(4, 8), torch.randn(8, 8))
    assert sum(graph.calls.values()) == 1
    assert sorted(site.operator is not None for site in graph.sites) == [False, True]
    assert {site.reason for site in graph.sites} == {None, Reason.OVERLAPS_BETTER_SITE}
    assert_same_values(graph, WORLD_SIZE)


def test_a_site_whose_input_needs_its_own_output_is_refused() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(reduced(x @ w))

    graph = only(function, torch.randn(8, 8), torch.randn(8, 8)).before.graph
    (collective,) = graph.find_nodes(op="call_function", target=ALL_REDUCE[0])
    (relu,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    match = find(collective)
    assert isinstance(match, Match)
    text = str(graph)
    looped = replace(match, call=replace(match.call, x=[relu]))  # type: ignore[type-var, call-arg]
    assert Rewriter(graph).apply(looped, "") is Reason.DEPENDENCY_CYCLE
    assert str(graph) == text


def draws(graph: fx.Graph) -> list[torch.Size]:
    """The shapes of what is drawn, in order."""
    return [node.meta["val"].shape for node in graph.find_nodes(op="call_function", target=aten.bernoulli.p)]


@pytest.mark.parametrize("is_drawn_for_the_site", [False, True])
def test_random_numbers_are_drawn_in_the_order_in_which_they_were(is_drawn_for_the_site: bool) -> None:
    """A product of the gathered tensor is dropped from, then something else; the site waits for a later weight."""

    def function(x: Tensor, w: Tensor, later: Tensor) -> list[Tensor]:
        gathered = funcol.all_gather_tensor(x, 0, GROUP)
        first = aten.bernoulli.p(gathered @ w, 0.5)
        second = aten.bernoulli.p(later, 0.5)
        other_w = second if is_drawn_for_the_site else torch.relu(later)
        return [first, gathered @ other_w, second]

    with inductor_config.patch(fallback_random=True):
        graph = only(function, torch.randn(4, 8), torch.randn(8, 6), torch.randn(8, 16))
    assert draws(graph.before.graph) == draws(graph.after.graph) == [(16, 6), (8, 16)]
    assert graph.calls == ({} if is_drawn_for_the_site else {"all_gather_gemm": 1})


def test_new_nodes_keep_values_and_where_they_come_from() -> None:
    graph = only(chain, torch.randn(8, 8), torch.randn(8, 8))
    (fused,) = fused_nodes(graph)
    assert tuple(fused.meta["val"].shape) == (8, 8)
    assert "reduced(x @ w)" in fused.meta["stack_trace"] or "all_reduce" in fused.meta["stack_trace"]
    (source,) = fused.meta["from_node"]
    assert isinstance(source, NodeSource) and source.name.startswith("wait_tensor")
    assert all("val" in node.meta for node in graph.after.graph.nodes if node.op == "call_function")


def test_symbolic_sizes_that_no_node_holds_are_computed() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = (torch.cat([x, x, x[:1]]) @ w).reshape(-1, 2, 4)
        return funcol.all_reduce(y, "sum", GROUP).reshape(-1, 8) + 1

    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    graph = only(function, x, torch.randn(8, 8))
    assert graph.calls == Counter(gemm_all_reduce=1)
    assert_same_values(graph, WORLD_SIZE)


def test_a_graph_without_collectives_is_not_touched() -> None:
    def function(x: Tensor) -> Tensor:
        return x.reshape(-1).reshape(8, 8) + x.reshape(-1).reshape(8, 8)

    graph = only(function, torch.randn(8, 8))
    assert str(graph.before.graph) == str(graph.after.graph) and not graph.sites


def test_fusing_twice_changes_nothing_more() -> None:
    graph = only(chain, torch.randn(8, 8), torch.randn(8, 8))
    text = str(graph.after.graph)
    assert fuse(graph.after.graph) == []
    assert str(graph.after.graph) == text


def read_by_strides(x: Tensor, w: Tensor) -> Tensor:
    return torch.as_strided(reduced((x @ w).t()), (8, 24), (1, 8))


def read_by_strides_of_a_view(x: Tensor, w: Tensor) -> Tensor:
    return torch.as_strided(reduced((x @ w).t().contiguous()).view(2, 12, 8), (8, 24), (1, 8)) + 1


def read_by_strides_of_a_piece(x: Tensor, w: Tensor) -> Tensor:
    first, _ = reduced((x @ w).t()).split(12)
    return torch.as_strided(first, (8, 12), (1, 8)) + 1


def read_by_strides_behind_a_gather(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    gathered = funcol.all_gather_tensor(x.view(4, 2, 16), 0, GROUP).view(WORLD_SIZE, 4, 2, 16).permute(1, 0, 2, 3)
    return torch.as_strided(gathered, (128,), (2,)), gathered.reshape(-1, 16) @ w


@pytest.mark.parametrize(
    "function",
    [read_by_strides, read_by_strides_of_a_view, read_by_strides_of_a_piece, read_by_strides_behind_a_gather],
)
def test_what_is_read_by_strides_lies_as_it_did(function: Callable[..., object]) -> None:
    graph = only(function, torch.randn(8, 16), torch.randn(16, 24))
    assert sum(graph.calls.values()) == 1 and not graph.left
    assert_same_values(graph, WORLD_SIZE, tolerance=1e-6)


def mixed_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, GROUP) @ w + bias


def mixed_bias_of_an_ffn(x: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return reduced(torch.relu(x @ up + bias).to(torch.bfloat16) @ up.t())


@pytest.mark.parametrize("function", [mixed_bias, mixed_bias_of_an_ffn])
def test_a_bias_of_another_dtype_stays_behind_the_operator(function: Callable[..., object]) -> None:
    graph = only(function, torch.randn(8, 16).bfloat16(), torch.randn(16, 24).bfloat16(), torch.randn(24))
    assert sum(graph.calls.values()) == 1 and "ffn" not in graph.calls
    assert_same_values(graph, WORLD_SIZE, tolerance=2e-2)


@pytest.mark.parametrize(("asserts", "fused"), [(True, None), (False, "gemm_all_reduce")])
def test_no_operator_is_put_where_the_fx_wrapper_fails_at_its_check(asserts: bool, fused: str | None) -> None:
    with inductor_config.patch(fx_wrapper=True, alignment_asserts=asserts):
        (site,) = only(chain, torch.randn(8, 16), torch.randn(16, 24)).sites
    assert (site.operator, site.reason) == (fused, None if fused else Reason.FX_WRAPPER)


def test_what_returns_a_list_is_left_to_the_cpp_wrapper() -> None:
    def both(x: Tensor, w: Tensor) -> Tensor:
        return reduced((funcol.all_gather_tensor(x, 0, GROUP) @ w) @ w.t())

    with inductor_config.patch(cpp_wrapper=True):
        graph = only(both, torch.randn(8, 16), torch.randn(16, 24))
    assert graph.operators == Counter(gemm_all_reduce=1, CPP_WRAPPER=1)
    assert Reason.CPP_WRAPPER in {site.reason for site in graph.sites}
