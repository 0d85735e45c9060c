"""The timeline that kernels write when they are traced: kept on the device, read, aligned over ranks, summed up.

MKCOMPILE_TRACE=1, then after a step and a synchronisation:
for one in mkcompile.runtime.trace.summary(mkcompile.runtime.trace.collect()):
    one.exposed_us
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mkcompile.runtime.recorder import RankTrace
from mkcompile.runtime.trace.exposed import LaunchSummary, summary
from mkcompile.runtime.wiring import kernels

__all__ = ["LaunchSummary", "RankTrace", "clear", "collect", "summary"]


def collect() -> list[RankTrace]:
    """What this process's kernels have recorded; waits for the devices. Empty where nothing is traced."""
    found = kernels()
    if found is None:
        return []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return found.traces(dist.get_rank() if dist.is_initialized() else 0)


def clear() -> None:
    """Forget what was recorded so far, behind all work of the current stream."""
    found = kernels()
    if found is not None:
        found.clear_traces()
