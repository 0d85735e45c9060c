"""How launches of few rows count their blocks: random orders of the blocks' steps, as in `StreamExit`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

BLOCKS = 4
Ready = bool


@dataclass(slots=True)
class Workspace:
    """What the blocks of launches share. `faults`: launches that found others on the workspace."""

    blocks_in: int = 0
    blocks_out: int = 0
    epoch: int = 0
    faults: set[int] = field(default_factory=set)
    seen: dict[tuple[int, int], int] = field(default_factory=dict)

    def block(self, launch: int, index: int, reads_first: bool = True, patience: int = 1 << 30) -> Iterator[Ready]:
        """Yields whether it can go on. After `patience` looks the first block reports that others found no room."""
        self.blocks_in += 1
        if self.blocks_in > BLOCKS:
            self.faults.add(launch)
        yield True
        if index and not reads_first:
            self.blocks_out += 1
            yield True
        self.seen[launch, index] = self.epoch + 1
        yield True
        if index:
            self.blocks_out += reads_first
            return
        while self.blocks_out < BLOCKS - 1 and not self.faults:
            patience -= 1
            if patience == 0:
                self.faults.add(launch)
            yield False
        yield True  # its last sums
        self.blocks_in = self.blocks_out = 0
        self.epoch = self.seen[launch, index]


def run(threads: list[Iterator[Ready]], order: random.Random) -> None:
    for _ in range(100_000):
        if not threads:
            return
        chosen = order.choice(threads)
        if next(chosen, None) is None:
            threads.remove(chosen)
    raise AssertionError(f"{len(threads)} blocks wait for ever")


def test_all_blocks_of_a_launch_see_its_epoch_and_the_counts_are_zero_behind_it() -> None:
    for seed in range(200):
        one, order = Workspace(), random.Random(seed)
        for launch in range(1, 4):
            run([one.block(launch, index) for index in range(BLOCKS)], order)
            assert [one.seen[launch, index] for index in range(BLOCKS)] == [launch] * BLOCKS
            assert (one.blocks_in, one.blocks_out, one.faults) == (0, 0, set())


def test_a_block_that_is_counted_out_before_it_has_read_the_epoch_may_read_the_next_one() -> None:
    with pytest.raises(AssertionError):
        for seed in range(200):
            one = Workspace()
            run([one.block(1, index, reads_first=False) for index in range(BLOCKS)], random.Random(seed))
            assert set(one.seen.values()) == {1}


def test_a_launch_that_meets_one_that_waits_for_a_peer_is_noticed() -> None:
    """All blocks of the first have entered, and its first block waits for its last sums when the second begins."""
    for seed in range(50):
        one, order = Workspace(), random.Random(seed)
        first = one.block(1, 0)
        next(first)
        run([one.block(1, index) for index in range(1, BLOCKS)], order)
        run([one.block(2, index) for index in range(BLOCKS)], order)
        assert one.faults == {2}


def test_a_first_block_that_is_alone_on_the_chip_gives_up_and_makes_room() -> None:
    one, order = Workspace(), random.Random(1)
    run([one.block(1, 0, patience=5)], order)
    assert one.faults == {1}
    run([one.block(1, index) for index in range(1, BLOCKS)], order)
