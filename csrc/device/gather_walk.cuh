#pragma once
// All-gather: which images of a shard there are, and when each is sent. Plain integer arithmetic: the tests build it
// for the CPU.
//
// An image is a box of a shard as it lies in shared memory: the rows of one row tile, 64 k.
#include "abi/gather_arguments.h"
#include "device/qualifiers.cuh"

namespace mk {

inline constexpr u32 kImageK = 64;  ///< kBlockK

/// One image on its way to, or from, the rank `step` before, or after, this one.
struct Image {
  u32 step;
  u32 row_tile;  ///< among the shard's (kTogether: among those of all rows)
  u32 k_block;
  i32 row;       ///< of the shard, where the box begins; negative where other ranks' rows come before it (kTogether)
  u32 first;     ///< rows of the box that are the shard's: the first one,
  u32 rows;      ///< and how many
  u32 run, run_row;  ///< where the box begins in the gathered tensor
};

/// Images in the order in which the tiles of the others need them: bands of row tiles, k-block by k-block, so that all
/// tiles of a wave begin at once.
struct ImageWalk {
  u32 order, world, band, k_blocks, tile_rows;
  u32 split;          ///< blocks that share the k of a tile: each has its first k-blocks early
  u32 begin;          ///< kTogether: first row of this shard among all
  u32 shard_rows;
  u32 segment_rows, segment_tiles;
  u32 first_tile, tiles;
  u32 images;         ///< of one shard

  /// Those of rank `source`'s shard; or with `whole` those of all rows together.
  template <class Tile>
  static MK_DEVICE ImageWalk make(const LaunchArguments& args, const GatherArguments& gather, u32 source,
                                  bool whole = false) {
    ImageWalk walk;
    walk.order = gather.order, walk.world = args.world, walk.band = gather.band;
    walk.k_blocks = (args.k[0] + kImageK - 1) / kImageK;
    walk.tile_rows = Tile::kBlockM;
    walk.split = walk.k_blocks % Tile::kSplit == 0 ? Tile::kSplit : 1;
    walk.shard_rows = gather.order == kColumns || whole ? args.m : args.segments * args.segment_rows;
    walk.segment_rows = gather.order == kApart ? args.segment_rows : walk.shard_rows;
    walk.segment_tiles = (walk.segment_rows + Tile::kBlockM - 1) / Tile::kBlockM;
    walk.begin = gather.order == kTogether && !whole ? source * walk.shard_rows : 0;
    walk.first_tile = walk.begin / Tile::kBlockM;
    walk.tiles = gather.order == kApart
                     ? args.segments * walk.segment_tiles
                     : (walk.begin + walk.shard_rows - 1) / Tile::kBlockM - walk.first_tile + 1;
    walk.images = walk.tiles * walk.k_blocks;
    return walk;
  }

  /// Number `at` of the images of all steps, the first of which is `first_step`. `source`: whose shard it is.
  MK_DEVICE Image image(u32 at, u32 first_step, u32 source) const {
    Image image;
    const u32 step = at / images, index = at - step * images;
    const u32 per_band = band * k_blocks, number = index / per_band, top = number * band;
    const u32 height = tiles - top < band ? tiles - top : band;
    const u32 in_band = index - number * per_band;
    image.step = first_step + step;
    const u32 turn = in_band / height;
    image.k_block = split == 1 ? turn : turn % split * (k_blocks / split) + turn / split;
    const u32 tile = top + in_band - turn * height;
    const u32 segment = order == kApart ? tile / segment_tiles : 0;
    image.row_tile = first_tile + tile;
    const u32 row = (image.row_tile - segment * segment_tiles) * tile_rows;  // in its run
    image.row = (i32)(segment * segment_rows + row - begin);
    image.first = row < begin ? begin - row : 0;
    const u32 end = begin + segment_rows;
    image.rows = (row + tile_rows < end ? row + tile_rows : end) - row - image.first;
    image.run = order == kApart ? segment * world + source : order == kColumns ? source : 0;
    image.run_row = row;
    return image;
  }
};

/// Which numbers of a walk a block of a grid sends: runs of `length`, one from each block in turn.
struct ImageRuns {
  u32 grid, length;

  MK_DEVICE u32 first(u32 block) const { return block * length; }
  /// From one number of a block to its next, where they are apart.
  MK_DEVICE u32 stride() const { return length == 1 ? grid : 1; }
  /// Of its run.
  MK_DEVICE u32 place(u32 at) const { return length == 1 ? 0 : at % length; }
  /// After number `at`, of which `count` have been sent together (more than one only of runs of one).
  MK_DEVICE u32 after(u32 at, u32 count) const {
    if (length == 1) return at + count * grid;
    return place(at) + 1 < length ? at + 1 : at + 1 + (grid - 1) * length;
  }
};

}  // namespace mk
