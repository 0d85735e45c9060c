"""Dimensions that DTensors of a graph share out unevenly, so that ranks have different numbers of the same thing.

A vocabulary of 50257 over two ranks makes a product with k = 25129 on one and 25128 on the other: legal, and of another
plan on each. One rank's shapes don't show it, but the DTensors of Dynamo's graph know their sizes over all ranks.
Source: docs/decisions/106-ranks-that-differ.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mkcompile.ops.groups import find
from mkcompile.passes.groups_of_graph import mesh_of

#: By name of a group: sizes that stand for something of which its ranks have different numbers.
UnevenSizes = Mapping[str, frozenset[int]]


def uneven_sizes(graph: fx.GraphModule) -> UnevenSizes:
    """The same on all ranks of a group. A dimension alone and in every run of dimensions that a view may make one.

    Symbolic sizes are left out, and 0 and 1, which no product sums over.
    """
    bodies = [one for one in graph.modules() if isinstance(one, fx.GraphModule)]
    values = (node.meta.get("example_value") for body in bodies for node in body.graph.nodes)
    found: dict[str, set[int]] = defaultdict(set)
    for value in values:
        for one in tree_leaves(value):
            if isinstance(one, DTensor):
                for group, sizes in _uneven_of(one):
                    found[group] |= sizes - {0, 1}
    return {group: frozenset(sizes) for group, sizes in sorted(found.items()) if sizes}


def sizes_within(uneven: UnevenSizes, group: str) -> frozenset[int]:
    """Those that two ranks of the group may have different: of all groups with which it shares more than one rank."""
    if not uneven:
        return frozenset()
    ranks = set(dist.get_process_group_ranks(find(group)))
    near = (other for other in uneven if len(ranks & set(dist.get_process_group_ranks(find(other)))) > 1)
    return frozenset().union(*(uneven[other] for other in near))


def _uneven_of(value: DTensor) -> Iterator[tuple[str, set[int]]]:
    """Groups of the mesh whose ranks have unequal parts of a dimension, with all sizes of what it may be part of."""
    mesh = mesh_of(value)
    if not all(isinstance(size, int) for size in value.shape):
        return
    by_dim = [_parts_of(size, _shards(value, dim)) for dim, size in enumerate(value.shape)]
    for dim in range(value.ndim):
        if len(by_dim[dim]) == 1 or max(by_dim[dim]) == 1:  # one token, which one rank has
            continue
        sizes = set(_run_sizes(by_dim, dim))
        for mesh_dim, _ in _shards(value, dim):
            yield mesh.get_group(mesh_dim).group_name, sizes


def _shards(value: DTensor, dim: int) -> list[tuple[int, int]]:
    """Mesh dimensions, with their ranks, that share out a dimension: outermost first. Strided ones come last (torch
    shares them out behind those that follow).
    """
    found = []
    for mesh_dim, (num_ranks, placement) in enumerate(zip(mesh_of(value).shape, value.placements, strict=True)):
        sharded: Any = getattr(placement, "dim", None)
        if isinstance(sharded, int) and sharded % value.ndim == dim:
            found.append((hasattr(placement, "split_factor"), mesh_dim, num_ranks))
    return [(mesh_dim, num_ranks) for _, mesh_dim, num_ranks in sorted(found)]


def _parts_of(size: int, shards: list[tuple[int, int]]) -> set[int]:
    """What the ranks of the mesh have of a dimension."""
    sizes = {size}
    for _, num_ranks in shards:
        sizes = {part for whole in sizes for part in _parts(whole, num_ranks)}
    return sizes


def _run_sizes(by_dim: list[set[int]], dim: int) -> Iterator[int]:
    """Products over neighbouring dimensions with this one among them."""
    for first in range(dim + 1):
        for last in range(dim, len(by_dim)):
            yield from (prod(sizes) for sizes in product(*by_dim[first : last + 1]))


def _parts(size: int, num_ranks: int) -> set[int]:
    """Sizes that `torch.chunk` gives: equal ones, a smaller one, and none for ranks beyond."""
    most = -(-size // num_ranks)
    return {max(0, min(most, size - rank * most)) for rank in range(num_ranks)} if most else {0}
