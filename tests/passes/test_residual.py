"""Which additions behind a fused reduction are done in place, and that they compute the same on every rank.

Values are whole numbers, so that what is rewritten must be equal bit for bit. Legend: x [16, 16] is an input of the
graph, h an intermediate, w [16, 16].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from mkcompile.ops.problem import Problem
from mkcompile.passes import facts
from mkcompile.passes.fuse import fuse, fuse_all
from mkcompile.passes.graph import VIEWS, is_call, is_in_place
from mkcompile.passes.reason import Reason, Residual
from mkcompile.plan import key
from tests.captured import Captured, assert_same_values, capture, capture_each, fake_group
from tests.regions import ReduceFromRegion

WORLD_SIZE = 4
GROUP = "0"
Function = Callable[[Tensor, Tensor], Any]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with fake_group(WORLD_SIZE):
        yield


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", GROUP)


def scattered(x: Tensor, w: Tensor) -> Tensor:
    """Of the shape of x, from as many rows for each rank."""
    rows = torch.cat([x] * WORLD_SIZE)
    return funcol.reduce_scatter_tensor(rows @ w, "sum", 0, GROUP)


def in_place(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_in_place(node)]


def plain(x: Tensor, w: Tensor) -> Any:
    h = x * 2
    return torch.relu(h + reduced(torch.relu(h), w))


def other_order(x: Tensor, w: Tensor) -> Any:
    h = x * 3
    return torch.relu(reduced(torch.relu(h), w) + h)


def returned(x: Tensor, w: Tensor) -> Any:
    h = x * 4
    return h + reduced(torch.relu(h), w)


def of_three_dimensions(x: Tensor, w: Tensor) -> Any:
    h = (x * 5).view(4, 4, 16)
    return torch.relu(h + reduced(torch.relu(h), w))


def behind_a_view(x: Tensor, w: Tensor) -> Any:
    h = x * 6
    return torch.relu(h.view(4, 64) + reduced(torch.relu(h), w).view(4, 64))


def made_afterwards(x: Tensor, w: Tensor) -> Any:
    y = reduced(x + 7, w)
    return torch.relu((x * 7) + y)


def with_a_bias(x: Tensor, w: Tensor) -> Any:
    h = x * 8
    return h + funcol.all_reduce(torch.addmm(x[0], torch.relu(h), w), "avg", GROUP)


def slice_of_rows(x: Tensor, w: Tensor) -> Any:
    h = x * 9
    return torch.relu(h + scattered(torch.relu(h), w))


def slice_along_the_sequence(x: Tensor, w: Tensor) -> Any:
    h = (x * 10).view(4, 4, 16)
    whole = torch.cat([torch.relu(h)] * WORLD_SIZE, 1)
    return h + funcol.reduce_scatter_tensor(whole @ w, "sum", 1, GROUP)


ADDED = (
    plain, other_order, returned, of_three_dimensions, behind_a_view, made_afterwards, with_a_bias, slice_of_rows,
    slice_along_the_sequence,
)  # fmt: skip


def test_what_nothing_reads_afterwards_is_added_to_in_place() -> None:
    graph, sites = capture_each(ADDED, *operands(), results="ordinary")
    assert {name: site.residual for name, site in sites.items()} == dict.fromkeys(sites, Residual.ADDED)
    assert len(in_place(graph.after.graph)) == len(ADDED) and not graph.calls, "and no other call is left"
    assert all(key.facts_of(node.kwargs["plan_key"]) == {key.ALONE} for node in in_place(graph.after.graph))
    bases = [node.kwargs["_all_bases"][0] for node in in_place(graph.after.graph)]
    assert not any(is_call(base, VIEWS) for base in bases), "Inductor would copy a view"
    assert all("val" in node.meta for node in graph.after.graph.nodes if node.op == "call_function")
    assert_same_values(graph, WORLD_SIZE)


def an_input(x: Tensor, w: Tensor) -> Any:
    return x + reduced(x + 1, w)


def a_view_of_an_input(x: Tensor, w: Tensor) -> Any:
    return x.view(4, 4, 16) + reduced(x + 2, w).view(4, 4, 16)


def a_copy_that_may_vanish(x: Tensor, w: Tensor) -> Any:
    return x.clone() + reduced(x + 3, w)


def returned_too(x: Tensor, w: Tensor) -> Any:
    h = x + 4
    return h, h + reduced(torch.relu(h), w)


def view_returned_too(x: Tensor, w: Tensor) -> Any:
    h = x + 5
    return h.view(4, 64), h + reduced(torch.relu(h), w)


def read_later(x: Tensor, w: Tensor) -> Any:
    h = x + 6
    total = h + reduced(torch.relu(h), w)
    return total * h


def view_read_later(x: Tensor, w: Tensor) -> Any:
    h = x + 7
    view = h.view(4, 64)
    total = h + reduced(torch.relu(h), w)
    return total.view(4, 64) @ view.t()


def read_by_the_product(x: Tensor, w: Tensor) -> Any:
    h = x + 8
    return h + reduced(h, w)


def view_read_by_the_product(x: Tensor, w: Tensor) -> Any:
    h = (x + 9).view(4, 4, 16)
    return h + reduced(h.clone(), w)


def part_of_a_tensor(x: Tensor, w: Tensor) -> Any:
    both = torch.relu(torch.cat([x + 10, x]))
    return both[:16] + reduced(torch.relu(both[16:]), w)


def result_read_too(x: Tensor, w: Tensor) -> Any:
    h = x + 11
    y = reduced(torch.relu(h), w)
    return (h + y) * y


def scaled(x: Tensor, w: Tensor) -> Any:
    h = x + 12
    return torch.add(h, reduced(torch.relu(h), w), alpha=2)


def of_another_dtype(x: Tensor, w: Tensor) -> Any:
    h = (x + 13).double()
    return h + reduced(torch.relu(x), w)


def broadcast(x: Tensor, w: Tensor) -> Any:
    return (x + 14)[:1] * 2 + reduced(torch.relu(x), w)


def out_of_order(x: Tensor, w: Tensor) -> Any:
    h = torch.relu(x.t() + 15)
    return h + reduced(torch.relu(x), w)


REFUSED: dict[Function, Residual] = {
    an_input: Residual.INPUT,
    a_view_of_an_input: Residual.INPUT,
    a_copy_that_may_vanish: Residual.INPUT,
    returned_too: Residual.OUTPUT,
    view_returned_too: Residual.OUTPUT,
    read_later: Residual.READ_LATER,
    view_read_later: Residual.READ_LATER,
    read_by_the_product: Residual.OPERAND,
    view_read_by_the_product: Residual.OPERAND,
    part_of_a_tensor: Residual.PART,
    result_read_too: Residual.RESULT_READ,
    scaled: Residual.SCALED,
    of_another_dtype: Residual.DTYPE,
    broadcast: Residual.SHAPE,
    out_of_order: Residual.LAYOUT,
}


def test_what_lives_on_or_is_no_plain_sum_is_left() -> None:
    graph, sites = capture_each(tuple(REFUSED), *operands(), results="ordinary")
    expected = {function.__name__: residual for function, residual in REFUSED.items()}
    assert {name: site.residual for name, site in sites.items()} == expected
    assert not in_place(graph.after.graph) and graph.calls["gemm_all_reduce"] == len(REFUSED)
    assert_same_values(graph, WORLD_SIZE)


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 16), torch.randn(16, 16)


def fate(function: Function, **fusing: Any) -> Residual | None:
    (graph,) = capture(function, *operands(), **{"results": "ordinary", **fusing})
    assert bool(in_place(graph.after.graph)) == (graph.sites[0].residual is Residual.ADDED)
    return graph.sites[0].residual


def test_a_kernel_that_does_not_add_is_left_alone() -> None:
    asked: list[tuple[str, str, int]] = []

    def adds(group: str, problem: Problem) -> bool:
        asked.append((group, problem.operator, problem.m))
        return False

    assert fate(plain, adds=adds) is Residual.KERNEL
    assert asked == [(GROUP, "gemm_all_reduce", 16)]


def test_settings_exclude_it() -> None:
    assert fate(plain, results="planned") is Residual.PLANNED
    assert fate(plain, adds=None) is Residual.APART
    with inductor_config.patch(cpp_wrapper=True):
        assert fate(plain) is Residual.CPP_WRAPPER


def test_streams_of_the_graph_exclude_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader in another stream may run after the addition, wherever it stands in the graph."""
    monkeypatch.setattr("mkcompile.passes.residual.has_streams", lambda graph: True)
    assert fate(plain) is Residual.STREAMS


