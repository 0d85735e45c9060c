"""How a round of chunks moves: reduced to its owner over the nodes, or spread from its owner to all.

Rounds follow each other, one iteration each; what goes to another node in one iteration is read in the next, so that
the network works while the host multiplies. All ranks walk one order of iterations and phases, and wait only for
messages of an earlier phase: nobody waits in a circle as long as a pair has slots for two iterations.

Sums: a rank's partial and a node's partial are rounded once each to the call's dtype for the way; a node adds its ranks
in the order of their rails, the owner adds the nodes in order, in fp32 for 16-bit dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mkcompile.plan.placement import Placement
from mkcompile.runtime.network_reference.channels import Channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank among the others, and its way to them."""

    channels: Channels
    placement: Placement

    @property
    def rank(self) -> int:
        """In the group."""
        return self.channels.rank

    @property
    def node(self) -> int:
        """Of this rank."""
        return self.placement.nodes[self.rank]

    @property
    def rail(self) -> int:
        """Of this rank."""
        return self.placement.rail_of(self.rank)

    def peer(self, node: int) -> int:
        """The rank of this rail on a node; nodes count around."""
        return self.placement.rank_at(node % self.placement.num_nodes, self.rail)

    def locals(self) -> tuple[int, ...]:
        """The ranks of this node in the order of their rails, this one among them."""
        return self.placement.members(self.node)


#: What an owner has in a round: a value of it, or the memory that it goes to (contiguous).
Piece = Callable[[int, int], Tensor]


class Reduction:
    """Sums chunks at their owners. `piece(owner, round)`: this rank's partial; `like(owner, round)`: room for it."""

    def __init__(self, place: Place, piece: Piece, like: Piece, num_rounds: int) -> None:
        self.place, self.piece, self.like, self.num_rounds = place, piece, like, num_rounds
        self._kept: Tensor | None = None

    def iterate(self, iteration: int) -> Tensor | None:
        """Send round `iteration` and finish the one before: the sum of this rank's own chunk, not rounded."""
        before = self._kept
        self._kept = self._send(iteration) if iteration < self.num_rounds else None
        return None if before is None else self._add_nodes(iteration - 1, before)

    def _send(self, number: int) -> Tensor:
        """To the local rank on the owner's rail; then what this rank has added up to the owners. Returns its own."""
        place = self.place
        placement, own = place.placement, {}
        for node in range(placement.num_nodes):
            for rail, local in enumerate(place.locals()):
                owner = placement.rank_at(node, rail)
                if local == place.rank:
                    own[owner] = self.piece(owner, number)
                else:
                    place.channels.send(local, self.piece(owner, number))
        kept: Tensor | None = None
        for node in range(placement.num_nodes):
            owner = place.peer(node)
            partial = self._add_ranks(owner, number, own[owner])
            if owner == place.rank:
                kept = partial
            else:
                place.channels.send(owner, partial)
        assert kept is not None
        return kept

    def _add_ranks(self, owner: int, number: int, own: Tensor) -> Tensor:
        place = self.place
        parts = [
            own if local == place.rank else place.channels.receive(local, self.like(owner, number))
            for local in place.locals()
        ]
        return added(parts).to(own.dtype)

    def _add_nodes(self, number: int, own: Tensor) -> Tensor:
        place = self.place
        parts = [
            own if node == place.node else place.channels.receive(place.peer(node), self.like(place.rank, number))
            for node in range(place.placement.num_nodes)
        ]
        return added(parts)


def added(parts: Sequence[Tensor]) -> Tensor:
    """In order; 16-bit numbers in fp32."""
    first, *others = parts
    total = first.float() if first.element_size() == 2 else first.clone()
    for one in others:
        total += one
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Brings every owner's chunks to all ranks. `arrived(owner, round)`: the memory that a chunk ends in."""

    place: Place
    arrived: Piece
    num_rounds: int

    def iterate(self, number: int) -> None:
        """This rank's own chunk of round `number` goes out, from where `arrived` says; those of rounds before it go on.

        A chunk takes an iteration for each node of the ring.
        """
        place, num_nodes = self.place, self.place.placement.num_nodes
        for hop in range(num_nodes):
            if self._has(number - hop):
                self._pass_on(number - hop, hop)
        for rail, local in enumerate(place.locals()):
            for hop in range(num_nodes):
                if local != place.rank and self._has(number - hop):
                    owner = place.placement.rank_at((place.node - hop) % num_nodes, rail)
                    place.channels.receive(local, self.arrived(owner, number - hop))

    def _has(self, number: int) -> bool:
        return 0 <= number < self.num_rounds

    def _pass_on(self, number: int, hop: int) -> None:
        """From the node before to the next one, and to the ranks of this node."""
        place, num_nodes = self.place, self.place.placement.num_nodes
        chunk = self.arrived(place.peer(place.node - hop), number)
        if hop:
            place.channels.receive(place.peer(place.node - 1), chunk)
        if hop < num_nodes - 1:
            place.channels.send(place.peer(place.node + 1), chunk)
        for local in place.locals():
            if local != place.rank:
                place.channels.send(local, chunk)
