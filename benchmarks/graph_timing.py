"""Calls inside CUDA graphs: captured once, replayed in turn with other contenders' graphs, on all ranks together.

A graph holds `NUM_CALLS` calls, each on another weight, so that weights stream from HBM. A time is the slowest rank's
replay over the number of calls; what the host does is in none of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from .measure import Timing, slowest_of, together
from .rounds import order_of_round

NUM_CALLS = 20
_REPLAYS = 2
_BACKLOG_CYCLES = 200_000


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls, each of which has run before."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds a call of consecutive replays, after one that is not timed."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_BACKLOG_CYCLES)
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / (_REPLAYS * NUM_CALLS)


def measure_graphs(
    graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int, host_group: dist.ProcessGroup
) -> dict[str, Timing]:
    """Median, p10 and p90 over the rounds, interleaved over the graphs. Units: as Timing, milliseconds a call."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for index in range(rounds):
        for name in order_of_round(graphs, index):
            together(host_group)
            samples[name].append(replay_us(graphs[name]) / 1e3)
    timings = {}
    for name, values in samples.items():
        slowest = sorted(slowest_of(values[1:], host_group))
        last = len(slowest) - 1
        timings[name] = Timing(
            ms=statistics.median(slowest), p10=slowest[round(0.1 * last)], p90=slowest[round(0.9 * last)]
        )
    return timings
