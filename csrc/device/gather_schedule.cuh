#pragma once
// All-gather: which tile of which product comes when. Plain integer arithmetic: the tests build it for the CPU.
#include "abi/gather_arguments.h"
#include "device/qualifiers.cuh"

namespace mk {

/// Where a tile lies.
struct GatherPlace {
  u32 owner;     ///< whose rows (kApart); without meaning in the other orders
  u32 weight;
  i32 column;    ///< first column of that weight's product
  u32 row;       ///< first row among the owner's (kApart) or all
  u32 last_row;  ///< last row there
  i32 out_row;   ///< first row in its run of the result
  i32 run;
  u32 row_tile;  ///< among the owner's (kApart) or all
};

/// Positions: own rows, then those of the ranks after this one, in the order in which they are sent. Blocks that push
/// take positions from `join` on, when they have finished.
struct GatherSchedule {
  u32 grid, block, blocks, join, world, rank, order, raster_group;
  u32 segment_rows, segment_tiles;
  u32 rows;       ///< row tiles of one owner
  u32 tiles_n;    ///< column tiles of all weights
  u32 per_owner;  ///< tiles

  template <class Tile>
  static MK_DEVICE GatherSchedule make(const LaunchArguments& args, const GatherArguments& gather, u32 grid,
                                       u32 block) {
    GatherSchedule s;
    s.grid = grid, s.block = block;
    s.blocks = gather.blocks, s.join = gather.join, s.order = gather.order;
    s.world = args.world, s.rank = args.rank;
    s.raster_group = args.raster_group;
    s.segment_rows = gather.order == kApart ? args.segment_rows : args.m;
    s.segment_tiles = (s.segment_rows + Tile::kBlockM - 1) / Tile::kBlockM;
    s.rows = s.segment_tiles * (gather.order == kApart ? args.segments : 1);
    s.tiles_n = 0;
    for (u32 i = 0; i < gather.weights; ++i) s.tiles_n += (gather.n[i] + Tile::kBlockN - 1) / Tile::kBlockN;
    s.per_owner = s.rows * s.tiles_n;
    return s;
  }

  MK_DEVICE u32 positions() const { return order == kApart ? per_owner * world : per_owner; }
  MK_DEVICE u32 first() const {
    const u32 position = block - blocks;
    return block >= blocks && position < join ? position : join + block;
  }
  MK_DEVICE u32 next(u32 position) const {
    if (position >= join) return position + grid;
    const u32 after = position + grid - blocks;
    return after < join ? after : join + block;
  }

  /// Bands of `raster_group` row tiles, walked column by column.
  template <class Tile>
  MK_DEVICE GatherPlace place(const GatherArguments& gather, u32 position) const {
    const u32 step = position / per_owner, index = position - step * per_owner;
    const u32 per_band = raster_group * tiles_n, band = index / per_band, top = band * raster_group;
    const u32 height = rows - top < raster_group ? rows - top : raster_group;
    const u32 in_band = index - band * per_band;
    const u32 owner = rank + step < world ? rank + step : rank + step - world;
    return at<Tile>(gather, owner, top + in_band % height, in_band / height);
  }

  /// The tile in row `tile_m` of an owner's tiles and column `tile_n` of all weights'.
  template <class Tile>
  MK_DEVICE GatherPlace at(const GatherArguments& gather, u32 owner, u32 tile_m, u32 tile_n) const {
    GatherPlace place;
    place.owner = owner, place.row_tile = tile_m;
    for (place.weight = 0; place.weight + 1 < gather.weights; ++place.weight) {
      const u32 tiles = (gather.n[place.weight] + Tile::kBlockN - 1) / Tile::kBlockN;
      if (tile_n < tiles) break;
      tile_n -= tiles;
    }
    place.column = (i32)(tile_n * Tile::kBlockN);
    const u32 segment = tile_m / segment_tiles, row = (tile_m - segment * segment_tiles) * Tile::kBlockM;
    const u32 end = row + Tile::kBlockM < segment_rows ? row + Tile::kBlockM : segment_rows;
    place.row = segment * segment_rows + row;
    place.last_row = segment * segment_rows + end - 1;
    place.out_row = (i32)row;
    place.run = order == kApart ? (i32)(segment * world + place.owner) : 0;
    return place;
  }
};

}  // namespace mk
