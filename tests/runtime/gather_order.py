"""`gather_schedule.cuh` and `gather_walk.cuh` built for the CPU: tiles and images in the kernels' order."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from tests.runtime.device_header import built

_SOURCE = """
#define __device__
#define __forceinline__ inline
#include "device/gather_schedule.cuh"
#include "device/gather_walk.cuh"
template <int kSplit_> struct SomeTile { static constexpr int kBlockM = 128, kBlockN = 128, kSplit = kSplit_; };
using Tile = SomeTile<1>;
static mk::LaunchArguments args;
static mk::GatherArguments gather;
extern "C" void set(const unsigned* w) {
  args = {}, gather = {};
  args.m = w[0], args.k[0] = w[1], args.segments = w[2], args.segment_rows = w[3], args.rank = w[4], args.world = w[5];
  args.raster_group = w[6];
  gather.weights = w[7], gather.order = w[8], gather.band = w[9];
  for (unsigned i = 0; i < gather.weights; ++i) gather.n[i] = w[10 + i];
}
extern "C" unsigned tiles(unsigned grid, unsigned block, unsigned* out) {
  const auto s = mk::GatherSchedule::make<Tile>(args, gather, grid, block);
  unsigned count = 0;
  for (unsigned at = s.first(); at < s.positions(); at = s.next(at), ++count) {
    const mk::GatherPlace p = s.place<Tile>(gather, at);
    unsigned* row = out + count * 9;
    row[0] = at, row[1] = p.owner, row[2] = p.weight, row[3] = p.column, row[4] = p.row, row[5] = p.last_row;
    row[6] = p.out_row, row[7] = p.run, row[8] = p.row_tile;
  }
  return count;
}
extern "C" unsigned sent(unsigned grid, unsigned length, unsigned block, unsigned end, unsigned* out) {
  const mk::ImageRuns runs{grid, length};
  unsigned count = 0;
  for (unsigned at = runs.first(block); at < end; at = runs.after(at, 1)) out[count++] = at;
  return count;
}
extern "C" unsigned images(unsigned source, unsigned whole, unsigned first_step, unsigned steps, unsigned split,
                           int* out) {
  const auto walk = split == 1 ? mk::ImageWalk::make<Tile>(args, gather, source, whole)
                               : mk::ImageWalk::make<SomeTile<2>>(args, gather, source, whole);
  for (unsigned at = 0; at < walk.images * steps; ++at) {
    const mk::Image i = walk.image(at, first_step, source);
    int* row = out + at * 8;
    row[0] = i.step, row[1] = i.row_tile, row[2] = i.k_block, row[3] = i.row, row[4] = i.first, row[5] = i.rows;
    row[6] = i.run, row[7] = i.run_row;
  }
  return walk.images * steps;
}
"""


@dataclass(frozen=True, slots=True)
class Place:
    """One tile of 128 x 128."""

    position: int
    owner: int
    weight: int
    column: int
    row: int
    last_row: int
    out_row: int
    run: int
    row_tile: int


@dataclass(frozen=True, slots=True)
class Image:
    """One image; see `mk::Image`."""

    step: int
    row_tile: int
    k_block: int
    row: int
    first: int
    rows: int
    run: int
    run_row: int


def _library() -> ctypes.CDLL:
    return built(_SOURCE)


def _set(size: GatherSize, schedule: GatherSchedule, rank: int) -> None:
    words = [
        size.rows, size.k, size.segments, size.segment_rows, rank, size.world, schedule.raster_group, len(size.n),
        schedule.order, schedule.band, *size.n,
    ]  # fmt: skip
    _library().set((ctypes.c_uint32 * len(words))(*words))


def tiles_of(size: GatherSize, schedule: GatherSchedule, rank: int, block: int) -> list[Place]:
    """The tiles of one block, in order."""
    _set(size, schedule, rank)
    words = (ctypes.c_uint32 * (9 * 100_000))()
    count = _library().tiles(schedule.grid, block, words)
    return [Place(*words[9 * i : 9 * i + 9]) for i in range(count)]


def images_of(
    size: GatherSize,
    schedule: GatherSchedule,
    source: int,
    *,
    first_step: int = 0,
    steps: int = 1,
    whole: bool = False,
    split: int = 1,
) -> list[Image]:
    """Images of a rank's shard, or of all rows, in order: block b of a grid moves every grid-th from number b on.

    `split` blocks (1 or 2) share the k of a tile.
    """  # fmt: skip
    _set(size, schedule, source)
    words = (ctypes.c_int32 * (8 * 100_000))()
    count = _library().images(source, whole, first_step, steps, split, words)
    return [Image(*words[8 * i : 8 * i + 8]) for i in range(count)]


def sent_by(block: int, grid: int, length: int, end: int) -> list[int]:
    """Numbers below `end` of the images that a block of a grid sends, in runs of `length`."""
    words = (ctypes.c_uint32 * (end + 1))()
    return list(words[: _library().sent(grid, length, block, end, words)])
