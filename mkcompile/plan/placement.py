"""`Placement`: on which node each rank of a group is. What decides whether its data goes by NVLink, network or both.

Ranks may lie in any order. A rank's rail is its place among the ranks of its node, so that rail peers are those of one
place on different nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mkcompile.ops.problem import Problem
from mkcompile.plan.topology import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`nodes`: the node of each rank, in the group's order; nodes are numbered in the order in which they appear."""

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or sorted(set(self.nodes)) != list(range(max(self.nodes) + 1)):
            raise ValueError(f"nodes must be numbered from 0 without gaps; got {self.nodes}")

    @classmethod
    def of(cls, names: Sequence[object]) -> Placement:
        """From a name of each rank's node; equal names are one node."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(nodes=tuple(numbers[name] for name in names))

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes that hold at least one of its ranks."""
        return max(self.nodes) + 1

    @property
    def per_node(self) -> int:
        """The most ranks that one node holds."""
        return max(self.nodes.count(node) for node in range(self.num_nodes))

    @property
    def is_even(self) -> bool:
        """Does every node hold as many ranks?"""
        return self.num_nodes * self.per_node == self.world_size

    @property
    def is_node_major(self) -> bool:
        """Do the ranks fill one node after the other?"""
        return list(self.nodes) == sorted(self.nodes)

    @property
    def span(self) -> Span:
        """How the group lies on the machine; of uneven nodes the fullest one counts."""
        return Span(num_nodes=self.num_nodes, per_node=self.per_node)

    def members(self, node: int) -> tuple[int, ...]:
        """The ranks on a node, rising."""
        return tuple(rank for rank, one in enumerate(self.nodes) if one == node)

    def rail_of(self, rank: int) -> int:
        """The rank's place among those of its node."""
        return self.nodes[:rank].count(self.nodes[rank])

    def rank_at(self, node: int, rail: int) -> int:
        """The rank in that place. Raises: IndexError where an uneven node has none."""
        return self.members(node)[rail]

    def __str__(self) -> str:
        counts = [self.nodes.count(node) for node in range(self.num_nodes)]
        return f"{self.num_nodes}x{self.per_node}" if self.is_even else "+".join(map(str, counts))


def placed(problem: Problem, placement: Placement | None) -> Problem:
    """The problem with how its group lies; as it is where that is one node, or not known."""
    if placement is None or placement.num_nodes == 1:
        return problem
    return replace(problem, num_nodes=placement.num_nodes, per_node=placement.per_node)
