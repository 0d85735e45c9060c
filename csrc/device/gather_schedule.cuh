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

/// What one thread of a block moves: the chunks of every group of rows that fall to the block, shard by shard in the
/// order in which the tiles need them. A turn is one group of one step; step s concerns the rank s before or after.
struct ChunkWalk {
  static constexpr u32 kChunkBytes = 16384;
  u64 shard_bytes, group_bytes;
  u32 block, blocks, world, order;
  u32 groups, first_step, turns;
  u32 turn = 0, group = 0;
  u64 offset = 0;  ///< of the chunk in the shard

  static MK_DEVICE ChunkWalk make(const LaunchArguments& args, const GatherArguments& gather, u32 first_step,
                                  u32 block) {
    ChunkWalk walk;
    const u64 row_bytes = (u64)args.k[0] * 2;
    const u32 rows = gather.order == kColumns ? args.m : args.segments * args.segment_rows;
    walk.shard_bytes = rows * row_bytes;
    walk.group_bytes = gather.group_rows * row_bytes;
    walk.block = block, walk.blocks = gather.blocks, walk.world = args.world, walk.order = gather.order;
    walk.groups = (rows + gather.group_rows - 1) / gather.group_rows;
    walk.first_step = first_step;
    walk.turns = walk.groups * (args.world - first_step);
    walk.begin_turn();
    return walk;
  }

  MK_DEVICE bool finished() const { return turn >= turns; }
  MK_DEVICE u32 step() const {
    return first_step + (order == kColumns ? turn % (world - first_step) : turn / groups);
  }
  MK_DEVICE u64 group_end() const {
    const u64 end = (group + 1) * group_bytes;
    return end < shard_bytes ? end : shard_bytes;
  }
  MK_DEVICE u32 bytes() const {
    const u64 left = group_end() - offset;
    return left < kChunkBytes ? (u32)left : kChunkBytes;
  }
  /// Chunks of the current group that fall to this block.
  MK_DEVICE u32 count() const {
    const u64 start = group * group_bytes;
    const u32 chunks = (u32)((group_end() - start + kChunkBytes - 1) / kChunkBytes);
    return chunks > block ? (chunks - block + blocks - 1) / blocks : 0;
  }
  MK_DEVICE void locate() {
    group = order == kColumns ? turn / (world - first_step) : turn % groups;
    offset = group * group_bytes + (u64)block * kChunkBytes;
  }
  /// The first chunk of the turn, or of the next one that has any.
  MK_DEVICE void begin_turn() {
    for (locate(); !finished() && offset >= group_end(); locate()) ++turn;
  }
  MK_DEVICE void advance() {
    offset += (u64)blocks * kChunkBytes;
    if (offset < group_end()) return;
    ++turn;
    begin_turn();
  }
};

}  // namespace mk
