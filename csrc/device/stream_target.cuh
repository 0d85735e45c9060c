#pragma once
// Where results of the kernels for few rows go: rows, their owners, and the products of a launch.
#include "abi/gather_arguments.h"
#include "device/stream_shape.cuh"

namespace mk {

/// The rows of one thread in one tile: row h is 8h below the first.
struct RowPair {
  bool valid[2];
  u32 owner[2];    ///< rank that gets the row's sum; all-reduce: this rank
  u32 out_row[2];  ///< in the owner's result

  MK_DEVICE bool is_valid(u32 h) const { return h ? valid[1] : valid[0]; }
  MK_DEVICE u32 owner_of(u32 h) const { return h ? owner[1] : owner[0]; }
  MK_DEVICE u32 out_row_of(u32 h) const { return h ? out_row[1] : out_row[0]; }

  template <bool kScatters>
  static MK_DEVICE RowPair of(const LaunchArguments& args, u32 first) {
    RowPair rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 row = first + 8 * h;
      rows.valid[h] = row < args.m;
      rows.owner[h] = args.rank;
      rows.out_row[h] = row;
      if constexpr (kScatters) {
        const u32 shard = row / args.segment_rows, segment = shard / args.world;
        rows.owner[h] = shard - segment * args.world;
        rows.out_row[h] = segment * args.segment_rows + (row - shard * args.segment_rows);
      }
    }
    return rows;
  }
};

/// Where a tile's result goes: the launch's only product.
template <class Tile>
struct OnlyTarget {
  const LaunchArguments& args;
  const StreamPlan<Tile>& plan;
  const u32 tile;

  MK_DEVICE u64 out() const { return args.out_address; }
  MK_DEVICE u64 bias() const { return args.bias; }
  MK_DEVICE u32 out_stride() const { return args.out_stride; }
  MK_DEVICE u32 n() const { return args.n; }
  MK_DEVICE i32 column() const { return plan.column(tile); }
};

/// One of several products on the gathered rows, each of which begins with a tile of its own.
template <class Tile>
struct GatherTarget {
  const GatherArguments& gather;
  u32 weight = 0;
  i32 first = 0;  ///< column of the tile in its product

  MK_DEVICE GatherTarget(const GatherArguments& gather, i32 column) : gather(gather), first(column) {
    for (; weight + 1 < gather.weights; ++weight) {
      const i32 width = (gather.n[weight] + Tile::kBlockN - 1) / Tile::kBlockN * Tile::kBlockN;
      if (first < width) break;
      first -= width;
    }
  }
  MK_DEVICE u64 out() const { return gather.out_address[weight]; }
  MK_DEVICE u64 bias() const { return gather.bias[weight]; }
  MK_DEVICE u32 out_stride() const { return gather.out_stride[weight]; }
  MK_DEVICE u32 n() const { return gather.n[weight]; }
  MK_DEVICE i32 column() const { return first; }
};

}  // namespace mk
