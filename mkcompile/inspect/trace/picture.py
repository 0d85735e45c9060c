"""A timeline as a picture: ranks side by side, blocks down, time across, colour by role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mkcompile.runtime import abi
from mkcompile.runtime.recorder import RankTrace, Tasks
from mkcompile.runtime.trace.exposed import summary
from mkcompile.runtime.trace.file import Timeline
from mkcompile.runtime.trace.instances import LANE, ROLE

#: The block's stay is the frame of all others, and has no colour of its own.
COLOURS = {
    "load": "#b8c4d6", "mainloop": "#2f6fb3", "epilogue": "#6fb1e0", "receive": "#f3c9c2", "store": "#7a9e3b",
    "push": "#e08a1e", "signal": "#7d3f98", "copy": "#c2452d", "net_send": "#8c6d31", "net_receive": "#b5a05a",
}  # fmt: skip
WAIT = "#e9e9e9"
#: Lanes that share a row: both groups of a block do the same, one a little after the other.
_ROWS = (
    ("load",), ("compute 0", "compute 1"), ("store 0", "store 1"), ("signal",), ("copy", "extra")
)  # fmt: skip
_HEIGHT_OF_BLOCK = 0.16
_SAMPLES = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Units: nanoseconds on the common axis; drawn from zero."""

    start_ns: int
    end_ns: int


def draw(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write a PNG of all that was recorded."""
    window = _Window(start_ns=timeline.origin_ns, end_ns=_end_ns(timeline))
    columns = max(1, len(timeline.traces))
    height = min(max(_HEIGHT_OF_BLOCK * _num_blocks(timeline), 5), 24)
    figure = Figure(figsize=(min(7.5 * columns + 1, 48), height + 3), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False, sharex=True, gridspec_kw={"height_ratios": [height, 1.3]})
    for column, (trace, clock) in enumerate(zip(timeline.traces, timeline.clocks, strict=True)):
        shift_ns = clock.offset_ns - window.start_ns
        _blocks(axes[0][column], trace, shift_ns)
        _share(axes[1][column], trace, shift_ns, window)
        axes[0][column].set_title(_caption(trace), fontsize=9)
        axes[1][column].set_xlabel("us")
        axes[0][column].set_xlim(0, (window.end_ns - window.start_ns) / 1000)
    axes[0][0].set_ylabel("block")
    axes[1][0].set_ylabel("math groups\nat work")
    patches = [Patch(color=COLOURS[name], label=name) for name in _present(timeline.traces)]
    figure.legend(handles=[*patches, Patch(color=WAIT, label="wait")], loc="outside lower center", ncols=12, fontsize=8)
    mark = "SYNTHETIC, not measured. " if timeline.synthetic else ""
    figure.suptitle(f"{mark}{title}{_accuracy(timeline)}", fontsize=10)
    figure.savefig(path, dpi=120)


def _end_ns(timeline: Timeline) -> int:
    ends = [
        int(trace.tasks["end_ns"].max()) + clock.offset_ns
        for trace, clock in zip(timeline.traces, timeline.clocks, strict=True)
        if len(trace.tasks)
    ]
    return max(ends, default=timeline.origin_ns + 1)


def _num_blocks(timeline: Timeline) -> int:
    return max((int(trace.tasks["block"].max()) + 1 for trace in timeline.traces if len(trace.tasks)), default=1)


def _present(traces: Sequence[RankTrace]) -> list[str]:
    found = {int(role) for trace in traces for role in np.unique(trace.tasks["role"])}
    return [name for name in COLOURS if ROLE[name] in found]


def _caption(trace: RankTrace) -> str:
    exposed = [one.exposed_us for one in summary(trace)]
    total = f", {sum(exposed):.0f} us in {len(exposed)} launches without any block at work" if exposed else ""
    return f"rank {trace.rank}, {trace.device}{total}"


def _accuracy(timeline: Timeline) -> str:
    known = [clock.within_ns for clock in timeline.clocks[1:] if clock.within_ns is not None]
    if len(known) < len(timeline.clocks) - 1:
        return "   (clocks not aligned: ranks begin together)"
    return f"   (clocks of ranks aligned to {max(known) / 1000:.1f} us)" if known else ""


def _blocks(axes: Axes, trace: RankTrace, shift_ns: int) -> None:
    """Each block is one unit high, shared out among the rows of which anything was written."""
    tasks = trace.tasks
    rows = [lanes for lanes in _ROWS if np.isin(tasks["lane"], [LANE[lane] for lane in lanes]).any()]
    height = 1 / (len(rows) + 0.5)
    for row, lanes in enumerate(rows):
        of_row = tasks[np.isin(tasks["lane"], [LANE[lane] for lane in lanes])]
        for name, colour in COLOURS.items():
            chosen = of_row[of_row["role"] == ROLE[name]]
            if len(chosen):
                _bars(axes, chosen, (shift_ns, row * height, height), colour)
    axes.set_ylim(int(tasks["block"].max()) + 1 if len(tasks) else 1, 0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _bars(axes: Axes, tasks: Tasks, place: tuple[int, float, float], colour: str) -> None:
    """The waited part of each task first, in the colour of waiting."""
    shift_ns, top, height = place
    start_us = (tasks["start_ns"].astype(np.int64) + shift_ns) / 1000
    end_us = (tasks["end_ns"].astype(np.int64) + shift_ns) / 1000
    work_us = np.minimum(start_us + tasks["waited_ns"] / 1000, end_us)
    y = tasks["block"] + top
    waited = work_us > start_us
    axes.add_collection(_rectangles(start_us[waited], work_us[waited], y[waited], height, WAIT))
    axes.add_collection(_rectangles(work_us, end_us, y, height, colour))


def _rectangles(left: NDArray[Any], right: NDArray[Any], y: NDArray[Any], height: float, colour: str) -> PolyCollection:
    corners = [(left, y), (right, y), (right, y + height), (left, y + height)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    return PolyCollection(list(vertices), facecolors=colour, edgecolors="none", linewidths=0)


def _share(axes: Axes, trace: RankTrace, shift_ns: int, window: _Window) -> None:
    """How many of the math groups compute at each moment."""
    tasks = trace.tasks
    compute = tasks[(tasks["role"] == ROLE["mainloop"]) | (tasks["role"] == ROLE["epilogue"])]
    groups = max(1, len(np.unique(compute[["block", "lane"]])))
    start_ns = np.sort(compute["start_ns"].astype(np.int64) + compute["waited_ns"].astype(np.int64) + shift_ns)
    end_ns = np.sort(compute["end_ns"].astype(np.int64) + shift_ns)
    at_ns = np.linspace(0, window.end_ns - window.start_ns, _SAMPLES)
    working = np.searchsorted(start_ns, at_ns, side="right") - np.searchsorted(end_ns, at_ns, side="right")
    axes.fill_between(at_ns / 1000, working / groups, color=COLOURS["mainloop"], linewidth=0)
    axes.set_ylim(0, 1.05)
    axes.grid(axis="y", alpha=0.3)


assert set(COLOURS) == set(abi.TRACE_ROLES) - {"block"}
