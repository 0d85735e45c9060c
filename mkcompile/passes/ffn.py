"""Finds feed-forward networks: (all-gather,) up products, activation, down product, all-reduce or reduce-scatter.

Legend: M rows, K input features, H hidden features of this rank, N output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from mkcompile.ops.ffn import Ffn
from mkcompile.passes.activation import Activation, Elementwise, elementwise, recognise
from mkcompile.passes.all_gather_gemm import bias_after, read_as, used_beside
from mkcompile.passes.fake_call import problem_of
from mkcompile.passes.gather import SLICES, Gather, gather_behind
from mkcompile.passes.gemm import Gemms, Product, gemms_before, product, why_shared
from mkcompile.passes.graph import ALL_REDUCE, GEMMS, REDUCE_SCATTER, argument, aten, is_call, peel, shape_of, value
from mkcompile.passes.reason import Reason, Why
from mkcompile.passes.reduction import Reduction, reduction_of
from mkcompile.passes.scatter import SPLITS, rows_or_columns, scatter_before
from mkcompile.passes.site import Match, Output, Refusal
from mkcompile.passes.sizes import Size, same_shape, same_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """The down product and what reduces it: the site's tail. `dim` -1: an all-reduce."""

    gemms: Gemms
    reduction: Reduction
    shape: tuple[Size, ...]
    dim: int
    covers: tuple[fx.Node, ...]

    @property
    def hidden(self) -> fx.Node:
        """[M, H], what the down product reads."""
        return self.gemms.x[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Up:
    """An up product `x @ w + bias`. `output` is the node that holds it, [M, H] or a packed [M, 2 H]."""

    x: fx.Node
    w: fx.Node
    bias: fx.Node | None
    output: fx.Node
    covers: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """A leaf of the activation: an up product, or one half (`index` 0 or 1) of a packed one."""

    up: _Up
    index: int | None
    covers: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """Everything between the input and the reduction."""

    end: _End
    function: Elementwise
    activation: Activation
    ups: tuple[_Up, ...]
    covers: tuple[fx.Node, ...]
    gather: Gather | None


def find(collective: fx.Node) -> Match | Refusal | None:
    """A match; a refusal where it is a feed-forward network that can't be fused; None where it is none."""
    end = _end(collective)
    if end is None:
        return None
    function = elementwise(end.hidden, _is_leaf)
    if function is None or function.hidden in function.leaves:
        return None
    halves = [_half(leaf) for leaf in function.leaves]
    known = [half for half in halves if half is not None]
    if len(known) != len(halves):
        return None
    network = _network(end, function, known)
    if isinstance(network, Why):
        return Refusal(collective=collective, reason=network.reason, detail=network.detail)
    return None if network is None else _match(network)


def _end(collective: fx.Node) -> _End | None:
    """One product before an all-reduce or a reduce-scatter."""
    if not is_call(collective, (*ALL_REDUCE, *REDUCE_SCATTER)):
        return None
    reduction = reduction_of(collective)
    if isinstance(reduction, Refusal):
        return None
    if is_call(collective, ALL_REDUCE):
        source: Any = collective.args[0]
        gemms = gemms_before(source, (collective,))
        if isinstance(gemms, Why) or len(gemms.x) != 1 or gemms.scales:
            return None
        return _End(gemms=gemms, reduction=reduction, shape=(), dim=-1, covers=gemms.covers)
    scatter = scatter_before(collective)
    if isinstance(scatter, Why) or why_shared(scatter.nodes, (collective,)):
        return None
    gemms = gemms_before(scatter.source, scatter.readers)
    if isinstance(gemms, Why) or len(gemms.x) != 1 or gemms.scales:
        return None
    read = rows_or_columns(scatter, *gemms.shape)
    if isinstance(read, Why):
        return None
    shape, dim = read
    return _End(gemms=gemms, reduction=reduction, shape=shape, dim=dim, covers=(*gemms.covers, *scatter.nodes))


def _is_leaf(node: fx.Node) -> bool:
    """A product, a part of one, or a product with its bias."""
    return is_call(node, (*GEMMS, getitem, *SLICES)) or _with_bias(node) is not None


def _with_bias(node: fx.Node) -> tuple[Product, fx.Node, tuple[fx.Node, ...]] | None:
    """The product, bias and views of an addition of a bias by hand."""
    if not is_call(node, (aten.add.Tensor,)):
        return None
    for side in node.args[:2]:
        behind = peel(side) if isinstance(side, fx.Node) else None
        found = product(behind) if is_call(behind, GEMMS) else None  # type: ignore[arg-type]
        by_hand = bias_after(found) if isinstance(found, Product) and found.bias is None else None
        if isinstance(found, Product) and by_hand is not None and by_hand[1] is node:
            return found, by_hand[0], by_hand[2]
    return None


def _up(node: fx.Node) -> _Up | None:
    """The up product that a node holds, with its bias."""
    with_bias = _with_bias(node)
    if with_bias is not None:
        found, bias, views = with_bias
        return _Up(x=found.x, w=found.w, bias=bias, output=node, covers=(found.node, *views, node))
    single = product(node)
    if isinstance(single, Why):
        return None
    return _Up(x=single.x, w=single.w, bias=single.bias, output=node, covers=(node,))


def _half(leaf: fx.Node) -> _Half | None:
    """The up product that a leaf is, or the half of a packed one; None for anything else."""
    if not is_call(leaf, (getitem, *SLICES)):
        up = _up(leaf)
        return None if up is None else _Half(up=up, index=None, covers=())
    source: Any = leaf.args[0]
    cut = source if is_call(leaf, (getitem,)) else leaf
    whole: Any = cut.args[0] if is_call(cut, (*SPLITS, *SLICES)) else None
    if not isinstance(whole, fx.Node):
        return None
    views = _chain(whole)
    up = _up(views[-1])
    if up is None:
        return None
    width, num_dims = shape_of(up.output)[-1], len(shape_of(whole))
    dim = argument(cut, 2 if is_call(cut, SPLITS) else 1, "dim", 0) % num_dims
    is_half = same_size(2 * shape_of(leaf)[-1], width) and same_size(shape_of(whole)[-1], width)
    index = _index(leaf, width)
    if dim != num_dims - 1 or not is_half or index is None:
        return None
    return _Half(up=up, index=index, covers=(leaf, cut, *views[:-1]))


def _index(leaf: fx.Node, width: Size) -> int | None:
    """Is it the first (0) or the second (1) half?"""
    if is_call(leaf, (getitem,)):
        index: Any = leaf.args[1]
        return index if index in (0, 1) else None
    start: Any = argument(leaf, 2, "start", 0) or 0
    if argument(leaf, 4, "step", 1) != 1 or isinstance(start, fx.Node):
        return None
    if same_size(start, 0):
        return 0
    return 1 if same_size(2 * start, width) else None


def _chain(node: fx.Node) -> list[fx.Node]:
    """The node and what it is a view of, step by step."""
    chain = [node]
    while peel(chain[-1]) is not chain[-1]:
        step: Any = chain[-1].args[0]
        chain.append(step)
    return chain


def _network(end: _End, function: Elementwise, halves: list[_Half]) -> _Network | Why | None:
    """The network that the leaves make; a Why where it is one but can't be fused; None where it is none."""
    activation = recognise(function)
    if activation is None:
        return Why(reason=Reason.ACTIVATION_UNKNOWN, detail=function.hidden.name)
    by_leaf = dict(zip(function.leaves, halves, strict=True))
    order = [by_leaf[leaf] for leaf in (activation.gate, activation.up) if leaf is not None]
    indices = [half.index for half in order]
    if indices == [0, 1] and order[0].up.output is order[1].up.output:
        ups: tuple[_Up, ...] = (order[0].up,)
    elif all(index is None for index in indices):
        ups = tuple(half.up for half in order)
    else:
        return None
    if not _fits(end, ups, packed=indices == [0, 1]):
        return None
    first = ups[0]
    if any(peel(up.x) is not peel(first.x) or not same_shape(shape_of(up.x), shape_of(first.x)) for up in ups):
        return Why(reason=Reason.FFN_INPUTS_DIFFER, detail=", ".join(up.x.name for up in ups))
    gather = gather_behind(first.x)
    if gather is not None and gather.group != end.reduction.group:
        return Why(reason=Reason.FFN_GATHER_GROUP, detail=f"{gather.group} and {end.reduction.group}")
    covers = dict.fromkeys(node for half in order for node in (*half.up.covers, *half.covers))
    covers.update(dict.fromkeys((*function.interior, *end.covers)))
    return _Network(end=end, function=function, activation=activation, ups=ups, covers=tuple(covers), gather=gather)


def _fits(end: _End, ups: Sequence[_Up], *, packed: bool) -> bool:
    """Do the up products make [M, H] of one dtype, rows and columns where the down product reads them?"""
    rows, hidden = shape_of(end.hidden)
    wanted = (rows, 2 * hidden if packed else hidden)
    return all(
        same_shape((shape_of(up.x)[0], shape_of(up.w)[1]), wanted) and value(up.x).dtype == end.gemms.dtype
        for up in ups
    )


def _match(network: _Network) -> Match:
    end, ups, gather = network.end, network.ups, network.gather
    x, gather_dim, gathered = ups[0].x, -1, None
    read = None if gather is None else read_as(gather, shape_of(x)[-1])
    if gather is not None and read is not None:
        (x, gather_dim), gathered = read, gather
    is_gathered_saved = gathered is not None and used_beside(gathered, {up.covers[0] for up in ups})
    hidden = peel(end.hidden)
    needed = _needed(network, [*(up.output for up in ups), hidden])
    saveable = [gathered.root if gathered else x, *(up.output for up in ups), hidden]
    saved = [is_gathered_saved, *(one in needed for one in saveable[1:])]
    call = Ffn(
        x=x,  # type: ignore[arg-type]
        w_up=[up.w for up in ups],  # type: ignore[misc]
        bias_up=[up.bias for up in ups],  # type: ignore[misc]
        w_down=end.gemms.w[0],  # type: ignore[arg-type]
        bias_down=end.gemms.bias,  # type: ignore[arg-type]
        activation=network.activation.name,
        gated=network.activation.up is not None,
        saved=saved,
        gather_dim=gather_dim,
        shape=list(end.shape),  # type: ignore[arg-type]
        scatter_dim=end.dim,
        reduce_op=end.reduction.reduce_op,
        world_size=end.reduction.world_size,
        group=end.reduction.group,
        plan_key="",
    )
    kept = [node for node, keep in zip(saveable, saved, strict=True) if keep]
    outputs = [Output(node=end.reduction.wait, index=0, after=end.gemms.after)]
    outputs += [Output(node=node, index=i) for i, node in enumerate(kept, start=1)]
    collectives = (end.reduction.collective, *((gathered.collective,) if gathered else ()))
    return Match(
        call=call,
        outputs=tuple(outputs),
        collectives=collectives,
        problem=problem_of(call),
        covers=network.covers,
    )


def _needed(network: _Network, saveable: Iterable[fx.Node]) -> set[fx.Node]:
    """Which of the saveable nodes something outside the network still reads, directly or through nodes inside it.

    A node inside lives on if anything that lives reads it; a saveable node never does, since the operator's result
    takes its place.
    """
    reduction = network.end.reduction
    replaced = {reduction.wait, *saveable}
    inside = {*network.covers, reduction.collective, reduction.wait}
    gone: set[fx.Node] = {reduction.wait}
    needed: set[fx.Node] = set()
    for node in sorted(inside - gone, reverse=True):
        is_read = any(user not in gone for user in node.users)
        if node in replaced and is_read:
            needed.add(node)
        if node in replaced or not is_read:
            gone.add(node)
    return needed
