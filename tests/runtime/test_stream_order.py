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
