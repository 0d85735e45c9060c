#pragma once
// Which tile comes when: the raster over an owner's tiles, and the order in which own and peers' tiles alternate.
// Plain integer arithmetic: the tests build it for the CPU and walk it.
#include "abi/launch_arguments.h"
#include "device/qualifiers.cuh"

namespace mk {

/// One tile of one owner.
struct Task {
  u32 owner;
  u32 index;        ///< among the tiles of its owner; names staging slot and flags
  bool valid;       ///< false: the owner has fewer tiles than the others; nothing to do
};

/// Where a tile lies.
struct TilePlace {
  i32 row;          ///< first row of A
  i32 column;       ///< first column of the result
  i32 out_row;      ///< first row in its segment of the result
  i32 segment;
};

/// All blocks of all ranks take the positions 0, 1, ... of one order, in rising order each: `lag` tiles of every peer,
/// then rounds of one own tile and one tile of each peer, then the last `lag` own tiles. What an own tile waits for, its
/// index at the peers, always comes earlier in the peers' orders, so the lowest unfinished position can always finish.
template <bool kScattersRows>
struct Schedule {
  u32 grid, world, rank, lag, tiles_n, raster_group;
  u32 segment_tiles;  ///< row tiles in one segment
  u32 rows;           ///< row tiles of one owner (scattered rows) or of all
  u32 tiles;          ///< tiles of one owner (scattered rows) or of all
  u32 per_owner;      ///< tiles of the owner who has most
  u32 share, extra;   ///< all-reduce: tiles of every owner, and how many owners have one more

  template <class Tile>
  static MK_DEVICE Schedule make(const LaunchArguments& args, u32 grid) {
    Schedule s;
    s.grid = grid;
    s.world = args.world;
    s.rank = args.rank;
    s.raster_group = args.raster_group;
    s.tiles_n = (args.n + Tile::kBlockN - 1) / Tile::kBlockN;
    s.segment_tiles = (args.segment_rows + Tile::kBlockM - 1) / Tile::kBlockM;
    s.rows = s.segment_tiles * args.segments;
    s.tiles = s.rows * s.tiles_n;
    s.share = s.tiles / args.world;
    s.extra = s.tiles - s.share * args.world;
    s.per_owner = kScattersRows ? s.tiles : s.share + (s.extra != 0);
    s.lag = args.lag < s.per_owner ? args.lag : s.per_owner;
    return s;
  }

  /// All-reduce: owners hold equal runs of the raster, so that any number of tiles is shared out evenly.
  MK_DEVICE u32 first_tile(u32 owner) const { return owner * share + (owner < extra ? owner : extra); }
  MK_DEVICE u32 count(u32 owner) const { return kScattersRows ? tiles : share + (owner < extra); }
  MK_DEVICE u32 positions() const { return per_owner * world; }

  /// The order. Where the grid is a multiple of the world, the slot of the own tile moves on from wave to wave, so that
  /// every block gets as many own tiles as the others.
  MK_DEVICE Task task(u32 position) const {
    const u32 head = lag * (world - 1), middle = (per_owner - lag) * world;
    u32 owner = rank, index;
    if (position < head) {
      index = position / (world - 1);
      owner = rank + 1 + position % (world - 1);
    } else if (position - head < middle) {
      const u32 at = position - head, wave = grid % world == 0 ? at / grid : 0;
      const u32 slot = (at + wave) % world;
      index = at / world + (slot == 0 ? 0 : lag);
      owner = rank + slot;
    } else {
      index = per_owner - lag + (position - head - middle);
    }
    owner = owner < world ? owner : owner - world;
    return Task{owner, index, index < count(owner)};
  }

  /// The raster: bands of `raster_group` row tiles, walked column by column, so that a wave shares operands in L2.
  template <class Tile>
  MK_DEVICE TilePlace place(const LaunchArguments& args, const Task& task) const {
    const u32 at = kScattersRows ? task.index : first_tile(task.owner) + task.index;
    const u32 per_band = raster_group * tiles_n, band = at / per_band, first = band * raster_group;
    const u32 height = rows - first < raster_group ? rows - first : raster_group;
    const u32 in_band = at - band * per_band;
    const u32 tile_m = first + in_band % height, tile_n = in_band / height;
    const u32 segment = tile_m / segment_tiles, row = (tile_m - segment * segment_tiles) * Tile::kBlockM;
    const u32 first_row = kScattersRows ? (segment * world + task.owner) * args.segment_rows : 0;
    return TilePlace{(i32)(first_row + row), (i32)(tile_n * Tile::kBlockN), (i32)row, (i32)segment};
  }
};

}  // namespace mk
