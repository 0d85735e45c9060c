"""Partials between the blocks of a cluster, in one buffer or two: random orders of the blocks' math groups.

Each thread stands for one math group of a block and does what `Exchange` does with its barriers and buffers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import pytest

from tests.runtime.barriers import Barrier, Wait, in_random_order

ANYTHING = (Barrier(1), 1)  # may happen in between


@dataclass(slots=True)
class Counting(Barrier):
    """An mbarrier that waits for bytes, too; they may come before it is told how many."""

    owed: int = 0

    def expect(self, count: int) -> None:
        self.owed += count
        self.pending -= 1
        self._turn()

    def deliver(self) -> None:
        self.owed -= 1
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.owed == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals


@dataclass(slots=True)
class Cluster:
    """`split` blocks; `takes_turns`: each group has tiles of its own."""

    split: int
    tiles: int
    buffers: int
    takes_turns: bool
    waits: bool = True
    full: dict[tuple[int, int, int], Counting] = field(init=False)
    empty: dict[tuple[int, int, int], Barrier] = field(init=False)
    stored: dict[tuple[int, int, int, int], int] = field(init=False)

    def __post_init__(self) -> None:
        places = list(product(range(self.split), range(2), range(2)))
        self.full = {place: Counting(1) for place in places}
        self.empty = {place: Barrier(self.split - 1) for place in places}
        self.stored = {}

    def group_of(self, group: int, turn: int) -> int:
        return turn % 2 if self.takes_turns else group

    def run(self, block: int, group: int) -> Iterator[Wait]:
        others = [other for other in range(self.split) if other != block]
        rows = 0 if self.takes_turns else group  # groups that share a tile write apart
        for turn in range(group if self.takes_turns else 0, self.tiles, 2 if self.takes_turns else 1):
            before = turn - self.buffers
            if before >= 0 and self.waits:
                yield self.empty[block, self.group_of(group, before), before % 2], before // 2 & 1
            mine = self.full[block, group, turn % 2]
            mine.expect(self.split - 1)
            for other in others:
                self.stored[other, turn % self.buffers, rows, block] = turn
                self.full[other, group, turn % 2].deliver()
                yield ANYTHING
            yield mine, turn // 2 & 1
            for other in others:
                seen = self.stored[block, turn % self.buffers, rows, other]
                assert seen == turn, f"tile {seen} instead of {turn}"
                yield ANYTHING
            if turn + self.buffers < self.tiles:
                for other in others:
                    self.empty[other, group, turn % 2].arrive()


def run(cluster: Cluster, order: random.Random) -> None:
    threads = [cluster.run(block, group) for block, group in product(range(cluster.split), range(2))]
    in_random_order(threads, order)


@pytest.mark.parametrize("takes_turns", [True, False])
@pytest.mark.parametrize(("split", "buffers"), [(2, 1), (2, 2), (4, 1)])
def test_every_block_adds_up_the_partials_of_its_own_tile(split: int, buffers: int, takes_turns: bool) -> None:
    for tiles in (1, 2, 3, 4, 7):
        for seed in range(20):
            run(Cluster(split=split, tiles=tiles, buffers=buffers, takes_turns=takes_turns), random.Random(seed))


@pytest.mark.parametrize("takes_turns", [True, False])
def test_a_buffer_that_is_not_waited_for_is_overwritten(takes_turns: bool) -> None:
    with pytest.raises(AssertionError, match="instead of"):
        for seed in range(50):
            cluster = Cluster(split=2, tiles=4, buffers=1, takes_turns=takes_turns, waits=False)
            run(cluster, random.Random(seed))
