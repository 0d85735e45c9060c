"""Each normalisation: what it folds, what it must leave alone, and that nothing changes in value."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mkcompile.passes import normalise
from mkcompile.passes.fuse import anywhere, fuse
from mkcompile.passes.graph import WAIT
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Site
from tests.captured import Captured, assert_same_values, count

WORLD_SIZE = 2
GROUP = "0"
aten = torch.ops.aten
c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.usefixtures("group")


def reduced(x: Tensor, op: str = "sum", group: str = GROUP) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, group))


def gathered(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD_SIZE, GROUP))


def scattered(x: Tensor, dim: int) -> Tensor:
    laid_out = torch.cat(x.split(x.shape[dim] // WORLD_SIZE, dim))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(laid_out, "sum", WORLD_SIZE, GROUP))


def normalised(function: Callable[..., object], *args: Tensor) -> fx.Graph:
    """The graph after normalisation; its values are checked against the graph before, on two ranks."""
    before = make_fx(function, tracing_mode="fake")(*args)
    after = copy.deepcopy(before)
    normalise.run(after.graph)
    after.graph.lint()
    after.recompile()
    no_sites: list[Site] = []
    assert_same_values(Captured(phase="inference", before=before, after=after, sites=no_sites), WORLD_SIZE)
    return after.graph


def collectives_of(graph: fx.Graph) -> Counter[str]:
    return count(graph, "_c10d_functional")


def tensors(number: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*(shape or (4, 4, 8))) for _ in range(number)]


def test_gathers_of_one_tensor_are_merged_with_all_that_follows() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [torch.cat(gathered(x.reshape(2, 16)).split(2), 1) + i for i in range(3)]

    graph = normalised(function, torch.randn(4, 8))
    assert collectives_of(graph) == Counter(all_gather_into_tensor=1, wait_tensor=1)
    assert len(graph.find_nodes(op="call_function", target=aten.cat.default)) == 1


@pytest.mark.parametrize("reduce", [reduced, lambda x: scattered(x, 0), lambda x: scattered(x, 1)])
def test_equal_reductions_become_one(reduce: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [reduce(x) + 1, torch.relu(reduce(x)), reduce(x)]

    found = collectives_of(normalised(function, torch.randn(4, 8)))
    assert sorted(found.values()) == [1, 1], found


def test_equal_reductions_that_both_leave_the_graph_stay() -> None:
    assert collectives_of(normalised(lambda x: [reduced(x), reduced(x)], torch.randn(4, 8)))["all_reduce"] == 2


def test_two_results_are_never_made_one_tensor() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [gathered(x), gathered(x).reshape(-1)]

    graph = normalised(function, torch.randn(4, 8))
    one, other = graph.output_node().args[0]  # type: ignore[misc]
    memory = {node.args[0] if node.target is not WAIT[0] else node for node in (one, other)}  # type: ignore[union-attr]
    assert len(memory) == 2


def test_a_result_and_a_value_inside_may_be_one() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [gathered(x), gathered(x) + 1]

    assert collectives_of(normalised(function, torch.randn(4, 8)))["all_gather_into_tensor"] == 1


def test_gathers_of_different_tensors_stay() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return gathered(x) + gathered(y)

    assert collectives_of(normalised(function, *tensors(2)))["all_gather_into_tensor"] == 2


def test_nested_and_double_waits_become_one() -> None:
    def function(x: Tensor) -> Tensor:
        y = c10d.all_reduce(x, "sum", GROUP)
        return c10d.wait_tensor(c10d.wait_tensor(y)) + torch.relu(c10d.wait_tensor(y))

    assert collectives_of(normalised(function, torch.randn(4, 8))) == Counter(all_reduce=1, wait_tensor=1)


def test_waits_on_inputs_stay() -> None:
    def function(x: Tensor) -> list[Tensor]:
        c10d.wait_tensor(x)
        return [torch.relu(c10d.wait_tensor(x)), reduced(x)]

    assert collectives_of(normalised(function, torch.randn(4, 8)))["wait_tensor"] == 3


def test_a_wait_that_nothing_reads_stays() -> None:
    def function(x: Tensor) -> Tensor:
        reduced(x)
        return x + 1

    assert collectives_of(normalised(function, torch.randn(4, 8))) == Counter(all_reduce=1, wait_tensor=1)


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sum_of_all_reduces_becomes_one(number: int, op: str) -> None:
    def function(*xs: Tensor) -> Tensor:
        total = reduced(xs[0], op)
        for x in xs[1:]:
            total = total + reduced(x, op)
        return torch.relu(total)

    assert collectives_of(normalised(function, *tensors(number)))["all_reduce"] == 1


def test_sum_of_views_of_all_reduces_becomes_one() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return reduced(x).reshape(16, 8) + reduced(y).reshape(2, 8, 8).reshape(16, 8)

    assert collectives_of(normalised(function, *tensors(2)))["all_reduce"] == 1


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sum_of_reduce_scatters_becomes_one(dim: int) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return scattered(x, dim) + scattered(y, dim)

    assert collectives_of(normalised(function, *tensors(2)))["reduce_scatter_tensor"] == 1


def different_ops(x: Tensor, y: Tensor) -> object:
    return reduced(x) + reduced(y, "avg")


def maxima(x: Tensor, y: Tensor) -> object:
    return reduced(x, "max") + reduced(y, "max")


def different_groups(x: Tensor, y: Tensor) -> object:
    return reduced(x) + reduced(y, group="1")


def one_read_elsewhere(x: Tensor, y: Tensor) -> object:
    one = reduced(x)
    return one + reduced(y), torch.relu(one)


def view_read_elsewhere(x: Tensor, y: Tensor) -> object:
    one = reduced(x)
    return one.reshape(-1) + reduced(y).reshape(-1), torch.relu(one)


def broadcast(x: Tensor, y: Tensor) -> object:
    return reduced(x) + reduced(y[:1])


def scaled_sum(x: Tensor, y: Tensor) -> object:
    return torch.add(reduced(x), reduced(y), alpha=2)


def different_dtypes(x: Tensor, y: Tensor) -> object:
    return reduced(x) + reduced(y.bfloat16())


def float16(x: Tensor, y: Tensor) -> object:
    return reduced(x.half()) + reduced(y.half())


@pytest.mark.parametrize(
    "function",
    [
        different_ops,
        maxima,
        different_groups,
        one_read_elsewhere,
        view_read_elsewhere,
        broadcast,
        scaled_sum,
        different_dtypes,
        float16,
    ],
)
def test_sums_that_must_stay(function: Callable[..., object]) -> None:
    assert collectives_of(normalised(function, *tensors(2)))["all_reduce"] == 2


def test_never_leaves_the_graph_as_it_is() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return reduced(x @ w) + reduced(w @ x)

    graph = make_fx(function, tracing_mode="fake")(*tensors(2, 8, 8)).graph
    before = str(graph)
    sites = fuse(graph, policy="never", judge=anywhere(lambda problem: Reason.POLICY_NEVER))
    assert [one.reason for one in sites] == [Reason.POLICY_NEVER] * 2
    assert str(graph) == before


def test_scatters_along_different_dimensions_stay() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return scattered(x, 0).reshape(-1) + scattered(y, 1).reshape(-1)

    assert collectives_of(normalised(function, *tensors(2)))["reduce_scatter_tensor"] == 2


def test_one_all_reduce_added_to_itself_stays() -> None:
    def function(x: Tensor) -> Tensor:
        one = reduced(x)
        return one + one

    assert collectives_of(normalised(function, torch.randn(4, 8)))["all_reduce"] == 1


def test_bmm_of_one_batch_becomes_mm() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return reduced(torch.bmm(x, w))

    graph = normalised(function, torch.randn(1, 4, 8), torch.randn(1, 8, 6))
    assert not graph.find_nodes(op="call_function", target=aten.bmm.default)


def test_bmm_of_more_batches_stays() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return reduced(torch.bmm(x, w))

    graph = normalised(function, torch.randn(2, 4, 8), torch.randn(2, 8, 6))
    assert graph.find_nodes(op="call_function", target=aten.bmm.default)


def test_permute_of_unit_dimensions_becomes_views() -> None:
    def function(x: Tensor) -> Tensor:
        return reduced(x.permute(2, 0, 3, 1))

    graph = normalised(function, torch.randn(4, 1, 1, 8))
    assert not graph.find_nodes(op="call_function", target=aten.permute.default)


def moves_something(x: Tensor) -> Tensor:
    return reduced(x.permute(2, 0, 1))


def far_from_products(x: Tensor) -> Tensor:
    return reduced(x.permute(1, 0, 2) + 1)


@pytest.mark.parametrize("function", [moves_something, far_from_products])
def test_permutes_that_stay(function: Callable[..., object]) -> None:
    assert normalised(function, torch.randn(4, 1, 8)).find_nodes(op="call_function", target=aten.permute.default)


def test_scale_of_a_low_rank_addend_moves_to_its_small_input() -> None:
    def function(x: Tensor, w: Tensor, low: Tensor, back: Tensor) -> Tensor:
        return reduced(x @ w + ((x @ low) @ back) * 2.0)

    graph = normalised(function, *tensors(1, 4, 8), *tensors(1, 8, 6), *tensors(1, 8, 2), *tensors(1, 2, 6))
    (scale,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert tuple(scale.meta["val"].shape) == (4, 2)


@pytest.mark.parametrize(("factor", "moves"), [(2.0, False), (0.5, True)])
def test_scale_of_a_float16_addend_moves_where_it_makes_the_input_smaller(factor: float, moves: bool) -> None:
    def function(x: Tensor, w: Tensor, low: Tensor, back: Tensor) -> Tensor:
        return reduced(x @ w + ((x @ low) @ back) * factor)

    shapes = ((4, 8), (8, 6), (8, 2), (2, 6))
    graph = normalised(function, *(torch.randn(shape, dtype=torch.float16) for shape in shapes))
    (scale,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert (tuple(scale.meta["val"].shape) == (4, 2)) is moves


def test_scale_stays_where_nothing_is_reduced() -> None:
    def function(x: Tensor, w: Tensor, low: Tensor, back: Tensor) -> list[Tensor]:
        return [x @ w + ((x @ low) @ back) * 2.0, reduced(x)]

    graph = normalised(function, *tensors(1, 4, 8), *tensors(1, 8, 6), *tensors(1, 8, 2), *tensors(1, 2, 6))
    (scale,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert tuple(scale.meta["val"].shape) == (4, 6)
