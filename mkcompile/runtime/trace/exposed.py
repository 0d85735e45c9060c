"""What a launch's time went on, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkcompile.runtime.recorder import RankTrace
from mkcompile.runtime.trace.instances import LANE, ROLE, Instance, instances

_COMPUTE_LANES = (LANE["compute 0"], LANE["compute 1"])
_COMPUTE_ROLES = (ROLE["mainloop"], ROLE["epilogue"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSummary:
    """One launch on one rank.

    Units: microseconds. `span_us` from the first task to the last; `computing_us` of it at least one block computes,
    `exposed_us` none does: communication (and the launch's own beginning and end) that nothing hides. `busy_share`:
    part of the span in which a math group computes, on average over all. `compute_wait_us`: how long a math group
    waits, on average; `receive_wait_us`: how long a block's threads wait for what peers send, on average.
    """

    rank: int
    launch: str
    epoch: int
    num_blocks: int
    span_us: float
    computing_us: float
    exposed_us: float
    busy_share: float
    compute_wait_us: float
    receive_wait_us: float

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.launch.split(" ", 1)[0]


def summary(traces: RankTrace | Iterable[RankTrace]) -> list[LaunchSummary]:
    """All launches that are kept whole or in part, by rank and time."""
    return [
        summarise(trace, one)
        for trace in ([traces] if isinstance(traces, RankTrace) else traces)
        for one in instances(trace)
    ]


def summarise(trace: RankTrace, one: Instance) -> LaunchSummary:
    """One launch."""
    tasks = one.tasks
    computes = tasks[np.isin(tasks["lane"], _COMPUTE_LANES) & np.isin(tasks["role"], _COMPUTE_ROLES)]
    groups = max(1, len(np.unique(computes[["block", "lane"]])))
    work_us = float((_ends(computes) - _starts(computes)).sum()) / 1000
    receives = tasks[tasks["role"] == ROLE["receive"]]
    num_blocks = len(np.unique(tasks["block"]))
    computing_us = covered_ns(_starts(computes), _ends(computes)) / 1000
    return LaunchSummary(
        rank=trace.rank,
        launch=trace.launches[one.launch],
        epoch=one.epoch,
        num_blocks=num_blocks,
        span_us=one.span_us,
        computing_us=computing_us,
        exposed_us=one.span_us - computing_us,
        busy_share=work_us / groups / one.span_us if one.span_us else 0.0,
        compute_wait_us=float(computes["waited_ns"].sum()) / 1000 / groups,
        receive_wait_us=float(receives["waited_ns"].sum()) / 1000 / num_blocks,
    )


def _starts(tasks: NDArray[Any]) -> NDArray[np.int64]:
    """When the work began: a task's waits are counted as if they came first."""
    return tasks["start_ns"].astype(np.int64) + tasks["waited_ns"].astype(np.int64)


def _ends(tasks: NDArray[Any]) -> NDArray[np.int64]:
    return tasks["end_ns"].astype(np.int64)


def covered_ns(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """Length of the union of intervals."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    gaps = np.maximum(starts[1:] - ends[:-1], 0)
    return int(ends[-1] - starts[0] - gaps.sum())
