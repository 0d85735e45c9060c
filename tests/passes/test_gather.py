"""Every form in which a graph gathers along a dimension is read as one; what is no plain gather is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from mkcompile.passes.gather import Gather, gather_behind, gather_of
from mkcompile.passes.graph import collectives
from mkcompile.passes.reason import Reason, Why
from tests.captured import capture, fake_group
from tests.lockstep import World, run
from tests.regions import all_gather

WORLD = 4
GROUP = "0"
c10d = torch.ops._c10d_functional
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_group(WORLD):
        yield


def _along(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: all_gather(x, dim, GROUP)


def _in_place(x: Tensor) -> Tensor:
    out = x.new_empty(WORLD * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x)
    return out


def _list(x: Tensor) -> Tensor:
    pieces = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(pieces, x)
    return torch.cat(pieces, dim=1)


def _with_sizes(x: Tensor) -> Tensor:
    whole = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    return torch.cat(whole.split([x.shape[0]] * WORLD), dim=-1)


def _moved(dim: int) -> Callable[[Tensor], Tensor]:
    """As vLLM gathers."""

    def function(x: Tensor) -> Tensor:
        stacked = all_gather(x, 0, GROUP).view(WORLD, *x.shape).movedim(0, dim)
        return stacked.reshape(*x.shape[:dim], WORLD * x.shape[dim], *x.shape[dim + 1 :])

    return function


def _unbound(x: Tensor) -> Tensor:
    return torch.cat(all_gather(x, 0, GROUP).view(WORLD, *x.shape).unbind(0), dim=-1)


def _selected(x: Tensor) -> Tensor:
    stacked = all_gather(x, 0, GROUP).view(WORLD, *x.shape)
    return torch.cat([stacked[rank] for rank in range(WORLD)], dim=1)


# name: the function, its input's shape, the dimensions that the gather may be read along
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "rows": (_along(0), (3, 8), (0,)),
    "rows_in_place": (_in_place, (3, 5, 8), (0,)),
    "first_of_three": (_along(0), (3, 5, 8), (0,)),
    "middle": (_along(1), (3, 5, 8), (1,)),
    "middle_batch_one": (_along(1), (1, 5, 8), (0, 1)),
    "middle_two_batches_of_one": (_along(2), (1, 1, 5, 8), (0, 1, 2)),
    "last": (_along(2), (3, 5, 8), (2,)),
    "last_of_one_row": (_along(1), (1, 8), (0, 1)),
    "last_of_a_vector": (_along(0), (8,), (0,)),
    "list_of_slices": (_list, (3, 5, 8), (1,)),
    "split_with_sizes": (_with_sizes, (3, 5, 8), (2,)),
    "moved_to_the_middle": (_moved(1), (3, 5, 8), (1,)),
    "moved_to_the_last": (_moved(2), (3, 5, 8), (2,)),
    "moved_in_rows": (_moved(1), (3, 8), (1,)),
    "moved_of_four": (_moved(2), (3, 2, 5, 8), (2,)),
    "unbound": (_unbound, (3, 5, 8), (2,)),
    "selected": (_selected, (3, 5, 8), (1,)),
}


def _the_gather(graph: fx.Graph) -> Gather | Why | None:
    (collective,) = collectives(graph)
    return gather_of(collective)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_as_a_gather_along_its_dimension(name: str) -> None:
    function, shape, dims = FORMS[name]
    (captured,) = capture(lambda x: function(x) * 2, torch.randn(shape))
    found = _the_gather(captured.before.graph)
    assert isinstance(found, Gather)
    assert (found.dims, found.world_size, found.source.name) == (dims, WORLD, "arg0_1")
    (double,) = captured.before.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    behind = gather_behind(double.args[0])
    assert behind == found
    _assert_root_holds(captured.before, found)


def _assert_root_holds(module: fx.GraphModule, gather: Gather) -> None:
    """The root really is the ranks' inputs laid along each of the dimensions."""
    outputs = module.graph.output_node()
    outputs.args = ((gather.root,),)
    module.recompile()
    shape = gather.source.meta["val"].shape
    inputs = [torch.arange(shape.numel()).reshape(shape) + 1000.0 * rank for rank in range(WORLD)]
    for (root,) in run(World(WORLD), module, lambda rank: [inputs[rank]]):
        for dim in gather.dims:
            assert torch.equal(root.reshape(gather.shape(dim)), torch.cat(inputs, dim))


def test_views_and_waits_of_the_gathered_tensor_are_its_aliases() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = all_gather(x, 1, GROUP)
        return whole.view(-1, 8).relu(), whole.view(6, 10, 8).view(60, 2, 4).neg()

    (captured,) = capture(function, torch.randn(3, 5, 8))
    found = _the_gather(captured.before.graph)
    assert isinstance(found, Gather)
    shapes = sorted(tuple(alias.meta["val"].shape) for alias in found.aliases)
    assert found.root is found.aliases[0] and {(60, 8), (60, 2, 4), (3, 20, 8)} <= set(shapes)


