"""How two blocks that share the k of a gather's tiles exchange their sums: random orders of steps, as in `HalfSums`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

TILES = 3
Ready = bool


@dataclass(slots=True)
class Block:
    """What the other block reaches: the buffer and two barriers, of which completed phases are counted."""

    buffer: int | None = None
    full: int = 0
    empty: int = 0
    has_ended: bool = False
    errors: list[str] = field(default_factory=list)


def passed(phases: int, parity: int) -> bool:
    """As mbarrier.try_wait.parity: the phase of this parity has completed, and is the one before the current one."""
    return (phases - 1) & 1 == parity


def gives(own: Block, other: Block, waits: bool) -> Iterator[Ready]:
    """The group whose rows the other block finishes."""
    for turn in range(TILES):
        while waits and turn > 0 and not passed(own.empty, (turn - 1) & 1):
            yield False
        if other.buffer is not None or other.has_ended:
            other.errors.append(f"tile {turn} over {other.buffer}")
        other.buffer = turn
        other.full += 1
        yield True


def takes(own: Block, other: Block) -> Iterator[Ready]:
    """The group that finishes its rows."""
    for turn in range(TILES):
        while not passed(own.full, turn & 1):
            yield False
        if own.buffer != turn:
            own.errors.append(f"tile {turn} reads {own.buffer}")
        yield True
        own.buffer = None
        if turn + 1 < TILES:
            if other.has_ended:
                other.errors.append("told after its end")
            other.empty += 1
        yield True


def errors_of(seed: int, waits: bool) -> list[str]:
    order, blocks = random.Random(seed), (Block(), Block())
    roles = {(i, role): role for i in range(2) for role in ("gives", "takes")}
    threads = {
        key: (gives(blocks[key[0]], blocks[1 - key[0]], waits) if role == "gives"
              else takes(blocks[key[0]], blocks[1 - key[0]]))
        for key, role in roles.items()
    }  # fmt: skip
    for _ in range(10_000):
        if not threads:
            return blocks[0].errors + blocks[1].errors
        key = order.choice(sorted(threads))
        if next(threads[key], None) is None:
            del threads[key]
            block = blocks[key[0]]
            block.has_ended = not any(left[0] == key[0] for left in threads)
    return ["stuck"]


def test_no_sum_is_lost_and_no_block_ends_too_early() -> None:
    assert [errors_of(seed, waits=True) for seed in range(300)] == [[]] * 300


def test_a_block_that_does_not_wait_for_the_buffer_is_noticed() -> None:
    assert any(errors_of(seed, waits=False) for seed in range(300))
