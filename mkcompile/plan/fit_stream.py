"""Fits the constants of the streaming kernels, on every second row of the sweep; `plan.fit` runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mkcompile.ops.problem import Problem
from mkcompile.plan.constants import Constants
from mkcompile.plan.plan import Tile
from mkcompile.plan.site import Site
from mkcompile.plan.stream import STREAM_TILES, Stream, Way
from mkcompile.plan.topology import PRESETS

#: Runs; a launch that several have is taken from the last of them (decision 206).
FILES = ("small_sweep_handed_over.jsonl", "small_sweep_shared.jsonl", "small_sweep_clusters.jsonl")
# Kernels that have other buffers now, and grids of clusters that do not fit at once.
_GONE = re.compile(r"128x128_s5_\w+_stream2|128x128_s6_\w+_ho|stream4")
_VARIANT = re.compile(r"_(\d+)x(\d+)_s\d+_.*stream(\d)(_pp|_ho|_pp_ends)? grid\d+")
_WAYS: Mapping[str | None, Way] = {"_pp": "turns", "_ho": "handed", "_pp_ends": "ends", None: "together"}
TILE_BOUNDS: Mapping[str, tuple[float, float]] = {str(t).rpartition("x")[0]: (0.15, 1.15) for t in STREAM_TILES}
BOUNDS: Mapping[str, tuple[float, float]] = {
    "mailbox_us": (0.5, 6.0),
    "cluster_us": (0.0, 4.0),
    "sm_load_gbps": (60.0, 300.0),
    "stream_start_us": (0.0, 3.0),
    "stream_launch_us": (0.0, 5.0),
    "stream_link_fraction": (0.3, 1.0),
    "stream_overlap": (0.0, 1.0),
    "stream_turns": (0.0, 0.5),
    "stream_reread": (0.0, 1.0),
    "stream_exponent": (2.0, 16.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """One launch of the sweep; `operator` `gemm` is the product alone. Units: microseconds."""

    operator: str
    stream: Stream
    us: float
    run: str

    @property
    def is_offered(self) -> bool:
        """Whether the planner may take such a launch."""
        return self.stream.possible() and self.stream.way == replace(self.stream, how=None).way

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Operator and size: what the variants of a row compete at."""
        one = self.stream.site.problem
        return self.operator, one.m, one.n, one.k


def stream_rows(folder: Path) -> list[StreamRow]:
    """All launches of streaming kernels."""
    found = {(row.place, row.stream): row for name in FILES for row in rows_of(folder / name)}
    return list(found.values())


def rows_of(path: Path) -> list[StreamRow]:
    """Those of one run."""
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        matched = _VARIANT.search(row["variant"])
        if matched is not None and row["checked"] and _GONE.search(row["variant"]) is None:
            rows, columns, split = map(int, matched.groups()[:3])
            if not any((tile.rows, tile.columns) == (rows, columns) for tile in STREAM_TILES):
                continue
            problem = Problem(
                operator="gemm_all_reduce" if row["op"] == "gemm" else row["op"],
                m=row["M"], n=row["N"], k=row["K"], world_size=row["world"], dtype=row["dtype"], dtype_bytes=2,
            )  # fmt: skip
            site = Site(problem=problem, topology=PRESETS["2xh200"], reserve_sms=4)
            stream = Stream(site=site, tile=Tile(rows=rows, columns=columns), split=split, how=_WAYS[matched[4]])
            found.append(StreamRow(operator=row["op"], stream=stream, us=row["ms"] * 1e3, run=path.name))
    return found


def predict_stream(row: StreamRow, using: Constants) -> float:
    """What the model says for a row, in microseconds."""
    stream = replace(row.stream, site=replace(row.stream.site, known=using))
    return stream.product_us() if row.operator == "gemm" else stream.us()
