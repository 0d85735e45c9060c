"""Dimensions that DTensors of a graph share out unevenly, so that ranks have different numbers of the same thing.

A vocabulary of 50257 over two ranks makes a product with k = 25129 on one and 25128 on the other: legal, and of another
plan on each. One rank's shapes don't show it, but the DTensors of Dynamo's graph know their sizes over all ranks.
Source: docs/decisions/106-ranks-that-differ.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from mkcompile.passes.groups_of_graph import mesh_of


def uneven_sizes(graph: fx.GraphModule) -> frozenset[int]:
    """Every size that some rank has of a dimension of which the ranks have different sizes; the same on all ranks.

    Dimensions of symbolic size are left out.
    """
    bodies = [one for one in graph.modules() if isinstance(one, fx.GraphModule)]
    values = (node.meta.get("example_value") for body in bodies for node in body.graph.nodes)
    shared = (one for value in values for one in tree_leaves(value) if isinstance(one, DTensor))
    return frozenset(size for one in shared for sizes in _sizes_by_dimension(one) if len(sizes) > 1 for size in sizes)


def _sizes_by_dimension(value: DTensor) -> Iterator[set[int]]:
    """What the ranks of the mesh have of each dimension; one that is shared out twice is so in the mesh's order."""
    mesh = mesh_of(value)
    for dim, size in enumerate(value.shape):
        if not isinstance(size, int):
            continue
        sizes = {size}
        for num_ranks, placement in zip(mesh.shape, value.placements, strict=True):
            if isinstance(placement, Shard) and placement.dim % value.ndim == dim:
                sizes = {part for whole in sizes for part in _parts(whole, num_ranks)}
        yield sizes


def _parts(size: int, num_ranks: int) -> set[int]:
    """Sizes that `torch.chunk` gives: equal ones, a smaller one, and none for ranks beyond."""
    most = -(-size // num_ranks)
    return {max(0, min(most, size - rank * most)) for rank in range(num_ranks)} if most else {0}
