"""The ring of stages under math groups that take turns: random orders of a block's threads, with mbarriers as they are.

A wait for a parity ends when the phase that is under way has the other one, so a thread that is two phases off takes
what is not there yet. Each thread below does what `stream_load_role` and `StreamCompute` do with the barriers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.runtime.barriers import Barrier, Wait, in_random_order


@dataclass(slots=True)
class Block:
    """One block. `stages[i]` is the number of the k-block that stage i holds.

    `shares_ends`: the first and the last tile are shared by a cluster, and have half of the k-blocks.
    """

    num_stages: int
    tiles: int
    k_blocks: int
    takes_turns: bool = True
    shares_ends: bool = False
    full: list[Barrier] = field(init=False)
    empty: list[Barrier] = field(init=False)
    taken: list[Barrier] = field(init=False)
    stages: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.full = [Barrier(1) for _ in range(self.num_stages)]
        self.empty = [Barrier(1) for _ in range(self.num_stages)]
        self.taken = [Barrier(2) for _ in range(2)]  # two threads stand for the 128 of a group
        self.stages = [-1] * self.num_stages

    def first(self, turn: int) -> int:
        """The number of a tile's first k-block."""
        if not self.shares_ends:
            return turn * self.k_blocks
        return sum((self.k_blocks + 1) // 2 if at in (0, self.tiles - 1) else self.k_blocks for at in range(turn))

    def load(self) -> Iterator[Wait]:
        for number in range(self.first(self.tiles)):
            stage, parity = number % self.num_stages, number // self.num_stages % 2
            yield self.empty[stage], parity ^ 1
            self.stages[stage] = number
            self.full[stage].arrive()

    def multiply(self, group: int, leads: bool) -> Iterator[Wait]:
        for turn in range(group, self.tiles, 2):
            if turn > 0 and self.takes_turns:
                yield self.taken[(turn - 1) % 2], (turn - 1) // 2 % 2
            previous = -1
            for number in range(self.first(turn), self.first(turn + 1)):
                stage, parity = number % self.num_stages, number // self.num_stages % 2
                yield self.full[stage], parity
                assert self.stages[stage] == number, f"k-block {self.stages[stage]} instead of {number}"
                if previous >= 0 and leads:
                    self.empty[previous].arrive()
                previous = stage
            self.taken[group].arrive()
            if leads:
                self.empty[previous].arrive()

    def run(self, order: random.Random) -> None:
        """Whoever can goes on, in random order. The threads of a group multiply together: they stay in step."""
        threads = [self.load(), *(self.multiply(group, leads) for group in range(2) for leads in (False, True))]
        in_random_order(threads, order, self._is_ahead)

    @staticmethod
    def _is_ahead(thread: int, waits: list[Wait | None]) -> bool:
        """The leading thread gives a stage back when the products of the whole group have read it."""
        return thread in (2, 4) and waits[thread - 1] == waits[thread]


SIZES = [(stages, tiles, k) for stages in (2, 4, 7) for tiles in (1, 2, 3, 6) for k in (1, 2, 4, 7, 8, 16)]


def test_every_group_finds_its_own_k_blocks() -> None:
    for stages, tiles, k_blocks in SIZES:
        for seed in range(8):
            for shares_ends in (False, True):
                block = Block(num_stages=stages, tiles=tiles, k_blocks=k_blocks, shares_ends=shares_ends)
                block.run(random.Random(seed))


def test_without_turns_a_group_takes_what_is_not_there_yet() -> None:
    with pytest.raises(AssertionError):
        for stages, tiles, k_blocks in SIZES:
            for seed in range(8):
                Block(num_stages=stages, tiles=tiles, k_blocks=k_blocks, takes_turns=False).run(random.Random(seed))