def test_sizes_that_are_not_known_are_left_alone() -> None:
    assert fate(plain, dynamic=True) is Residual.SYMBOLIC


def test_what_is_not_fused_is_left_alone() -> None:
    def nothing(problem: Problem) -> Reason:
        return Reason.POLICY_NEVER

    (graph,) = capture(plain, *operands(), judge=nothing, results="ordinary")
    assert graph.sites[0].residual is None and str(graph.before.graph) == str(graph.after.graph)


def test_of_two_reductions_one_takes_up_the_other() -> None:
    def two(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(reduced(x, w) + funcol.all_reduce(torch.relu(x) @ w, "avg", GROUP))

    (graph,) = capture(two, *operands(), results="ordinary")
    assert [site.residual for site in graph.sites].count(Residual.ADDED) == 1
    assert len(in_place(graph.after.graph)) == 1 and graph.calls["gemm_all_reduce"] == 1
    assert_same_values(graph, WORLD_SIZE)


def traced(function: Callable[..., Any], *args: Tensor) -> Captured:
    """Traced as it is written, since the order of nodes matters here."""
    before = make_fx(function, tracing_mode="fake")(*args)
    after = copy.deepcopy(before)
    sites = fuse(after.graph)
    after.graph.lint()
    after.recompile()
    return Captured(phase="inference", before=before, after=after, sites=sites)


def test_a_collective_reads_until_it_has_been_waited_for() -> None:
    c10d = torch.ops._c10d_functional

    def gathers(early: bool) -> Function:
        def function(x: Tensor, w: Tensor) -> Any:
            h = x * 2
            gathered = c10d.all_gather_into_tensor(h, WORLD_SIZE, GROUP)
            whole = c10d.wait_tensor(gathered) if early else gathered
            total = h + c10d.wait_tensor(c10d.all_reduce(torch.mm(torch.relu(h), w), "sum", GROUP))
            return total, torch.relu(whole if early else c10d.wait_tensor(gathered))

        return function

    for early, expected in ((True, Residual.ADDED), (False, Residual.READ_LATER)):
        graph = traced(gathers(early), *operands())
        assert [site.residual for site in graph.sites if site.operator] == [expected]
        assert_same_values(graph, WORLD_SIZE)


def test_a_call_moves_only_over_what_does_not_write_to_its_operands() -> None:
    """Each sum's residual is made behind its reduction; on the second one's way the first one has written to `h`."""
    c10d = torch.ops._c10d_functional

    def late(reads_residual: bool) -> Function:
        def function(x: Tensor, w: Tensor) -> Any:
            first = c10d.wait_tensor(c10d.all_reduce(torch.mm(torch.relu(x), w), "sum", GROUP))
            h = x * 2
            operand = h if reads_residual else torch.relu(h)
            second = c10d.wait_tensor(c10d.all_reduce(torch.mm(operand, w), "sum", GROUP))
            return torch.relu((h.view(4, 64) + first.view(4, 64)) + second.view(4, 64))

        return function

    for reads_residual, expected in ((False, Residual.ADDED), (True, Residual.READ_LATER)):
        graph = traced(late(reads_residual), *operands())
        assert [site.residual for site in graph.sites] == [Residual.ADDED, expected]
        assert_same_values(graph, WORLD_SIZE)


def test_what_backward_reads_is_left_alone() -> None:
    def residual_block(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        return torch.sin(h + ReduceFromRegion.apply(torch.sin(h) @ w, 0, GROUP))

    x, w = operands()
    graphs = capture(residual_block, x.requires_grad_(), w.requires_grad_(), backward=True, results="ordinary")
    assert graphs[0].sites[0].residual in (Residual.OUTPUT, Residual.RESULT_READ), "one of both summands is saved"
    assert not any(in_place(graph.after.graph) for graph in graphs)


def norm(h: Tensor, scale: Tensor) -> Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype) * scale


def attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def layers(sequence_parallel: bool) -> Callable[..., Tensor]:
    """Two layers of attention and a feed-forward network on h [B, S, N]; sequence parallel: S is this rank's."""

    def gathered(x: Tensor) -> Tensor:
        return torch.cat(funcol.all_gather_tensor(x, 0, GROUP).chunk(WORLD_SIZE), 1) if sequence_parallel else x

    def reduce(x: Tensor) -> Tensor:
        if sequence_parallel:
            return funcol.reduce_scatter_tensor(x, "sum", 1, GROUP)
        return funcol.all_reduce(x, "sum", GROUP)

    def model(h: Tensor, scale: Tensor, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for _ in range(2):
            h = h + reduce(attention(gathered(norm(h, scale)) @ w) @ w)
            h = h + reduce(torch.nn.functional.silu(gathered(norm(h, scale)) @ up) @ down)
        return norm(h, scale)

    return model


def kernels_only(problem: Problem) -> float | Reason:
    """As where kernels exist: none for a feed-forward network."""
    return Reason.NO_KERNEL if problem.operator == "ffn" else fuse_all(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_transformers_residual_is_one_tensor_behind_its_first_sum(
    sequence_parallel: bool, dtype: torch.dtype
) -> None:
    shapes = ((2, 8, 16), (16,), (16, 16), (16, 24), (24, 16))
    operands = [torch.randn(shape, dtype=dtype) for shape in shapes]
    with torch.no_grad():
        (graph,) = capture(layers(sequence_parallel), *operands, judge=kernels_only, results="ordinary")
        (apart,) = capture(layers(sequence_parallel), *operands, judge=kernels_only, results="planned")
    found = [site.residual for site in graph.sites if site.residual]
    assert found == [Residual.INPUT, *[Residual.ADDED] * 3]
    assert_same_values(graph, WORLD_SIZE, tolerance=1e-5 if dtype == torch.float32 else 5e-2)
    assert_same_values(replace(apart, before=apart.after, after=graph.after), WORLD_SIZE)


def test_facts_of_calls_in_place_are_marked_as_others_are() -> None:
    """Bodies of higher-order operators are marked again by the graph that runs them."""
    (graph,) = capture(plain, *operands(), results="ordinary")
    (call,) = in_place(graph.after.graph)
    assert key.facts_of(call.kwargs["plan_key"]) == {key.ALONE}
    facts._not_alone(graph.after.graph)
    assert not key.facts_of(call.kwargs["plan_key"])
    facts.mark(graph.after.graph, "ordinary")
    assert key.facts_of(call.kwargs["plan_key"]) == {key.ALONE}
