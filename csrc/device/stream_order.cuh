#pragma once
// In which order the blocks of a streaming kernel take tiles. Plain integer arithmetic: the tests build it for the CPU.
#include "abi/launch_arguments.h"
#include "device/qualifiers.cuh"

namespace mk {

/// Tiles are numbered alike on all ranks: band by band, each column by column, so that blocks that run side by side
/// share weights. Positions of the order are dealt out to `step` clusters in turn.
struct StreamOrder {
  u32 tiles, first, step;
  u32 band_m, band_tiles;  ///< row tiles of a band, and its tiles
  u32 first_tile = 0;      ///< at position 0

  /// `scatters`: rows have owners. Then, if `raster_group` row tiles are one owner's rows, bands are owners, and those
  /// of the peers come first: they travel while this rank's own are multiplied. Only where that leaves every tile with
  /// the same block on all ranks, since a block may wait for no other (decision 306).
  static MK_DEVICE StreamOrder make(const LaunchArguments& args, u32 block_m, u32 block_n, bool scatters, u32 cluster,
                                    u32 clusters) {
    StreamOrder order;
    const u32 tiles_m = (args.m + block_m - 1) / block_m, tiles_n = (args.n + block_n - 1) / block_n;
    order.tiles = tiles_m * tiles_n;
    order.first = cluster;
    order.step = clusters;
    order.band_m = tiles_m;
    const bool owned = scatters && args.segments == 1 && args.raster_group * block_m == args.segment_rows;
    if (owned && args.raster_group * tiles_n % clusters == 0) {
      order.band_m = args.raster_group;
      order.first_tile = (args.rank + 1) % args.world * order.band_m * tiles_n;
    }
    order.band_tiles = order.band_m * tiles_n;
    return order;
  }
  MK_DEVICE u32 tile(u32 position) const {
    const u32 at = first_tile + position;
    return at < tiles ? at : at - tiles;
  }
  MK_DEVICE u32 row_tile(u32 tile) const { return tile / band_tiles * band_m + tile % band_m; }
  MK_DEVICE u32 column_tile(u32 tile) const { return tile % band_tiles / band_m; }
};

/// The turns of a block in a cluster of two that shares the k of its ends: of its last tile, and of the first one where
/// those between would else be no pairs. Between them each block has whole tiles. So the last partials on the link are
/// half as many, for two exchanges in the cluster instead of one a tile.
struct EndTurns {
  u32 part = 0;        ///< this block's number in its cluster
  u32 of_cluster = 0;  ///< tiles
  u32 lead = 0;        ///< shared tiles at the beginning
  u32 count = 0;       ///< turns

  static MK_DEVICE EndTurns make(const StreamOrder& order, u32 part) {
    EndTurns turns;
    turns.part = part;
    if (order.first >= order.tiles) return turns;
    turns.of_cluster = (order.tiles - 1 - order.first) / order.step + 1;
    turns.lead = turns.of_cluster % 2 == 0;
    turns.count = (turns.of_cluster - turns.lead - 1) / 2 + turns.lead + 1;
    return turns;
  }
  MK_DEVICE bool is_shared(u32 turn) const { return turn < lead || turn + 1 == count; }
  MK_DEVICE u32 position(const StreamOrder& order, u32 turn) const {
    const u32 whole = lead + 2 * (turn - lead) + part;
    return order.first + (turn < lead ? 0 : turn + 1 == count ? of_cluster - 1 : whole) * order.step;
  }
};

}  // namespace mk
