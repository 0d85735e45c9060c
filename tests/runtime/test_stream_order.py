"""The order of streaming kernels, from the device's own header: every tile once, the same block's on all ranks."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest

from tests.runtime.device_header import built

Order = list[tuple[int, int, int]]  # tile, its row and column in tiles, by position

_SOURCE = """
#define __device__
#define __forceinline__ inline
#include "device/stream_order.cuh"
extern "C" void walk(int scatters, unsigned world, unsigned rank, unsigned segments, unsigned segment_rows, unsigned n,
                     unsigned group, unsigned clusters, unsigned* out) {
  mk::LaunchArguments args{};
  args.world = world, args.rank = rank, args.segments = segments, args.segment_rows = segment_rows, args.n = n;
  args.m = segments * world * segment_rows, args.raster_group = group;
  const auto order = mk::StreamOrder::make(args, 128, 64, scatters, 0, clusters);
  for (unsigned at = 0; at < order.tiles; ++at) {
    const unsigned tile = order.tile(at);
    out[at * 3] = tile, out[at * 3 + 1] = order.row_tile(tile), out[at * 3 + 2] = order.column_tile(tile);
  }
}
extern "C" unsigned ends(unsigned tiles, unsigned clusters, unsigned cluster, unsigned part, unsigned* out) {
  mk::LaunchArguments args{};
  args.world = 2, args.segments = 1, args.m = 128, args.n = tiles * 64;
  const auto order = mk::StreamOrder::make(args, 128, 64, false, cluster, clusters);
  const auto turns = mk::EndTurns::make(order, part);
  for (unsigned turn = 0; turn < turns.count; ++turn) {
    out[turn * 2] = turns.position(order, turn), out[turn * 2 + 1] = turns.is_shared(turn);
  }
  return turns.count;
}
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return built(_SOURCE)


def orders(
    library: ctypes.CDLL, world: int, owned: int, columns: int, clusters: int, scatters: bool = True, group: int = 0
) -> list[Order]:
    """One order a rank, of `owned` x `columns` tiles for each owner."""
    found = []
    for rank in range(world):
        tiles = owned * world * columns
        words = (ctypes.c_uint32 * (3 * tiles))()
        library.walk(scatters, world, rank, 1, owned * 128, columns * 64, group or owned, clusters, words)
        found.append([(words[3 * at], words[3 * at + 1], words[3 * at + 2]) for at in range(tiles)])
    return found


SIZES = list(product((1, 2, 4), (1, 2, 3), (3, 8), (1, 2, 6, 8, 16)))


def test_every_rank_takes_every_tile_once_and_all_agree_where_it_lies(library: ctypes.CDLL) -> None:
    for world, owned, columns, clusters in SIZES:
        for scatters, group in product((True, False), (0, 5)):
            ranks = orders(library, world, owned, columns, clusters, scatters, group)
            places = {(row, column) for row in range(owned * world) for column in range(columns)}
            for order in ranks:
                assert {(row, column) for _, row, column in order} == places and len(order) == len(places)
                assert sorted(order) == sorted(ranks[0])


def test_a_tile_is_the_same_blocks_on_every_rank(library: ctypes.CDLL) -> None:
    for world, owned, columns, clusters in SIZES:
        blocks = [
            {tile: at % clusters for at, (tile, _, _) in enumerate(order)}
            for order in orders(library, world, owned, columns, clusters)
        ]
        assert all(one == blocks[0] for one in blocks)


def test_peers_rows_come_first_where_they_fill_whole_waves(library: ctypes.CDLL) -> None:
    turned = 0
    for world, owned, columns, clusters in SIZES:
        for rank, order in enumerate(orders(library, world, owned, columns, clusters)):
            owners = [row // owned for _, row, _ in order]
            if owned * columns % clusters == 0:
                per_owner = owned * columns
                expected = [(rank + 1 + step) % world for step in range(world) for _ in range(per_owner)]
                assert owners == expected, "own rows last"
                turned += world > 1
            else:
                assert [tile for tile, _, _ in order] == list(range(len(order)))
    assert turned > 20


def test_rows_that_have_no_owner_are_walked_column_by_column(library: ctypes.CDLL) -> None:
    order = orders(library, 2, 2, 3, 4, scatters=False)[1]
    assert [(row, column) for _, row, column in order[:5]] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


def turns_of(library: ctypes.CDLL, tiles: int, clusters: int, cluster: int, part: int) -> list[tuple[int, bool]]:
    """Position and whether the tile is shared, turn by turn."""
    words = (ctypes.c_uint32 * (2 * tiles + 2))()
    count = library.ends(tiles, clusters, cluster, part, words)
    return [(words[2 * turn], bool(words[2 * turn + 1])) for turn in range(count)]


def test_a_cluster_that_shares_its_ends_has_the_last_tile_together_and_every_other_one_once(
    library: ctypes.CDLL,
) -> None:
    for tiles, clusters in product((1, 2, 3, 4, 5, 8, 9, 16, 31), (1, 2, 3, 8)):
        taken: list[int] = []
        for cluster in range(clusters):
            first, second = (turns_of(library, tiles, clusters, cluster, part) for part in range(2))
            mine = list(range(cluster, tiles, clusters))
            shared = [one for one in first if one[1]]
            assert shared == [one for one in second if one[1]], "the same tiles, in the same turns"
            assert [turn for turn, one in enumerate(first) if one[1]] == [
                turn for turn, one in enumerate(second) if one[1]
            ]
            assert len(first) == len(second) and len(shared) == (0 if not mine else 2 - len(mine) % 2)
            assert not mine or first[-1] == (mine[-1], True)
            assert all([at for at, _ in turns] == sorted(at for at, _ in turns) for turns in (first, second))
            taken += [at for at, _ in shared] + [at for at, is_shared in (*first, *second) if not is_shared]
        assert sorted(taken) == list(range(tiles))
