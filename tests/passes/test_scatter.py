"""What counts as a scatter along a dimension, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mkcompile.passes.graph import REDUCE_SCATTER, aten, is_call, peel
from mkcompile.passes.reason import Reason, Why
from mkcompile.passes.scatter import Scatter, rows_or_columns, scatter_before

WORLD_SIZE = 4
c10d = torch.ops._c10d_functional
Layout = Callable[[Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("group")


def found(layout: Layout, *shape: int) -> tuple[Scatter | Why, fx.Node]:
    """The scatter of `layout(x)`, and x."""

    def function(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(layout(x), "sum", WORLD_SIZE, "0"))

    graph = make_fx(function, tracing_mode="fake")(torch.zeros(*shape)).graph
    (collective,) = graph.find_nodes(op="call_function", target=REDUCE_SCATTER[0])
    return scatter_before(collective), next(iter(graph.nodes))


def slices(dim: int, *starts: int) -> Layout:
    return lambda x: torch.cat([x.narrow(dim, start, 2) for start in starts])


def outputs(dim: int, *indices: int) -> Layout:
    def layout(x: Tensor) -> Tensor:
        pieces = x.split(2, dim)
        return torch.cat([pieces[i] for i in indices])

    return layout


@pytest.mark.parametrize(
    ("layout", "dim"),
    [
        (outputs(1, 0, 1, 2, 3), 1),
        (outputs(-1, 0, 1, 2, 3), 2),
        (slices(1, 0, 2, 4, 6), 1),
        (slices(2, 0, 2, 4, 6), 2),
        (slices(0, 0, 2, 4, 6), 0),
        (lambda x: torch.cat([piece.clone() for piece in x.chunk(WORLD_SIZE, 1)]), 1),
        (lambda x: aten.cat.default(list(aten.split_with_sizes(x, [2] * WORLD_SIZE, 2)), 0), 2),
        (lambda x: aten.cat.default(list(x.split(2, 1)), -3).reshape(-1, 8), 1),
    ],
)
def test_slices_in_order_are_a_scatter(layout: Layout, dim: int) -> None:
    scatter, x = found(layout, 8, 8, 8)
    assert isinstance(scatter, Scatter)
    assert (scatter.source, scatter.dim, scatter.shape) == (x, dim, (8, 8, 8))
    assert set(scatter.readers) == set(x.users)


@pytest.mark.parametrize(("view", "dim"), [((8, 4, 2, 8), 1), ((8, 8, 4, 2), 2), ((2, 4, 4, 8, 2), 1), ((16, 8, 4), 2)])
def test_ranks_that_are_moved_to_the_front_are_a_scatter(view: tuple[int, ...], dim: int) -> None:
    scatter, x = found(lambda x: x.view(view).movedim(dim, 0).reshape(-1, 8), 8, 8, 8)
    assert isinstance(scatter, Scatter)
    assert (peel(scatter.source), scatter.dim) == (x, dim)
    assert scatter.shape == (*view[:dim], prod(view[dim : dim + 2]), *view[dim + 2 :])


@pytest.mark.parametrize("order", [(1, 2, 0, 3), (2, 0, 1, 3), (1, 0, 3, 2), (3, 0, 1, 2)])
def test_other_permutes_are_only_what_they_are(order: tuple[int, ...]) -> None:
    scatter, _ = found(lambda x: x.view(8, 4, 2, 8).permute(order).reshape(-1, 8), 8, 8, 8)
    assert isinstance(scatter, Scatter) and scatter.dim == 0


def test_a_tensor_itself_is_scattered_along_its_first_dimension() -> None:
    scatter, x = found(lambda x: x, 8, 6)
    assert isinstance(scatter, Scatter)
    assert (scatter.source, scatter.dim, scatter.nodes) == (x, 0, ())


@pytest.mark.parametrize(
    "layout",
    [
        outputs(1, 1, 0, 2, 3),
        outputs(1, 0, 0, 0, 0),
        slices(1, 2, 0, 4, 6),
        slices(1, 0, 1, 2, 3),
        slices(1, 0, 2, 4, 4),
        lambda x: torch.cat([x[:, 0:8:2], x[:, 1:8:2], x[:, 0:8:2], x[:, 1:8:2]]),
        lambda x: torch.cat([x[:, :2], x[:, 2:4], x[:, 4:6], (x + 1)[:, 6:]]),
        lambda x: torch.cat([x[:, :2], x[:, 2:4], x[:, 4:6], x[:, :, 6:].transpose(1, 2)]),
        lambda x: torch.cat(x.split(4, 1)),
        lambda x: torch.cat(x.split(1, 1)),
        lambda x: torch.cat(x.split(2, 1), 2),
        lambda x: torch.cat([*x[:, :6].split(2, 1), x[:, 6:]]),
    ],
)
def test_other_pieces_are_only_what_they_are(layout: Layout) -> None:
    scatter, _ = found(layout, 8, 8, 8)
    assert isinstance(scatter, Scatter)
    assert is_call(scatter.source, (aten.cat.default,))
    assert scatter.dim == 0


def test_pieces_that_leave_something_out_are_no_scatter() -> None:
    scatter, _ = found(slices(1, 0, 2, 4, 6), 8, 9, 8)
    assert isinstance(scatter, Scatter)
    assert is_call(scatter.source, (aten.cat.default,))


def padded(x: Tensor) -> Tensor:
    pieces = list(x.split(2, 1))
    return torch.cat([*pieces[:-1], torch.nn.functional.pad(pieces[-1], (0, 0, 0, 1))])


def test_padded_pieces_are_refused() -> None:
    scatter, _ = found(padded, 8, 7, 8)
    assert isinstance(scatter, Why) and scatter.reason is Reason.UNEVEN_SCATTER


def scatter_of(shape: tuple[int, ...], dim: int) -> Scatter:
    node = fx.Graph().placeholder("x")
    return Scatter(source=node, dim=dim, shape=shape, world_size=WORLD_SIZE, readers=(), nodes=())


@pytest.mark.parametrize(
    ("shape", "dim", "expected"),
    [
        ((4, 8, 16), 1, ((4, 8, 16), 1)),
        ((4, 8, 16), 2, ((4, 8, 16), 2)),
        ((4, 8, 2, 8), 1, ((4, 8, 16), 1)),
        ((4, 8, 2, 8), 0, ((4 * 8, 16), 0)),
        ((4, 8, 4, 4), 2, ((32, 16), 1)),
        ((32 * 16,), 0, ((32, 16), 0)),
    ],
)
def test_shapes_become_rows_or_columns_of_the_product(
    shape: tuple[int, ...], dim: int, expected: tuple[tuple[int, ...], int]
) -> None:
    assert rows_or_columns(scatter_of(shape, dim), 32, 16) == expected


@pytest.mark.parametrize(("shape", "dim"), [((4, 8, 4, 4), 3), ((4, 8, 2, 8), 3), ((2, 16, 4, 4), 3)])
def test_parts_of_columns_are_refused(shape: tuple[int, ...], dim: int) -> None:
    why = rows_or_columns(scatter_of(shape, dim), 32, 16)
    assert isinstance(why, Why) and why.reason is Reason.SCATTER_SHAPE
