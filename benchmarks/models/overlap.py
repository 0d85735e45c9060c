"""Where one step's time goes on the GPU: kernels by name, and communication that no computation runs beside.

From the events of torch's profiler: NCCL's kernels, copies between devices, and everything else as computation. What
our fused kernels exchange is inside of them and not seen here.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .timing import synchronize

_COMMUNICATES = (
    "mk_gate",
    "mk_open",
    "mk_arrivals",
    "nccl",
    "one_shot",
    "two_shot",
    "multimem",
    "barrier_kernel",
    "put_signal",
    "wait_signal",
)
_ON_DEVICE = ("kernel", "gpu_memcpy")
#: The entry point of our kernels.
_OURS = ("mk_kernel",)
#: Of a look at a contender. In the first kernels are loaded and memory is made, in the second the ranks meet; later a
#: rank whose host is late makes the other wait, which is not what the step exposes: the least of the others counts.
STEPS, FIRST = 6, 2

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Units: microseconds of one step. `launches_us`: ours. `kernels`: name, launches, total."""

    span_us: float
    busy_us: float
    communication_us: float
    exposed_us: float
    fused_us: float
    launches_us: tuple[float, ...]
    kernels: tuple[tuple[str, int, float], ...]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Of disjoint ones."""
    return sum(end - start for start, end in intervals)


def overlap_of(events: list[tuple[str, str, float, float]]) -> Overlap:
    """From (category, name, start, duration) of what ran on the device. Units: microseconds."""
    sums: dict[str, list[float]] = defaultdict(list)
    for _, name, _, duration in events:
        sums[name].append(duration)
    spans = {kind: [(s, s + d) for c, n, s, d in events if _kind(c, n) == kind] for kind in ("comm", "compute", "ours")}
    everything = union(one for of_kind in spans.values() for one in of_kind)
    computing = union([*spans["compute"], *spans["ours"]])
    kernels = sorted(((name, len(of), round(sum(of), 1)) for name, of in sums.items()), key=lambda one: -one[2])
    return Overlap(
        span_us=round(everything[-1][1] - everything[0][0], 1) if everything else 0.0,
        busy_us=round(length(everything), 1),
        communication_us=round(length(union(spans["comm"])), 1),
        exposed_us=round(length(everything) - length(computing), 1),
        fused_us=round(length(union(spans["ours"])), 1),
        launches_us=tuple(round(d, 1) for c, n, _, d in sorted(events, key=_start) if _kind(c, n) == "ours"),
        kernels=tuple(kernels),
    )


def _kind(category: str, name: str) -> str:
    lowered = name.lower()
    if category == "gpu_memcpy" or any(word in lowered for word in _COMMUNICATES):
        return "comm"
    return "ours" if any(word in lowered for word in _OURS) else "compute"


def _start(event: tuple[str, str, float, float]) -> float:
    return event[2]


def least_exposed(events: list[tuple[str, str, float, float]]) -> Overlap:
    """Of all that equal steps ran, the step that exposes least, without the first."""
    ordered, size = sorted(events, key=_start), len(events) // STEPS
    ends = [len(ordered) - size * later for later in range(STEPS - FIRST)]
    return min((overlap_of(ordered[end - size : end]) for end in ends), key=lambda seen: seen.exposed_us)


def record(step: Callable[[], object]) -> torch.profiler.profile:
    """Calls of a step that has run before."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile: torch.profiler.profile = torch.profiler.profile(activities=activities)
    with profile:
        for _ in range(STEPS):
            step()
        synchronize()
    return profile


def overlap_in(profile: torch.profiler.profile) -> Overlap:
    """Of the call that exposes least; takes the host a second, the device nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    seen = [e for e in events if e.get("cat") in _ON_DEVICE and "dur" in e]
    return least_exposed([(e["cat"], e["name"], float(e["ts"]), float(e["dur"])) for e in seen])
