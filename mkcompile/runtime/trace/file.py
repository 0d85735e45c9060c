"""A timeline as a file that Perfetto opens (https://ui.perfetto.dev), and back.

Source: the Chrome trace event format. Processes are ranks, threads are the roles of blocks, and the first thread of
each rank shows the launches. A task that waited has a slice `wait` inside; its length is the sum of the task's waits,
and it lies at the task's beginning. What else is needed to read the file back is under `mkcompile`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mkcompile.errors import OptionError
from mkcompile.runtime import abi
from mkcompile.runtime.recorder import TASK, RankTrace, Tasks
from mkcompile.runtime.trace.clocks import Clock, align
from mkcompile.runtime.trace.exposed import summarise
from mkcompile.runtime.trace.instances import instances

_LANES = len(abi.TRACE_LANES)
#: Shorter waits have no slice of their own.
_SHORTEST_WAIT_NS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Traces of all ranks and their clocks. `synthetic`: made by a program, not by a GPU."""

    traces: tuple[RankTrace, ...]
    clocks: tuple[Clock, ...]
    synthetic: bool = False

    @staticmethod
    def of(traces: Sequence[RankTrace], synthetic: bool = False) -> Timeline:
        """Aligned."""
        return Timeline(traces=tuple(traces), clocks=align(traces), synthetic=synthetic)

    @property
    def origin_ns(self) -> int:
        """The first task of all, by the first rank's clock."""
        begins = [
            int(trace.tasks["start_ns"].min()) + clock.offset_ns
            for trace, clock in zip(self.traces, self.clocks, strict=True)
            if len(trace.tasks)
        ]
        return min(begins, default=0)


def write(timeline: Timeline, path: Path) -> None:
    """As JSON, compressed where the name ends with `.gz`: Perfetto opens both."""
    ranks = [
        {
            "rank": trace.rank, "device": trace.device, "launches": trace.launches, "groups": trace.groups,
            "overwritten": trace.overwritten, "clock": asdict(clock),
        }
        for trace, clock in zip(timeline.traces, timeline.clocks, strict=True)
    ]  # fmt: skip
    content = {
        "traceEvents": list(events(timeline)),
        "displayTimeUnit": "ns",
        "mkcompile": {"origin_ns": timeline.origin_ns, "synthetic": timeline.synthetic, "ranks": ranks},
    }
    text = json.dumps(content, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Names of processes and threads, then slices. Times of the format are microseconds."""
    for trace, clock in zip(timeline.traces, timeline.clocks, strict=True):
        shift_ns = clock.offset_ns - timeline.origin_ns
        label = f"rank {trace.rank} ({trace.device}{', synthetic' if timeline.synthetic else ''})"
        yield _name(trace.rank, 0, "process_name", label)
        yield _name(trace.rank, 0, "thread_name", "launches")
        for thread in np.unique(trace.tasks["block"].astype(int) * _LANES + trace.tasks["lane"] + 1):
            block, lane = divmod(int(thread) - 1, _LANES)
            yield _name(trace.rank, int(thread), "thread_name", f"block {block:03} {abi.TRACE_LANES[lane]}")
            yield {"ph": "M", "name": "thread_sort_index", "pid": trace.rank, "tid": int(thread),
                   "args": {"sort_index": int(thread)}}  # fmt: skip
        yield from _launches(trace, shift_ns)
        for task in trace.tasks:
            yield from _slices(trace, task, shift_ns)


def _name(rank: int, thread: int, kind: str, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": text}}


def _slice(rank: int, thread: int, name: str, start_ns: int, duration_ns: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": start_ns / 1000, "dur": duration_ns / 1000}


def _launches(trace: RankTrace, shift_ns: int) -> Iterator[dict[str, Any]]:
    for one in instances(trace):
        numbers = summarise(trace, one)
        event = _slice(trace.rank, 0, numbers.operator, one.start_ns + shift_ns, one.end_ns - one.start_ns)
        yield event | {"cat": "launch", "args": asdict(numbers)}


def _slices(trace: RankTrace, task: Any, shift_ns: int) -> Iterator[dict[str, Any]]:
    thread = int(task["block"]) * _LANES + int(task["lane"]) + 1
    start_ns, waited_ns = int(task["start_ns"]) + shift_ns, int(task["waited_ns"])
    duration_ns = int(task["end_ns"]) - int(task["start_ns"])
    arguments = {name: int(task[name]) for name in ("tile", "owner", "launch", "waited_ns")}
    event = _slice(trace.rank, thread, abi.TRACE_ROLES[task["role"]], start_ns, duration_ns)
    yield event | {"cat": trace.launches[task["launch"]].split(" ", 1)[0], "args": arguments}
    if waited_ns >= _SHORTEST_WAIT_NS:
        yield _slice(trace.rank, thread, "wait", start_ns, min(waited_ns, duration_ns)) | {"cat": "wait"}


def read(path: Path) -> Timeline:
    """A file that `write` wrote.

    Raises: OptionError where it is none.
    """
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        about, ranks = content["mkcompile"], content["mkcompile"]["ranks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is no timeline of mkcompile: {error}") from error
    clocks = [Clock(**one["clock"]) for one in ranks]
    traces = [
        RankTrace(
            rank=one["rank"],
            device=one["device"],
            launches=tuple(one["launches"]),
            groups=tuple(tuple(group) for group in one["groups"]),
            tasks=_tasks(content["traceEvents"], one["rank"], about["origin_ns"] - clock.offset_ns),
            overwritten=one["overwritten"],
        )
        for one, clock in zip(ranks, clocks, strict=True)
    ]
    return Timeline(traces=tuple(traces), clocks=tuple(clocks), synthetic=about["synthetic"])


def _tasks(found: Sequence[dict[str, Any]], rank: int, shift_ns: int) -> Tasks:
    roles = {name: number for number, name in enumerate(abi.TRACE_ROLES)}
    rows = [
        event for event in found
        if event["ph"] == "X" and event["pid"] == rank and event["tid"] > 0 and event["cat"] != "wait"
    ]  # fmt: skip
    tasks = np.zeros(len(rows), dtype=TASK)
    for row, event in zip(tasks, rows, strict=True):
        start_ns, arguments = round(event["ts"] * 1000) + shift_ns, event["args"]
        row["start_ns"], row["end_ns"] = start_ns, start_ns + round(event["dur"] * 1000)
        row["block"], row["lane"] = divmod(event["tid"] - 1, _LANES)
        row["role"] = roles[event["name"]]
        for name in ("tile", "owner", "launch", "waited_ns"):
            row[name] = arguments[name]
    return tasks
