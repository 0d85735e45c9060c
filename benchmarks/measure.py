"""How contenders are timed: all of them in turn, on all ranks together, in two regimes.

`burst`: a few launches after a pause, the chip cool. `sustained`: one contender after the other with no pause, so that
all see the same hot, power-limited chip. A time is the slowest rank's; events bracket launches that the host enqueued
behind a sleeping kernel, so that host time is in none of them unless it exceeds the launches'.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .rounds import order_of_round

_BACKLOG_CYCLES = 2_000_000
_PAUSE_S = 0.004
_BURST_US = 2500.0
_CHUNK_US = 12000.0
REGIMES = ("burst", "sustained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Units: milliseconds a call, the slowest rank's."""

    ms: float
    p10: float
    p90: float


def together(host_group: dist.ProcessGroup) -> None:
    torch.cuda.synchronize()
    dist.barrier(group=host_group)


def timed_ms(call: Callable[[], object], num_calls: int, backlog_cycles: int = _BACKLOG_CYCLES) -> float:
    """Mean of consecutive calls on this rank, after one that is not timed."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(backlog_cycles)
    call()
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / num_calls


def slowest_of(samples: list[float], host_group: dist.ProcessGroup) -> list[float]:
    """Per sample, the slowest rank's."""
    values = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=host_group)
    return values.tolist()


def measure(
    calls: Mapping[str, Callable[[], object]],
    regime: str,
    expected_us: float,
    host_group: dist.ProcessGroup,
    rounds: int,
) -> dict[str, Timing]:
    """Time every contender, interleaved.

    Units: `expected_us` microseconds a call, from which the number of consecutive calls follows.
    """
    sustained = regime == "sustained"
    span_us = _CHUNK_US if sustained else _BURST_US
    num_calls = max(3, min(60 if sustained else 10, int(span_us / expected_us)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in order_of_round(calls, index):
            together(host_group)
            if not sustained:
                time.sleep(_PAUSE_S)
            samples[name].append(timed_ms(calls[name], num_calls, _BACKLOG_CYCLES // (4 if sustained else 1)))
    skipped = rounds // 3 if sustained else 1
    timings = {}
    for name, values in samples.items():
        slowest = sorted(slowest_of(values[skipped:], host_group))
        last = len(slowest) - 1
        timings[name] = Timing(
            ms=statistics.median(slowest), p10=slowest[round(0.1 * last)], p90=slowest[round(0.9 * last)]
        )
    return timings
