"""One form for every way in which a graph says "gather along dim d".

The collective lays the ranks' tensors one after the other along dim 0. What follows makes that a gather along d:
nothing (d = 0), split or slices and a `cat` along d, or only reshapes where all dimensions before d are 1. Written by
hand it is also a view with the ranks as a dimension of its own, which is taken apart or moved to d by a permute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from mkcompile.passes.graph import (
    ALL_GATHER,
    VIEWS,
    WAIT,
    argument,
    aten,
    c10d,
    is_call,
    only_user,
    shape_of,
    value,
    world_size_of,
)
from mkcompile.passes.reason import Reason, Why
from mkcompile.passes.sizes import same_shape, same_size

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
SLICES = (aten.slice.Tensor,)
CATS = (aten.cat.default,)
SELECTS = (aten.select.int,)
UNBINDS = (aten.unbind.int,)
PERMUTES = (aten.permute.default,)
DTYPE_VIEWS = (aten.view.dtype,)
# Only torch's fully sharded data parallelism makes these: parameters of several layers, in one buffer of its own.
GATHERS_INTO_BUFFER = (c10d.all_gather_into_tensor_out.default,)
PADS = (aten.constant_pad_nd.default,)
_PIECES = (*SPLITS, getitem, *SLICES, *SELECTS, *UNBINDS, *DTYPE_VIEWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A gather of `source` along one of `dims`.

    `root` is the node that is the gathered tensor; `aliases` are all nodes with its elements in its order, root first.
    Where that order is the one of dim 0, the gather may as well be read as one along any dimension that has only
    dimensions of size 1 before it; `dims` lists them all.
    """

    collective: fx.Node
    source: fx.Node
    dims: tuple[int, ...]
    world_size: int
    group: str
    root: fx.Node
    aliases: tuple[fx.Node, ...]

    def shape(self, dim: int) -> tuple[Any, ...]:
        """The gathered tensor's shape, read as gathered along `dim`."""
        return tuple(s * self.world_size if i == dim else s for i, s in enumerate(shape_of(self.source)))


def gather_of(collective: fx.Node) -> Gather | Why | None:
    """What the all-gather gathers, or why that can't be said; None for other kinds of collective."""
    if is_call(collective, GATHERS_INTO_BUFFER):
        return Why(reason=Reason.PARAMETER_GATHER, detail=collective.name)
    if not is_call(collective, ALL_GATHER):
        return None
    sent, world_size, group = collective.args[:3]
    if not isinstance(group, str):
        return Why(reason=Reason.GROUP_IS_NODE, detail=str(group))
    if world_size_of(group) == 1:
        return Why(reason=Reason.WORLD_SIZE_ONE)
    assert isinstance(sent, fx.Node) and isinstance(world_size, int)
    source = _before_reinterpreting(sent)
    wait = only_user(collective)
    if wait is None or not is_call(wait, WAIT):
        return Why(reason=Reason.USED_BEFORE_WAIT)
    laid_out = _layout(wait, source, world_size)
    if isinstance(laid_out, Why):
        return laid_out
    root, dims = laid_out
    aliases = tuple(aliases_of(root))
    return Gather(
        collective=collective, source=source, dims=dims, world_size=world_size, group=group, root=root, aliases=aliases
    )


def aliases_of(root: fx.Node) -> Iterator[fx.Node]:
    """The root and all nodes with its elements in its order."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending += [user for user in node.users if is_call(user, (*VIEWS, *WAIT))]


def _layout(wait: fx.Node, source: fx.Node, world_size: int) -> tuple[fx.Node, tuple[int, ...]] | Why:
    """The root and the dimensions it can be read as; why not where the order can't be said."""
    aliases = list(aliases_of(wait))
    cats = {cat: None for alias in aliases for user in alias.users for cat in _cats_behind(user)}
    dims = {cat: dim for cat in cats if (dim := _reassembled(cat, source, world_size)) is not None}
    moved = {user: _moved_to(user, source, world_size) for alias in aliases for user in alias.users}
    dims.update({user: dim for user, dim in moved.items() if dim is not None})
    if not dims:
        return _with_dtype_of(source, wait, _equal_dims(source))
    if len(dims) > 1 or not _all_end_in(wait, next(iter(dims))):
        return Why(reason=Reason.GATHERED_IN_TWO_ORDERS, detail=", ".join(cat.name for cat in dims))
    ((cat, dim),) = dims.items()
    return _with_dtype_of(source, cat, (dim,))


def _reinterprets(node: Any) -> bool:
    """Is it a view of the same elements as another dtype of the same size? 8-bit floats often travel as bytes."""
    return is_call(node, DTYPE_VIEWS) and value(node).dtype.itemsize == value(node.args[0]).dtype.itemsize


