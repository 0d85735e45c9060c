"""Partials on their way from the math groups to the warps that send them: random orders of the threads of a block.

Each thread does what `StreamEpilogue::hand_over` and `stream_send_role` do with the two barriers; two math threads
stand for the 256, each with a word of each buffer, which both senders read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.runtime.barriers import Barrier, Wait, in_random_order

MATH, SENDERS, BUFFERS = 2, 2, 2


def run(tiles: int, order: random.Random, waits_for_free: bool = True) -> None:
    """All tiles but the last, which the math groups send themselves, pass through the buffers by turns."""
    full, free = ([Barrier(count) for _ in range(BUFFERS)] for count in (MATH, SENDERS))
    buffers = [[-1] * MATH for _ in range(BUFFERS)]

    def multiply(thread: int) -> Iterator[Wait]:
        for turn in range(tiles - 1):
            at = turn % BUFFERS
            if turn >= BUFFERS and waits_for_free:
                yield free[at], (turn // BUFFERS - 1) & 1
            buffers[at][thread] = turn
            full[at].arrive()
            yield Barrier(1), 1  # anything may happen before the next tile

    def send() -> Iterator[Wait]:
        for turn in range(tiles - 1):
            at = turn % BUFFERS
            yield full[at], turn // BUFFERS & 1
            assert buffers[at] == [turn] * MATH, f"tile {buffers[at]} instead of {turn}"
            free[at].arrive()

    threads = [*(multiply(thread) for thread in range(MATH)), *(send() for _ in range(SENDERS))]
    in_random_order(threads, order)


def test_every_tile_is_sent_as_it_was_handed_over() -> None:
    for tiles in (1, 2, 3, 4, 9):
        for seed in range(50):
            run(tiles, random.Random(seed))


def test_a_buffer_that_is_not_waited_for_is_overwritten() -> None:
    with pytest.raises(AssertionError):
        for seed in range(50):
            run(5, random.Random(seed), waits_for_free=False)
