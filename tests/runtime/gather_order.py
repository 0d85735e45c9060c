"""`csrc/device/gather_schedule.cuh` built for the CPU: tiles and chunks in the order that the kernels use."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from mkcompile.runtime.sources import csrc_folder

_SOURCE = """
#define __device__
#define __forceinline__ inline
#include "device/gather_schedule.cuh"
struct Tile { static constexpr int kBlockM = 128, kBlockN = 128; };
static mk::LaunchArguments args;
static mk::GatherArguments gather;
extern "C" void set(const unsigned* w) {
  args = {}, gather = {};
  args.m = w[0], args.k[0] = w[1], args.segments = w[2], args.segment_rows = w[3], args.rank = w[4], args.world = w[5];
  args.raster_group = w[6];
  gather.weights = w[7], gather.order = w[8], gather.blocks = w[9], gather.group_rows = w[10], gather.join = w[11];
  for (unsigned i = 0; i < gather.weights; ++i) gather.n[i] = w[12 + i];
}
extern "C" unsigned tiles(unsigned grid, unsigned block, unsigned* out) {
  const auto s = mk::GatherSchedule::make<Tile>(args, gather, grid, block);
  unsigned count = 0;
  for (unsigned at = s.first(); at < s.positions(); at = s.next(at), ++count) {
    const mk::GatherPlace p = s.place<Tile>(gather, at);
    unsigned* row = out + count * 8;
    row[0] = at, row[1] = p.owner, row[2] = p.weight, row[3] = p.column, row[4] = p.row, row[5] = p.last_row;
    row[6] = p.out_row, row[7] = p.run;
  }
  return count;
}
extern "C" unsigned chunks(unsigned first_step, unsigned block, unsigned long long* out) {
  unsigned count = 0;
  for (auto w = mk::ChunkWalk::make(args, gather, first_step, block); !w.finished(); w.advance(), ++count) {
    unsigned long long* row = out + count * 4;
    row[0] = w.step(), row[1] = w.group, row[2] = w.offset, row[3] = w.bytes();
  }
  return count;
}
extern "C" unsigned turns(unsigned first_step, unsigned block, unsigned* out) {
  auto w = mk::ChunkWalk::make(args, gather, first_step, block);
  for (w.turn = 0; !w.finished(); ++w.turn) {
    w.locate();
    out[w.turn * 3] = w.step(), out[w.turn * 3 + 1] = w.group, out[w.turn * 3 + 2] = w.count();
  }
  return w.turns;
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """One transfer. Units: bytes of the shard."""

    step: int
    group: int
    offset: int
    num_bytes: int


@cache
def _library() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="mkcompile-gather-"))
    (folder / "walk.cc").write_text(_SOURCE)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{csrc_folder()}", "walk.cc", "-o", "walk.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "walk.so"))


def _set(size: GatherSize, schedule: GatherSchedule, rank: int) -> None:
    words = [
        size.rows, size.k, size.segments, size.segment_rows, rank, size.world, schedule.raster_group, len(size.n),
        schedule.order, schedule.blocks, schedule.group_rows, schedule.join, *size.n,
    ]  # fmt: skip
    _library().set((ctypes.c_uint32 * len(words))(*words))


def tiles_of(size: GatherSize, schedule: GatherSchedule, rank: int, block: int) -> list[Place]:
    """The tiles of one block, in order."""
    _set(size, schedule, rank)
    words = (ctypes.c_uint32 * (8 * 100_000))()
    count = _library().tiles(schedule.grid, block, words)
    return [Place(*words[8 * i : 8 * i + 8]) for i in range(count)]


def chunks_of(size: GatherSize, schedule: GatherSchedule, first_step: int, block: int) -> list[Chunk]:
    """The chunks that one thread of a block moves, in order."""
    _set(size, schedule, 0)
    words = (ctypes.c_uint64 * (4 * 100_000))()
    count = _library().chunks(first_step, block, words)
    return [Chunk(*words[4 * i : 4 * i + 4]) for i in range(count)]


def turns_of(size: GatherSize, schedule: GatherSchedule, first_step: int, block: int) -> list[tuple[int, int, int]]:
    """Step, group and number of chunks of each turn."""
    _set(size, schedule, 0)
    words = (ctypes.c_uint32 * (3 * 100_000))()
    count = _library().turns(first_step, block, words)
    return [(words[3 * i], words[3 * i + 1], words[3 * i + 2]) for i in range(count)]
