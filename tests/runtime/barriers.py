"""mbarriers as they are, and threads of a kernel that meet at them, on the CPU.

A thread is an iterator that yields the barrier and the parity that it waits for next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Wait = tuple["Barrier", int]


@dataclass(slots=True)
class Barrier:
    """An mbarrier: completes a phase when all have arrived."""

    arrivals: int
    pending: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0
        if self.pending == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity


def in_random_order(
    threads: Sequence[Iterator[Wait]],
    order: random.Random,
    is_held: Callable[[int, list[Wait | None]], bool] = lambda thread, waits: False,
) -> None:
    """Whoever can goes on, until all have ended. `is_held` holds a thread back where hardware would."""
    waits: list[Wait | None] = [next(thread, None) for thread in threads]
    while any(wait is not None for wait in waits):
        ready = [i for i, wait in enumerate(waits) if wait is not None and wait[0].passes(wait[1])]
        ready = [i for i in ready if not is_held(i, waits)]
        assert ready, "stuck"
        chosen = order.choice(ready)
        waits[chosen] = next(threads[chosen], None)
