"""Checkpointing that saves the product in front of a reduction saves the reduced tensor instead.

A policy that saves `aten.mm` and lets collectives be computed again makes the unreduced product a result of the forward
graph, so that nothing can be fused, and has backward reduce it once more. The reduced tensor takes as much memory (less
behind a reduce-scatter), backward needs nothing else of the two, and saves a collective. See decision 107.

It looks at the joint graph, before forward and backward are told apart.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

from mkcompile.passes.fusion_pass import source_digest
from mkcompile.passes.graph import ALL_REDUCE, CAST, GEMMS, REDUCE_SCATTER, VIEWS, WAIT, aten, is_call, only_user
from mkcompile.passes.scatter import SPLITS

TAG = "recompute"
# What may lie between product and collective; getitem is a function and no overload.
_BETWEEN = (*VIEWS, *CAST, *SPLITS, aten.transpose.int, aten.permute.default, aten.t.default)


class SaveReduced(CustomGraphPass):
    """Moves the tag `MUST_SAVE` from a product to the wait of its reduction, where only that reads the product."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change tags alone."""
        for collective in graph.nodes:
            if is_call(collective, (*ALL_REDUCE, *REDUCE_SCATTER)):
                _move_tag(collective)

    def uuid(self) -> str:
        """Of the sources; there is nothing to choose."""
        return source_digest()


def _move_tag(collective: fx.Node) -> None:
    wait = only_user(collective)
    if wait is None or not is_call(wait, WAIT):
        return
    if any(one.meta.get(TAG) != CheckpointPolicy.PREFER_RECOMPUTE for one in (collective, wait)):
        return
    product = _product_before(collective)
    if product is not None and product.meta.get(TAG) == CheckpointPolicy.MUST_SAVE:
        product.meta[TAG] = CheckpointPolicy.PREFER_RECOMPUTE
        wait.meta[TAG] = CheckpointPolicy.MUST_SAVE


def _product_before(collective: fx.Node) -> fx.Node | None:
    """The GEMM that the collective's input is a view of, if nothing else reads any of it."""
    node: Any = collective.args[0]
    while isinstance(node, fx.Node) and not is_call(node, GEMMS):
        if is_call(node, (aten.cat.default,)):
            node = _split_of(node)
        elif is_call(node, _BETWEEN) and (len(node.users) == 1 or is_call(node, SPLITS)):
            node = node.args[0]
        else:
            return None
    return node if isinstance(node, fx.Node) and len(node.users) == 1 else None


def _split_of(cat: fx.Node) -> fx.Node | None:
    """The split whose pieces are put together in another order, if nothing else reads them."""
    pieces: Any = cat.args[0]
    if not all(is_call(piece, (getitem,)) for piece in pieces):
        return None
    (split, *others) = {piece.args[0] for piece in pieces}
    if others or not is_call(split, SPLITS) or {*split.users} != {*pieces} or len(cat.users) != 1:
        return None
    return split if all(len(piece.users) == 1 for piece in pieces) else None
