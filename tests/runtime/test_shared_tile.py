"""The end of a block's last tile, which the first math group multiplies alone: random orders of a block's threads.

Each thread does what `stream_load_role` and `StreamCompute::multiply_shared` do with the barriers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.runtime.barriers import Barrier, Wait, in_random_order


def run(stages: int, tiles: int, k_blocks: int, order: random.Random, gives_all_back: bool = True) -> None:
    """One thread stands for a group; a stage is given back one k-block late, the last of a part at its end."""
    full, empty = [Barrier(1) for _ in range(stages)], [Barrier(2) for _ in range(stages)]
    first, held = Barrier(1), [-1] * stages

    def load() -> Iterator[Wait]:
        for number in range(tiles * k_blocks):
            yield empty[number % stages], number // stages % 2 ^ 1
            held[number % stages] = number
            full[number % stages].arrive()

    def multiply(group: int) -> Iterator[Wait]:
        number, owed = 0, -1
        for tile in range(tiles):
            at_end = min(stages, k_blocks) if tile == tiles - 1 else 0
            left = k_blocks
            while left:
                if left == at_end and group == 1:
                    yield first, 0
                blocks = left - at_end if left > at_end else left
                for _ in range(blocks):
                    stage = number % stages
                    yield full[stage], number // stages % 2
                    assert held[stage] == number, f"k-block {held[stage]} instead of {number}"
                    if owed >= 0:
                        empty[owed].arrive()
                    owed, number = stage, number + 1
                left -= blocks
                if gives_all_back or left == 0:
                    empty[owed].arrive()
                    owed = -1
            if at_end and group == 0:
                first.arrive()

    threads = [load(), multiply(0), multiply(1)]
    in_random_order(threads, order)


SIZES = [(stages, tiles, k) for stages in (2, 4, 7) for tiles in (1, 2, 3) for k in (1, 2, 4, 7, 8, 16)]


def test_both_groups_find_every_k_block_of_every_tile() -> None:
    for stages, tiles, k_blocks in SIZES:
        for seed in range(8):
            run(stages, tiles, k_blocks, random.Random(seed))


def test_a_group_that_waits_with_a_stage_in_hand_stops_the_other() -> None:
    with pytest.raises(AssertionError, match="stuck"):
        for seed in range(8):
            run(4, 2, 16, random.Random(seed), gives_all_back=False)