def test_the_gradient_of_a_scatter_is_a_gather() -> None:
    def function(x: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor_autograd(x * 2, "sum", 1, dist.group.WORLD)

    _, backward = capture(function, torch.randn(3, 20, 8, requires_grad=True), backward=True)
    found = _the_gather(backward.before.graph)
    assert isinstance(found, Gather) and found.dims == (1,)


def test_sizes_may_be_symbols() -> None:
    def function(x: Tensor) -> Tensor:
        return all_gather(x, 1, GROUP) * 2

    (captured,) = capture(function, torch.randn(3, 5, 8), dynamic=True)
    found = _the_gather(captured.before.graph)
    assert isinstance(found, Gather) and found.dims == (1,)


def _built(build: Callable[[fx.Graph, fx.Node], Any], *shape: int, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """A graph of one placeholder that `build` continues; with fake values."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    module = fx.GraphModule({}, graph)
    with FakeTensorMode() as mode:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(torch.empty(shape, dtype=dtype))
    return module.graph


def _gathered(graph: fx.Graph, x: fx.Node, group: Any = "0", world_size: int = WORLD) -> fx.Node:
    return graph.call_function(
        c10d.wait_tensor.default, (graph.call_function(c10d.all_gather_into_tensor.default, (x, world_size, group)),)
    )


def _pieces(graph: fx.Graph, wait: fx.Node, rows: int, order: tuple[int, ...]) -> list[fx.Node]:
    return [graph.call_function(aten.slice.Tensor, (wait, 0, i * rows, (i + 1) * rows)) for i in order]


def test_pieces_out_of_order_are_not_a_gather_along_another_dimension() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.cat.default, (_pieces(graph, _gathered(graph, x), 3, (0, 2, 1, 3)), 1))

    found = _the_gather(_built(build, 3, 8))
    assert isinstance(found, Gather) and found.dims == (0,) and found.root.target is c10d.wait_tensor.default


def test_pieces_of_other_sizes_are_not_the_shards() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        wait = _gathered(graph, x)
        return graph.call_function(aten.cat.default, (_pieces(graph, wait, 2, (0, 1, 2, 3)), 1))

    found = _the_gather(_built(build, 3, 8))
    assert isinstance(found, Gather) and found.dims == (0,)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1), (0, 2, 1), (2, 1, 0)])
def test_other_permutes_are_no_gather_along_another_dimension(order: tuple[int, ...]) -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        stacked = graph.call_function(aten.reshape.default, (_gathered(graph, x), [WORLD, 3, 8]))
        return graph.call_function(aten.permute.default, (stacked, list(order)))

    found = _the_gather(_built(build, 3, 8))
    assert isinstance(found, Gather) and found.dims == (0,)


def test_slices_that_run_to_the_end_are_pieces() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        wait = _gathered(graph, x)
        *pieces, _ = _pieces(graph, wait, 3, (0, 1, 2, 3))
        pieces.append(graph.call_function(aten.slice.Tensor, (wait, 0, 9, 2**63 - 1)))
        return graph.call_function(aten.cat.default, (pieces, 1))

    found = _the_gather(_built(build, 3, 8))
    assert isinstance(found, Gather) and found.dims == (1,)


def _refused(build: Callable[[fx.Graph, fx.Node], Any], *shape: int, dtype: torch.dtype = torch.float32) -> Reason:
    found = _the_gather(_built(build, *shape, dtype=dtype))
    assert isinstance(found, Why)
    return found.reason


def test_two_orders_at_once_are_refused() -> None:
    def rows_too(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        wait = _gathered(graph, x)
        columns = graph.call_function(aten.cat.default, (_pieces(graph, wait, 3, (0, 1, 2, 3)), 1))
        return [columns, graph.call_function(aten.relu.default, (wait,))]

    def two_cats(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        pieces = _pieces(graph, _gathered(graph, x), 3, (0, 1, 2, 3))
        return [graph.call_function(aten.cat.default, (pieces, dim)) for dim in (1, 2)]

    assert _refused(rows_too, 3, 8) is Reason.GATHERED_IN_TWO_ORDERS
    assert _refused(two_cats, 3, 5, 8) is Reason.GATHERED_IN_TWO_ORDERS


def test_bytes_viewed_as_another_dtype_are_refused() -> None:
    def rows(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.view.dtype, (_gathered(graph, x), torch.float8_e4m3fn))

    def columns(graph: fx.Graph, x: fx.Node) -> fx.Node:
        pieces = _pieces(graph, _gathered(graph, x), 3, (0, 1, 2, 3))
        viewed = [graph.call_function(aten.view.dtype, (piece, torch.float8_e4m3fn)) for piece in pieces]
        return graph.call_function(aten.cat.default, (viewed, 1))

    assert _refused(rows, 3, 8, dtype=torch.uint8) is Reason.DTYPE
    assert _refused(columns, 3, 8, dtype=torch.uint8) is Reason.DTYPE


def test_a_result_that_is_used_before_its_wait_is_refused() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        wait = _gathered(graph, x)
        return [wait, graph.call_function(aten.relu.default, (wait.args[0],))]

    assert _refused(build, 3, 8) is Reason.USED_BEFORE_WAIT


def test_a_group_of_one_rank_is_refused() -> None:
    alone = dist.new_group([0]).group_name  # type: ignore[union-attr]
    assert _refused(lambda graph, x: _gathered(graph, x, alone, 1), 3, 8) is Reason.WORLD_SIZE_ONE


def test_a_group_that_is_a_value_of_the_graph_is_refused() -> None:
    graph = fx.Graph()
    x, group = graph.placeholder("x"), graph.placeholder("group")
    graph.output(_gathered(graph, x, group))
    found = _the_gather(graph)
    assert isinstance(found, Why) and found.reason is Reason.GROUP_IS_NODE


def test_other_collectives_are_no_gathers() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(c10d.all_reduce.default, (x, "sum", "0"))

    assert _the_gather(_built(build, 3, 8)) is None
