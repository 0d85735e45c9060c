"""Ranks of one process on emulated nodes, timed together: all of them run the same thing a few times in a row."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from mkcompile.runtime.trace import summary
from tests.gpu.network_ranks import NodeGroup

# A proxy's copies and flags must not stand behind a kernel that waits for them (decision 404). Read when CUDA is
# initialised.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
_BACKLOG_CYCLES = 1_500_000
_CALLS = 3
_PAUSE_S = 0.004
#: Smaller messages are the roll call's.
_SMALLEST_CHUNK_BYTES = 4096


def on_each(group: NodeGroup, run: Callable[[int], None]) -> None:
    """On every rank, on its device and stream."""
    for rank, device in enumerate(group.devices):
        with torch.cuda.device(device), torch.cuda.stream(group.streams[rank]):
            run(rank)


def burst_ms(group: NodeGroup, run: Callable[[int], None]) -> float:
    """Mean of consecutive calls after one that is not timed; the slowest rank's."""
    group.synchronize()
    time.sleep(_PAUSE_S)
    events: list[list[torch.cuda.Event]] = [[] for _ in group.devices]

    def mark(rank: int) -> None:
        events[rank].append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        events[rank][-1].record()

    on_each(group, lambda rank: torch.cuda._sleep(_BACKLOG_CYCLES))  # type: ignore[no-untyped-call]
    on_each(group, run)
    on_each(group, mark)
    for _ in range(_CALLS):
        on_each(group, run)
    on_each(group, mark)
    group.synchronize()
    return float(max(start.elapsed_time(end) for start, end in events)) / _CALLS


def interleaved_ms(group: NodeGroup, runs: Mapping[str, Callable[[int], None]], rounds: int) -> dict[str, float]:
    """Median of each, all in turn; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(burst_ms(group, run))
    return {name: median(values[1:]) for name, values in times.items()}


def proxy_work(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What a proxy did between two looks at its counters; `stalls`: rounds with no room for more in flight."""
    return {name: after[name] - before[name] for name in ("commands", "batches", "rounds", "stalls")}


def timeline_of(group: NodeGroup, run: Callable[[], None]) -> dict[str, Any]:
    """One traced launch of rank 0: spans of its kernel, of its computation and of its link; and what each proxy did.

    Units: ms, GB/s.
    """
    for _ in range(2):
        before = [proxy.counters() for proxy in group.proxies]
        run()
        group.synchronize()
    work = [proxy_work(old, proxy.counters()) for old, proxy in zip(before, group.proxies, strict=True)]
    last = summary(group.traces()[0])[-1]
    events, _ = group.proxies[0].timeline()
    large: list[Any] = [one for one in events if one.num_bytes > _SMALLEST_CHUNK_BYTES]
    epoch = max(one.epoch for one in large)
    sent = [one for one in large if one.kind == "completed" and one.epoch == epoch]
    taken_ns = min(one.time_ns for one in large if one.kind == "taken" and one.epoch == epoch)
    link_us = (max(one.time_ns for one in sent) - taken_ns) / 1e3
    return {
        "span_ms": round(last.span_us / 1e3, 4),
        "computing_ms": round(last.computing_us / 1e3, 4),
        "exposed_ms": round(last.exposed_us / 1e3, 4),
        "busy_share": round(last.busy_share, 3),
        "link_busy_ms": round(link_us / 1e3, 4),
        "link_gbps": round(sum(one.num_bytes for one in sent) / link_us / 1e3, 2),
        "proxies": work,
    }
