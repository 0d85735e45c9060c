"""Tiles whose rows come while others are multiplied: how long a launch takes beside a copy engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


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

    def us(self, chunks: int) -> float:
        """From wave to wave: each begins when the last rows that it reads are here."""
        each_us = self.sent_us / chunks + self.chunk_us
        others, now_us = self.positions - self.own, 0.0
        for first in range(0, self.positions, self.grid):
            read = min(first + self.grid, self.positions) - self.own
            if read > 0:
                came = ceil(read / others * chunks)
                now_us = max(now_us, self.start_us + came * each_us)
            now_us += self.tile_us
        return now_us
