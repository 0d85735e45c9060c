"""Where one step's time goes on the GPU: kernels by name, and communication that no computation runs beside.

From the events of torch's profiler: NCCL's kernels, copies between devices, and everything else as computation. What
our fused kernels exchange is inside of them and not seen here.

Steps are looked at as GPUs run them: all launches wait in the queue behind a kernel that sleeps, then the ranks meet,
and both GPUs begin the step at once. Else whoever's host is late keeps the other's first collective waiting, which is
nothing that the step exposes.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

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
    "spin_kernel",  # async TP has short ones, too
)
_ON_DEVICE = ("kernel", "gpu_memcpy")
#: The entry point of our kernels.
_OURS = ("mk_kernel",)
#: Of a look at a contender: what the one that exposes least shows counts.
STEPS = 3
_SLEEPS = "spin_kernel"
#: Ours sleep for longer than anybody's within a step.
_SLEEP_US = 400.0
_CYCLES_PER_S, _LEAST_CYCLES, _MOST_CYCLES = 2e9, 2_000_000, 400_000_000
#: Over what is timed: a step that is looked at and takes longer was kept waiting by a host. Units: microseconds.
_FACTOR, _SLACK_US = 1.25, 200.0

Event = tuple[str, str, float, float]
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

    def doubt(self, timed_ms: float | None) -> str:
        """Why this is no step as it was timed; nothing where it is. Units: `timed_ms` milliseconds, None: not timed."""
        if timed_ms is None or self.span_us <= _FACTOR * timed_ms * 1e3 + _SLACK_US:
            return ""
        return f"the step took {self.span_us:.0f} us under the profiler and {timed_ms * 1e3:.0f} us when it was timed"


@dataclass(slots=True)
class Start:
    """Called in front of a step: both GPUs begin what is launched behind it at once, and not before it is launched.

    Units: `host_s` seconds that the slowest rank's host takes to launch the step.
    """

    host_s: float
    _flag: Tensor | None = None

    def __call__(self) -> None:
        """Nothing where there is no GPU. Collective."""
        if not torch.cuda.is_available():
            return
        if self._flag is None:
            self._flag = torch.zeros(1, device="cuda")
        cycles = int(max(_LEAST_CYCLES, min(_MOST_CYCLES, 2 * self.host_s * _CYCLES_PER_S)))
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        dist.all_reduce(self._flag)


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


def overlap_of(events: Sequence[Event]) -> Overlap:
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


def _start(event: Event) -> float:
    return event[2]


def steps_of(events: Iterable[Event]) -> list[list[Event]]:
    """What ran in each step: all behind the collective in which the ranks meet, which is behind a long sleep."""
    steps: list[list[Event]] = []
    for event in sorted(events, key=_start):
        if _SLEEPS in event[1] and event[3] > _SLEEP_US:
            steps.append([])
        elif steps:
            steps[-1].append(event)
    return [_behind_the_meeting(step) for step in steps]


def _behind_the_meeting(events: list[Event]) -> list[Event]:
    met = next((start + duration for _, name, start, duration in events if "nccl" in name.lower()), -float("inf"))
    return [event for event in events if event[2] >= met]


def least_exposed(events: Iterable[Event]) -> Overlap:
    """The step that exposes least; where our kernels run, what they take counts, too: their waits are inside.

    Raises: ValueError where not every step is to be seen.
    """
    steps = steps_of(events)
    if len(steps) != STEPS:
        raise ValueError(f"{len(steps)} of {STEPS} steps are to be seen")
    return min(map(overlap_of, steps), key=lambda seen: seen.exposed_us + seen.fused_us)


def record(step: Callable[[], object], start: Callable[[], None]) -> str:
    """What the profiler says of calls of a step that has run before: the next profiler forgets it. Collective."""
    kind = torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile(activities=[kind])
    with profile:
        for _ in range(STEPS):
            start()
            step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return path.read_text()


def overlap_in(profile: str) -> Overlap:
    """Of the call that exposes least."""
    if not torch.cuda.is_available():
        return overlap_of([])
    seen = [e for e in json.loads(profile)["traceEvents"] if e.get("cat") in _ON_DEVICE and "dur" in e]
    return least_exposed((e["cat"], e["name"], float(e["ts"]), float(e["dur"])) for e in seen)
