"""Buckets of m: what a symbolic number of rows is planned and measured at."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from mkcompile.ops.problem import Problem

MAX_ROWS = 65536
_FINE_FROM, _STEPS_AN_OCTAVE = 128, 4


def _bounds() -> tuple[int, ...]:
    """Powers of two up to 128 rows, then four steps an octave."""
    powers = [1 << i for i in range(_FINE_FROM.bit_length() - 1)]
    fine: list[int] = []
    start = _FINE_FROM
    while start < MAX_ROWS:
        fine += [start * (_STEPS_AN_OCTAVE + i) // _STEPS_AN_OCTAVE for i in range(_STEPS_AN_OCTAVE)]
        start *= 2
    return (*powers, *fine, MAX_ROWS)


BUCKETS = _bounds()


def bucket(rows: int) -> int:
    """The smallest bucket bound that holds `rows`; above the last one, the last one.

    Raises: ValueError for less than one row.
    """
    if rows < 1:
        raise ValueError(f"m must be at least 1, got {rows}")
    return BUCKETS[min(bisect_left(BUCKETS, rows), len(BUCKETS) - 1)]


def at_bucket(problem: Problem, rows: int) -> Problem:
    """The problem at a bucket's bound, rounded up to what can be divided over the ranks."""
    step = problem.world_size * max(problem.outer, 1)
    return replace(problem, m=-(-bucket(rows) // step) * step)


def entry_name(problem: Problem) -> str:
    """Name of a problem's bucket in tables of measurements."""
    return f"m<={bucket(problem.m)},{problem.key()}"
