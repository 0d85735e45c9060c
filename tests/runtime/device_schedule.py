"""`csrc/device/schedule.cuh` built for the CPU: the tests walk the order that the kernels use, not a copy of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tests.runtime.device_header import built

_SOURCE = """
#define __device__
#define __forceinline__ inline
#include "device/schedule.cuh"
struct Tile { static constexpr int kBlockM = 128, kBlockN = 128; };
template <bool kScatters>
static void fill(const mk::LaunchArguments& args, unsigned grid, unsigned* out) {
  const auto schedule = mk::Schedule<kScatters>::template make<Tile>(args, grid);
  out[0] = schedule.positions();
  for (unsigned at = 0; at < schedule.positions(); ++at) {
    const mk::Task task = schedule.task(at);
    unsigned* row = out + 1 + at * 6;
    row[0] = task.owner, row[1] = task.index, row[2] = task.valid;
    if (!task.valid) continue;  // it has no place
    const mk::TilePlace place = schedule.template place<Tile>(args, task);
    row[3] = place.row, row[4] = place.column, row[5] = place.segment * 1000000 + place.out_row;
  }
}
extern "C" void walk(int scatters, unsigned world, unsigned rank, unsigned segments, unsigned segment_rows, unsigned n,
                     unsigned group, unsigned lag, unsigned grid, unsigned* out) {
  mk::LaunchArguments args{};
  args.world = world, args.rank = rank, args.segments = segments, args.segment_rows = segment_rows, args.n = n;
  args.raster_group = group, args.lag = lag;
  scatters ? fill<true>(args, grid, out) : fill<false>(args, grid, out);
}
"""


@dataclass(frozen=True, slots=True)
class Task:
    """One position of the order. Units: `row`, `column`, `out_row` elements."""

    owner: int
    index: int
    valid: bool
    row: int
    column: int
    segment: int
    out_row: int


def _library() -> ctypes.CDLL:
    return built(_SOURCE)


def walk(
    *,
    scatters: bool,
    world: int,
    rank: int,
    segment_rows: int,
    n: int,
    lag: int,
    grid: int,
    segments: int = 1,
    group: int = 2,
) -> list[Task]:
    """The order of one rank. Tiles are 128 x 128; `segment_rows` as in LaunchArguments."""
    tiles = -(-segment_rows // 128) * segments * -(-n // 128)
    words = (ctypes.c_uint32 * (1 + 6 * (tiles + 1) * world))()
    _library().walk(scatters, world, rank, segments, segment_rows, n, group, lag, grid, words)
    rows = [words[1 + 6 * at : 7 + 6 * at] for at in range(words[0])]
    return [Task(o, i, bool(v), row, column, place // 1000000, place % 1000000) for o, i, v, row, column, place in rows]