def _before_reinterpreting(sent: fx.Node) -> fx.Node:
    node: Any = sent
    while _reinterprets(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _with_dtype_of(source: fx.Node, gathered: fx.Node, dims: tuple[int, ...]) -> tuple[fx.Node, tuple[int, ...]] | Why:
    """The gathered tensor in its source's dtype: the node itself, or where views lead from it to that dtype."""
    why = Why(reason=Reason.DTYPE, detail="gathered as bytes and viewed as another dtype")
    root = gathered
    while value(root).dtype != value(source).dtype:
        user = only_user(root)
        if user is None or not (is_call(user, (*VIEWS, *WAIT)) or _reinterprets(user)):
            return why
        root = user
    is_viewed = any(is_call(user, DTYPE_VIEWS) for alias in aliases_of(root) for user in alias.users)
    return why if is_viewed else (root, dims)


def _equal_dims(source: fx.Node) -> tuple[int, ...]:
    """Dim 0, and all dimensions with nothing but dimensions of size 1 before them."""
    dims = []
    for dim, size in enumerate(shape_of(source)):
        dims.append(dim)
        if not same_size(size, 1):
            break
    return tuple(dims)


def _cats_behind(pieces: fx.Node) -> Iterator[fx.Node]:
    """The `cat` nodes that read pieces of a split or a slice, also through views of the dtype."""
    if is_call(pieces, _PIECES):
        for user in pieces.users:
            yield from _cats_behind(user)
    elif is_call(pieces, CATS):
        yield pieces


def _reassembled(cat: fx.Node, source: fx.Node, world_size: int) -> int | None:
    """The dimension, if the cat lays the ranks' pieces along one, each whole, once and in rank order."""
    pieces: Any = argument(cat, 0, "tensors")
    dim = argument(cat, 1, "dim", 0)
    if len(pieces) != world_size or not isinstance(dim, int):
        return None
    if not all(_is_piece(piece, rank, source, world_size) for rank, piece in enumerate(pieces)):
        return None
    return dim % len(shape_of(source))


def _moved_to(permute: fx.Node, source: fx.Node, world_size: int) -> int | None:
    """The dimension, if the permute moves the ranks there from the front of `[world_size, *source]`."""
    shape = shape_of(source)
    if not is_call(permute, PERMUTES) or not _is_stacked(permute.args[0], source, world_size):
        return None
    order: Any = permute.args[1]
    dim = [one % (len(shape) + 1) for one in order].index(0)
    return dim if 0 < dim < len(shape) and list(order) == [*range(1, dim + 1), 0, *range(dim + 1, len(order))] else None


def _is_stacked(stacked: Any, source: fx.Node, world_size: int) -> bool:
    return isinstance(stacked, fx.Node) and same_shape(shape_of(stacked), (world_size, *shape_of(source)))


def _is_piece(piece: Any, rank: int, source: fx.Node, world_size: int) -> bool:
    """Is it this rank's shard, whole?"""
    while _reinterprets(piece):
        piece = piece.args[0]
    if not same_shape(shape_of(piece), shape_of(source)):
        return False
    if is_call(piece, (getitem,)):
        split: Any = piece.args[0]
        if is_call(split, UNBINDS):
            stacked = argument(split, 1, "dim", 0) == 0 and _is_stacked(split.args[0], source, world_size)
            return stacked and piece.args[1] == rank
        if not is_call(split, SPLITS) or argument(split, 2, "dim", 0) != 0 or piece.args[1] != rank:
            return False
        return _is_whole(split.args[0], source, world_size)
    if is_call(piece, SELECTS):
        return piece.args[1:] == (0, rank) and _is_stacked(piece.args[0], source, world_size)
    if not is_call(piece, SLICES) or argument(piece, 1, "dim", 0) != 0 or argument(piece, 4, "step", 1) != 1:
        return False
    start = argument(piece, 2, "start")
    start = start.meta["val"] if isinstance(start, fx.Node) else start or 0
    return same_size(start, shape_of(source)[0] * rank) and _is_whole(piece.args[0], source, world_size)


def _is_whole(gathered: Any, source: fx.Node, world_size: int) -> bool:
    """Is it the gathered tensor in the collective's own shape?"""
    first, *rest = shape_of(source)
    return same_shape(shape_of(gathered), (first * world_size, *rest))


def _all_end_in(wait: fx.Node, cat: fx.Node) -> bool:
    """Is every use of the wait a part of what the cat reads?"""
    pending = [wait]
    while pending:
        for user in pending.pop().users:
            if user is cat:
                continue
            if not is_call(user, (*_PIECES, *VIEWS, *WAIT)):
                return False
            pending.append(user)
    return True


def gather_behind(node: fx.Node) -> Gather | None:
    """The gather whose result the node is, in any shape; None where it is none."""
    current: Any = node
    while is_call(current, (*VIEWS, *WAIT, *_PIECES, *CATS, *PERMUTES)):
        current = current.args[0][0] if is_call(current, CATS) else current.args[0]
    gather = gather_of(current) if isinstance(current, fx.Node) else None
    return gather if isinstance(gather, Gather) and node in gather.aliases else None
