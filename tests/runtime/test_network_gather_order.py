"""The order of an all-gather over nodes: every tile once, own rows first, flags and places that never meet."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.runtime.device_header import built

_SOURCE = """
#define __device__
#define __forceinline__ inline
#include "device/network/gather_schedule.cuh"
struct Tile { static constexpr int kBlockM = 128, kBlockN = 128; };
static mk::NetworkLaunchArguments args;
static mk::GatherArguments gather;
extern "C" void set(const unsigned* w) {
  args = {}, gather = {};
  args.segments = w[0], args.segment_rows = w[1], args.rank = w[2], args.world = w[3], args.net.node = w[4];
  args.net.nodes = w[5], args.raster_group = w[6], args.k[0] = w[7], args.net.max_chunks = w[8];
  args.region_offset = 4096, args.region_bytes = 1u << 30;
  gather.weights = 2, gather.n[0] = 264, gather.n[1] = 136, gather.order = mk::kApart, gather.group_rows = w[9];
}
extern "C" unsigned tiles(unsigned grid, unsigned block, unsigned* out) {
  const auto s = mk::NodeGatherSchedule::make<Tile>(args, gather, grid, block);
  unsigned count = 0;
  for (unsigned at = s.first(); at < s.positions(); at = s.next(at), ++count) {
    const mk::GatherPlace p = s.place<Tile>(gather, at);
    unsigned* row = out + count * 8;
    row[0] = at, row[1] = p.owner, row[2] = p.weight, row[3] = p.column, row[4] = p.row, row[5] = p.last_row;
    row[6] = p.out_row, row[7] = p.run;
  }
  return count;
}
extern "C" unsigned chunk(unsigned epoch, unsigned source, unsigned number, unsigned long long* out) {
  const auto s = mk::ShardChunks::make(args, gather, epoch);
  out[0] = s.flag(source, number), out[1] = s.slot(source) + s.first_byte(number), out[2] = s.bytes(number);
  return s.chunks;
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch; `world` ranks of a node."""

    nodes: int
    world: int
    rows: int = 300
    segments: int = 1
    group_rows: int = 100
    raster_group: int = 2
    k: int = 192
    max_chunks: int = 64

    @property
    def ranks(self) -> int:
        return self.nodes * self.world


@dataclass(frozen=True, slots=True)
class Place:
    position: int
    owner: int
    weight: int
    column: int
    row: int
    last_row: int
    out_row: int
    run: int


def library() -> ctypes.CDLL:
    return built(_SOURCE)


def take(case: Case, rank: int) -> ctypes.CDLL:
    words = (
        case.segments, case.rows, rank % case.world, case.world, rank // case.world, case.nodes, case.raster_group,
        case.k, case.max_chunks, case.group_rows,
    )  # fmt: skip
    library().set((ctypes.c_uint32 * len(words))(*words))
    return library()


def tiles_of(case: Case, rank: int, grid: int, block: int) -> list[Place]:
    room = (ctypes.c_uint32 * (8 * 4096))()
    count = take(case, rank).tiles(grid, block, room)
    return [Place(*room[8 * i : 8 * i + 8]) for i in range(count)]


CASES = [
    Case(nodes=2, world=1), Case(nodes=3, world=1, rows=1), Case(nodes=4, world=1, rows=5, segments=3),
    Case(nodes=2, world=2, rows=1000, raster_group=3), Case(nodes=2, world=4, rows=128, segments=2),
    Case(nodes=3, world=2, rows=700),
]  # fmt: skip
SHAPES = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.nodes}x{case.world}-{case.rows}")


@SHAPES
def test_every_tile_of_every_product_is_computed_once(case: Case) -> None:
    columns, row_tiles = 3 + 2, -(-case.rows // 128) * case.segments
    for rank in (0, case.ranks - 1):
        for grid in (1, 7):
            places = [place for block in range(grid) for place in tiles_of(case, rank, grid, block)]
            assert sorted(place.position for place in places) == list(range(columns * row_tiles * case.ranks))
            assert len({(one.weight, one.column, one.run, one.out_row) for one in places}) == len(places)
            for one in places:
                segment = one.row // case.rows
                assert one.row <= one.last_row < (segment + 1) * case.rows
                assert one.run == segment * case.ranks + one.owner and one.out_row == one.row - segment * case.rows


@SHAPES
def test_own_rows_then_the_node_then_node_by_node(case: Case) -> None:
    for rank in range(case.ranks):
        node = rank // case.world
        order = list(dict.fromkeys(one.owner for one in tiles_of(case, rank, 1, 0)))
        assert order[0] == rank
        steps = [(owner // case.world - node) % case.nodes for owner in order]
        assert steps == sorted(steps), "a node's shards come before those of the node after it"
        rails = [owner for owner in order if owner % case.world == rank % case.world]
        assert rails == [(node + hop) % case.nodes * case.world + rank % case.world for hop in range(case.nodes)]


def test_bands_of_a_nodes_shards_come_in_turn() -> None:
    case = Case(nodes=2, world=2, rows=1024, raster_group=2)
    owners = [one.owner for one in tiles_of(case, 0, 1, 0) if one.owner >= 2]
    band = 2 * 5
    assert owners == [2 + at // band % 2 for at in range(len(owners))]


@SHAPES
def test_chunks_have_flags_and_places_of_their_own(case: Case) -> None:
    out = (ctypes.c_uint64 * 3)()
    flags: Counter[int] = Counter()
    for epoch in (2, 3):
        covered = []
        for source in range(case.ranks):
            count = take(case, 0).chunk(epoch, source, 0, out)
            assert count == -(-case.rows * case.segments // case.group_rows)
            for number in range(count):
                library().chunk(epoch, source, number, out)
                flags[out[0]] += 1
                covered.append((out[1], out[1] + out[2]))
        shard_bytes = case.rows * case.segments * case.k * 2
        start = 4096 + (epoch % 2 << 30)
        assert covered[0][0] == start and covered[-1][1] == start + case.ranks * shard_bytes
        assert all(end == following for (_, end), (following, _) in pairwise(covered))
    assert set(flags.values()) == {1} and min(flags) >= 2 * case.nodes
    assert max(flags) < 2 * case.nodes * (1 + 4 * case.max_chunks)
