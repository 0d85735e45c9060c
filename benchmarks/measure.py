"""How contenders are timed: all of them in turn, on all ranks together, in two regimes.

`burst`: a few launches after a pause, the chip cool. `sustained`: each contender runs by itself for a tenth of a second
before its samples, so that it finds the clock that its own power draw leaves, not its predecessor's
(docs/decisions/504). A time is the slowest rank's; events bracket launches that the host enqueued behind a sleeping
kernel, so that host time is in none of them unless it exceeds the launches'.
"""

from __future__ import annotations

import itertools
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
_OWN_HEAT_US = 100_000.0
_SUSTAINED_SAMPLES = 2
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


def heated_ms(call: Callable[[], object], num_heating: int, num_calls: int) -> list[float]:
    """Mean of consecutive calls on this rank, sample after sample with no pause, behind calls that are not timed."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_SUSTAINED_SAMPLES + 1)]
    for _ in range(num_heating):
        call()
    events[0].record()
    for event in events[1:]:
        for _ in range(num_calls):
            call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / num_calls for start, end in itertools.pairwise(events)]


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
    """Time every contender, interleaved, in `rounds` rounds behind one that is not counted.

    Units: `expected_us` microseconds a call, from which the number of consecutive calls follows.
    """
    sustained = regime == "sustained"
    span_us = _CHUNK_US if sustained else _BURST_US
    num_calls = max(3, min(60 if sustained else 10, int(span_us / expected_us)))
    num_heating = int(_OWN_HEAT_US / expected_us)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(1 + rounds):
        for name in order_of_round(calls, index):
            together(host_group)
            if sustained:
                of_round = heated_ms(calls[name], num_heating, num_calls)
            else:
                time.sleep(_PAUSE_S)
                of_round = [timed_ms(calls[name], num_calls)]
            if index:  # the first round warms up
                samples[name] += of_round
    timings = {}
    for name, values in samples.items():
        slowest = sorted(slowest_of(values, host_group))
        last = len(slowest) - 1
        timings[name] = Timing(
            ms=statistics.median(slowest), p10=slowest[round(0.1 * last)], p90=slowest[round(0.9 * last)]
        )
    return timings
