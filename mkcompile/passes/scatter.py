"""One form for 'scatter along a dimension': what a reduce-scatter reads, however the slices were laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any, cast

from torch import fx

from mkcompile.passes.graph import VIEWS, argument, aten, is_call, shape_of
from mkcompile.passes.reason import Reason, Why
from mkcompile.passes.sizes import Size, expression, same_shape, same_size

SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
PADS = (aten.constant_pad_nd.default,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Rank r receives slice r of `source` along `dim`.

    `shape` is the source's, [.., S, ..], with S divisible by the group; symbolic sizes stay symbolic. `readers` are
    the nodes that read the source for this scatter, `nodes` all nodes between the source and the collective (excluded).
    """

    source: fx.Node
    dim: int
    shape: tuple[Size, ...]
    world_size: int
    readers: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]


def scatter_before(collective: fx.Node) -> Scatter | Why:
    """The scatter that a `reduce_scatter_tensor(laid_out, op, world_size, group)` performs.

    A reduce-scatter gives each rank its part of the flat input, so views in front of it do not matter. Known layouts:
    `cat` (along 0) of `split`, `split_with_sizes`, `chunk` or `slice` pieces along any dimension; a permute that moves
    a dimension of the ranks to the front; else dimension 0.
    """
    laid_out, _, world_size, _ = cast(tuple[Any, str, int, Any], collective.args)
    views: list[fx.Node] = []
    cat = laid_out
    while is_call(cat, VIEWS):
        views.insert(0, cat)
        cat = cat.args[0]
    found = _of_cat(cat, world_size) if is_call(cat, (aten.cat.default,)) else _of_permute(cat, world_size)
    if isinstance(found, Scatter):
        return replace(found, nodes=(*found.nodes, cat, *views))
    if found is not None:
        return found
    return Scatter(
        source=laid_out, dim=0, shape=shape_of(laid_out), world_size=world_size, readers=(collective,), nodes=()
    )


def _of_permute(permute: Any, world_size: int) -> Scatter | None:
    """`permute(x [.., world_size, S, ..])` to `[world_size, .., S, ..]`: a scatter of `[.., world_size * S, ..]`."""
    if not is_call(permute, (aten.permute.default,)):
        return None
    source, order = permute.args
    shape = shape_of(source)
    dim = order[0] % len(shape)
    rest = [one for one in range(len(shape)) if one != dim]
    if dim == 0 or [one % len(shape) for one in order[1:]] != rest or not same_size(shape[dim], world_size):
        return None
    joined = (*shape[:dim], world_size * prod(shape[dim + 1 : dim + 2]), *shape[dim + 2 :])
    return Scatter(source=source, dim=dim, shape=joined, world_size=world_size, readers=(permute,), nodes=())


def rows_or_columns(scatter: Scatter, rows: Size, columns: Size) -> tuple[tuple[Size, ...], int] | Why:
    """The scatter as (shape, dim) of a product [rows, columns]: a shape that ends with `columns`.

    Views between the product and the scatter may have split or joined dimensions, for instance columns into heads.
    """
    shape, dim = scatter.shape, scatter.dim
    if len(shape) > 1 and same_size(shape[-1], columns):
        return shape, dim
    before, size, inner = shape[:dim], shape[dim], prod(shape[dim + 1 :])
    if isinstance(inner, int) and isinstance(columns, int) and inner % columns == 0:
        size = size * (inner // columns)
        return ((prod(before), size, columns), 1) if before else ((size, columns), 0)
    if same_size(size * inner, columns):
        return (rows, columns), 1
    if dim == 0 and isinstance(rows, int) and rows % scatter.world_size == 0:
        return (rows, columns), 0
    return Why(reason=Reason.SCATTER_SHAPE, detail=f"dimension {dim} of {tuple(shape)}")


def _of_cat(cat: fx.Node, world_size: int) -> Scatter | Why | None:
    """The pieces of a `cat` along 0 as a scatter; None where they are not the slices of one tensor in order."""
    pieces = cat.args[0]
    if argument(cat, 1, "dim", 0) not in (0, -len(shape_of(cat))) or not isinstance(pieces, (list, tuple)):
        return None
    stripped = [_strip(piece) for piece in pieces]
    if any(is_call(piece, PADS) for piece in stripped):
        return Why(reason=Reason.UNEVEN_SCATTER, detail=cat.name)
    if len(pieces) != world_size or not all(isinstance(piece, fx.Node) for piece in pieces):
        return None
    found = _of_split(stripped) or _of_slices(stripped)
    if found is None:
        return None
    if not all(same_shape(shape_of(piece), shape_of(stripped[0])) for piece in stripped):
        return Why(reason=Reason.UNEVEN_SCATTER, detail=cat.name)
    source, dim, readers = found
    between = dict.fromkeys((*readers, *stripped, *pieces))
    return Scatter(
        source=source,
        dim=dim,
        shape=shape_of(source),
        world_size=world_size,
        readers=readers,
        nodes=tuple(between),
    )


def _strip(piece: Any) -> Any:
    while is_call(piece, (aten.clone.default,)):
        piece = piece.args[0]
    return piece


_Found = tuple[fx.Node, int, tuple[fx.Node, ...]]


def _of_split(pieces: list[Any]) -> _Found | None:
    """All outputs of one split, in order: its source, dimension and itself."""
    if not all(is_call(piece, (getitem,)) for piece in pieces):
        return None
    split = pieces[0].args[0]
    if not is_call(split, SPLITS) or any(piece.args != (split, i) for i, piece in enumerate(pieces)):
        return None
    if len(split.meta["val"]) != len(pieces):
        return None
    source = split.args[0]
    return source, argument(split, 2, "dim", 0) % len(shape_of(source)), (split,)


def _of_slices(pieces: list[Any]) -> _Found | None:
    """`slice(source, dim, i * size, (i + 1) * size)` for all i: the source, the dimension and the slices."""
    if not all(is_call(piece, (aten.slice.Tensor,)) for piece in pieces):
        return None
    source = pieces[0].args[0]
    dim = argument(pieces[0], 1, "dim", 0) % len(shape_of(source))
    size = shape_of(pieces[0])[dim]
    for i, piece in enumerate(pieces):
        start = argument(piece, 2, "start", 0) or 0
        start = start.meta["val"] if isinstance(start, fx.Node) else start
        same_dim = argument(piece, 1, "dim", 0) % len(shape_of(source)) == dim
        if piece.args[0] is not source or not same_dim or argument(piece, 4, "step", 1) != 1:
            return None
        if expression(start) != expression(i * size):
            return None
    whole = same_size(shape_of(source)[dim], len(pieces) * size)
    return (source, dim, tuple(pieces)) if whole else None
