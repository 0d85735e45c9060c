"""Which launch each task belongs to: kernels mark tasks with what was launched, and each block marks its stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkcompile.runtime import abi
from mkcompile.runtime.recorder import RankTrace, Tasks

ROLE = {name: number for number, name in enumerate(abi.TRACE_ROLES)}
LANE = {name: number for number, name in enumerate(abi.TRACE_LANES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One launch. `launch` indexes the rank's descriptions; `epoch` is 0 for kernels of one rank.

    Units: `start_ns`, `end_ns` of the device's global timer, from the first task to the last.
    """

    launch: int
    epoch: int
    start_ns: int
    end_ns: int
    tasks: Tasks

    @property
    def span_us(self) -> float:
        """From the first task to the last."""
        return (self.end_ns - self.start_ns) / 1000


def instances(trace: RankTrace) -> list[Instance]:
    """All launches of which something was kept, by time. Tasks whose launch has left the rings are dropped."""
    tasks = trace.tasks
    stays = tasks[tasks["role"] == ROLE["block"]]
    if not len(stays):
        return []
    first = np.sort(stays[stays["block"] == stays["block"].min()], order="start_ns")
    number_of_stay = _numbers(stays, first)
    number = np.full(len(tasks), -1)
    for block in np.unique(stays["block"]):
        of_block = stays["block"] == block
        order = np.argsort(stays["start_ns"][of_block], kind="stable")
        starts, numbers = stays["start_ns"][of_block][order], number_of_stay[of_block][order]
        mine = np.flatnonzero(tasks["block"] == block)
        at = np.searchsorted(starts, tasks["start_ns"][mine], side="right") - 1
        number[mine] = np.where(at >= 0, numbers[np.maximum(at, 0)], -1)
    # The timer has been seen to step back: a stay that seems to end in the next launch is in none.
    return [_instance(first[i], tasks[number == i]) for i in range(len(first)) if (number == i).any()]


def _numbers(stays: Tasks, first: Tasks) -> NDArray[Any]:
    """For each block's stay the launch, numbered as the stays of the first block; -1: the first block has lost it.

    Launches of a device follow each other: a block of an earlier one has ended when the first block begins.
    """
    number = np.searchsorted(first["start_ns"], stays["end_ns"], side="left") - 1
    own = first[np.maximum(number, 0)]
    is_it = (number >= 0) & (own["launch"] == stays["launch"]) & (own["tile"] == stays["tile"])
    return np.where(is_it, number, -1)


def _instance(stay: Any, tasks: Tasks) -> Instance:
    return Instance(
        launch=int(stay["launch"]),
        epoch=int(stay["tile"]),
        start_ns=int(tasks["start_ns"].min()),
        end_ns=int(tasks["end_ns"].max()),
        tasks=tasks,
    )
