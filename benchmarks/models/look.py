"""What a step exposes of communication: between kernels by torch's profiler, inside of ours by their own timelines.

A number that cannot be right is not written: of a step that took longer than when it was timed, of launches that took
longer than without timelines, of timelines of which a part is lost. Then the step is looked at once more, with more
patience for the hosts, and at last the row says what was wrong.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from mkcompile.runtime import trace
from mkcompile.runtime.trace import LaunchSummary, RankTrace

from .cell_run import CellRun
from .overlap import STEPS, Overlap, Start, overlap_in, record
from .timing import slowest, synchronize

_OURS = "mkernel"
#: How much longer than it takes to launch a step the GPUs sleep in front of it.
_PATIENCE = (1.0, 4.0)
#: Of launches that write timelines over the same without. Units: microseconds a launch.
_FACTOR, _SLACK_US = 1.2, 10.0

#: Of a step, in the file of profiles.
_KERNELS = 24

Launches = list[LaunchSummary]


def look(run: CellRun, which: str) -> None:
    """A step of each contender. A graph has the kernels that it was captured with: see `look_inside`. Collective."""
    names = list(run.working)
    for patience in _PATIENCE:
        names = _profiled(run, names, which, patience)
        if not names:
            break
    if not run.cell.graphs:
        look_inside(run, which)


def _profiled(run: CellRun, names: list[str], which: str, patience: float) -> list[str]:
    """Which of them have to be looked at once more."""
    steps, profiles, kind = run.steps(which), {}, f"{which}_profile_error"
    with run.turn.kept():
        for name in names:
            start = _start(run, name, which, patience)
            if kind in run.entries[name].row:
                continue
            with run.step(name, f"profiling {which} of", kind):
                profiles[name] = record(steps[name], start)
    doubtful = []
    for name in names:
        row, doubt = run.entries[name].row, ""
        if kind in row:
            continue
        with run.step(name, f"reading a profile of {which} of", kind):
            seen = run.entries[name].seen[which] = overlap_in(profiles[name])
            doubt = seen.doubt(row.get(f"{which}_ms"))
            row[f"{which}_profile"] = _kept(seen, [])
        if _noted(run, name, which, doubt):
            doubtful.append(name)
        elif kind not in row:
            row[f"{which}_between_us"] = run.entries[name].seen[which].exposed_us
    return doubtful


def _kept(seen: Overlap, launches: Launches) -> dict[str, Any]:
    """For the file of profiles: of kernels those that take most."""
    return {**asdict(seen), "kernels": seen.kernels[:_KERNELS], "launches": [asdict(one) for one in launches]}


def _noted(run: CellRun, name: str, which: str, doubt: str) -> bool:
    """Does any rank doubt what it saw? Then the row says why. Collective."""
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, doubt, group=run.turn.host_group)
    doubts, note = [one for one in said if one], f"{which}_exposed_note"
    run.entries[name].row.pop(note, None)
    if doubts:
        run.entries[name].row[note] = doubts[0]
    return bool(doubts)


def _start(run: CellRun, name: str, which: str, patience: float) -> Start:
    """In front of that contender's step, after one that is not looked at."""
    step, host_s = run.steps(which)[name], 0.0
    with run.step(name, f"before looking at {which} of", f"{which}_profile_error"):
        synchronize()
        started = time.perf_counter()
        step()
        host_s = time.perf_counter() - started
        synchronize()
    return Start(slowest([host_s], run.turn.host_group)[0] * patience)


def look_inside(run: CellRun, which: str) -> None:
    """What our kernels expose, which only timelines of theirs can tell; into a graph they are captured once more.
    Collective.
    """
    entry = run.working.get(_OURS)
    if entry is None or f"{which}_between_us" not in entry.row:
        return
    seen = entry.seen[which]
    if not slowest([seen.fused_us], run.turn.host_group)[0]:
        entry.row[f"{which}_inside_us"] = 0.0
        return
    kind = f"{which}_profile_error"
    for patience in _PATIENCE:
        with run.turn.kept():
            traces = _traced(run, which, patience)
        if kind in entry.row:
            return
        doubt = ""
        with run.step(_OURS, f"reading timelines of {which} of", kind):
            launches, doubt = judged(traces, seen)
            entry.row[f"{which}_profile"] = _kept(seen, launches)
        if kind not in entry.row and not _noted(run, _OURS, which, doubt):
            entry.row[f"{which}_inside_us"] = round(sum(one.exposed_us for one in launches), 1)
            return


def _traced(run: CellRun, which: str, patience: float) -> list[list[RankTrace]]:
    """Of each step what this rank's kernels wrote."""
    switch, step, kind = run.entries[_OURS].contender.switch, run.steps(which)[_OURS], f"{which}_profile_error"
    found: list[list[RankTrace]] = []
    with run.tracer.tracing(), switch.with_timelines() if run.cell.graphs else nullcontext():
        with run.step(_OURS, f"preparing timelines of {which} of", kind):
            if run.cell.graphs:
                run.plain_step(_OURS, which)  # a capture loads no kernels and makes no memory
                step()
            step()
        start = _start(run, _OURS, which, patience)
        if kind in run.entries[_OURS].row:
            return found
        with run.step(_OURS, f"timelines of {which} of", kind):
            for _ in range(STEPS):
                trace.clear()
                start()
                step()
                found.append(trace.collect())
    return found


def judged(traces: list[list[RankTrace]], seen: Overlap) -> tuple[Launches, str]:
    """The launches of the step that exposes least, and why they are not to be trusted: nothing where they are."""
    steps = [trace.summary(of_step) for of_step in traces]
    launches = min(steps, key=lambda step: (-len(step), sum(one.exposed_us for one in step)), default=[])
    spans_us = sum(one.span_us for one in launches)
    if len(launches) != len(seen.launches_us):
        return launches, f"timelines of {len(launches)} of {len(seen.launches_us)} launches were kept"
    if spans_us > _FACTOR * seen.fused_us + _SLACK_US * len(launches):
        return launches, f"launches took {spans_us:.0f} us with timelines and {seen.fused_us:.0f} us without"
    if any(one.overwritten for of_step in traces for one in of_step):
        return launches, "a part of the timelines was overwritten"
    return launches, ""


def first_profile() -> None:
    """The profiler's first start takes seconds, in which no pair should hold the GPUs."""
    record(lambda: None, lambda: None)
