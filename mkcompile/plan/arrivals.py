"""Tiles whose rows come while others are multiplied: how long a launch takes beside a copy engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

# More gain nothing. Source: benchmarks/results/2xh200/gather_paces.jsonl, 8192x1280x8192.
_SLICES = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """`positions` tiles on `grid` blocks, the first `own` of rows that are here; the others' come in chunks, in order.

    Units: microseconds; `sent_us` for all rows, after `start_us`, and `chunk_us` more for each chunk and its flag.
    """

    positions: int
    own: int
    grid: int
    tile_us: float
    sent_us: float
    start_us: float
    chunk_us: float

    def us(self, chunks: int, slices: int = 1) -> float:
        """From wave to wave: each begins when the first slice of k of the rows that it reads is here, and waits for the
        others.
        """
        each_us = self.sent_us / chunks + self.chunk_us * slices
        others, now_us = self.positions - self.own, 0.0
        for first in range(0, self.positions, self.grid):
            read = min(first + self.grid, self.positions) - self.own
            now_us += self.tile_us
            if read > 0:
                before_us = self.start_us + (ceil(read / others * chunks) - 1) * each_us
                for slice_idx in range(slices):
                    left_us = self.tile_us * (slices - slice_idx) / slices
                    now_us = max(now_us, before_us + each_us * (slice_idx + 1) / slices + left_us)
        return now_us

    def best(self, pieces: int) -> tuple[float, int, int]:
        """Time, chunks and slices of each, of at most so many pieces in all: the fewest that end soonest."""
        ways = ((chunks, slices) for slices in _SLICES for chunks in range(1, max(1, pieces // slices) + 1))
        return min((self.us(*way), *way) for way in ways if way[0] * way[1] <= pieces)
