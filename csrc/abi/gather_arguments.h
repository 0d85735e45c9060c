#pragma once
// The second argument of the all-gather kernels. mkcompile/runtime/gather_abi.py mirrors it.
#include "abi/launch_arguments.h"

namespace mk {

/// Products of one gathered matrix that one launch computes.
inline constexpr u32 kMaxWeights = 4;

/// How the gathered rows lie in the workspace and come in the order of tiles.
enum GatherOrder : u32 {
  kApart = 0,     ///< shards one after the other without the own one, which is read in place; own rows first
  kTogether = 1,  ///< all rows as in the gathered tensor, own ones too: few rows, so that weights are read once
  kColumns = 2,   ///< shards are columns: every tile sums over the shards, beginning with the own one
};

/// Who moves the rows of a shard.
enum GatherMover : u32 {
  kEngineCopies = 0,  ///< the copy engine, to `landing` of every peer
  kBlocksPush = 1,    ///< blocks, into the workspaces of the peers
  kPeersRead = 2,     ///< blocks, into the own workspace, from which the peers read them
  kBlocksPull = 3,    ///< blocks, into the own workspace, from which the peers' blocks fetch them into theirs
};

/// Shapes: the shard is [segments, segment_rows, k] (of LaunchArguments; kColumns: [m, k]), the gathered tensor
/// [segments, world, segment_rows, k] (kColumns: [m, world, k]), result i [gathered rows, n[i]].
struct alignas(64) GatherArguments {
  TensorMap arena[2];          ///< the gathered rows in the workspace, by the parity of the epoch
  TensorMap out[kMaxWeights];  ///< column, row, run of rows
  TensorMap gathered;          ///< the tensor that is returned: k, row, run of rows
  u64 shard;                   ///< this rank's shard in one piece
  u64 landing;                 ///< where the copy engine writes what comes to this rank; 0: in the workspace's regions
  u64 result;                  ///< the gathered tensor that is returned, or 0
  u64 bias[kMaxWeights];       ///< of each product, or 0
  u64 out_address[kMaxWeights];  ///< of each result: kernels for few rows, which store from registers
  u32 out_stride[kMaxWeights];   ///< of its rows, in elements
  u32 n[kMaxWeights];
  u32 weights;
  u32 order;
  u32 blocks;      ///< the lowest blocks: they push and copy, then compute
  u32 pushes;      ///< GatherMover
  u32 parts;       ///< flags of each group of rows: from every block that copies, or the copy engine's slices of k;
                   ///< of images that have a pace those that one fence publishes
  u32 group_rows;  ///< rows of a shard that are flagged together
  u32 join;        ///< position from which those blocks compute too
  u32 band;        ///< row tiles whose images are sent together, k-block by k-block
};
static_assert(sizeof(LaunchArguments) + sizeof(GatherArguments) <= 32764, "kernel parameter space");

}  // namespace mk
