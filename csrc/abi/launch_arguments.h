#pragma once
// The one argument of every kernel. mkcompile/runtime/abi.py mirrors it; each compilation asserts sizes and offsets.
#include "abi/workspace.h"

namespace mk {

/// A CUtensorMap: opaque to us, made by the driver.
struct alignas(64) TensorMap {
  u64 opaque[16];
};
static_assert(sizeof(TensorMap) == 128, "size of CUtensorMap");

enum OperatorId : u32 { kGemm = 0, kGemmReduceScatter = 1, kGemmAllReduce = 2, kAllGatherGemm = 3 };

/// Products that one launch can sum: sum_i a[i] @ weight[i].
inline constexpr u32 kMaxTerms = 4;

/// Shapes: a[i] is [m, k[i]], weight[i] [n, k[i]] or [k[i], n], the result [m, n]; reduce-scatter reads the m rows as
/// [segments, world, segment_rows] and returns [segments, segment_rows, n]. Strides live in the tensor maps, of which
/// those of results are three-dimensional: column, row of the segment, segment.
struct alignas(64) LaunchArguments {
  TensorMap a[kMaxTerms];
  TensorMap weight[kMaxTerms];
  TensorMap out;
  TensorMap peer_out[kMaxWorld];  ///< every rank's result, where tiles are stored straight into it; or [0] of all at once
  u64 workspace[kMaxWorld];       ///< address of every rank's workspace as seen from this device
  u64 multicast;                  ///< multicast address of the workspace, or 0
  u64 bias;                       ///< [n] elements that this rank adds to its partial, or 0
  u64 fault;                      ///< host-mapped FaultReport
  u64 deadline_ns;                ///< longest wait for a peer
  u64 region_offset;              ///< workspace base to the staging region of even epochs
  u64 region_bytes;               ///< from there to the region of odd epochs
  u64 final_offset;               ///< region base to the slots of finished tiles
  u64 out_address;                ///< this rank's result, for kernels that store it from registers
  u64 mailbox_offset;             ///< workspace base to the mailbox of even epochs; zero between launches
  u64 mailbox_bytes;              ///< for each source, of each parity
  u64 trace;                      ///< rings of abi/trace.h for all blocks, or 0
  u32 m, n;
  u32 k[kMaxTerms];
  u32 terms;
  u32 rank, world;
  u32 segments, segment_rows;
  u32 raster_group;  ///< row tiles that are walked together, column by column
  u32 lag;           ///< tiles of each peer that come before the first own tile
  u32 slots;         ///< staging slots for each source
  u32 max_tiles;     ///< words in each flag array
  u32 pace_ns;       ///< interval between the panels of a pushed tile; 0: at once
  float scale;       ///< of the sum over the ranks
  u32 out_stride;    ///< elements between rows of the result
  u32 identity;       ///< hash of all that the ranks of one launch must agree on
  u32 is_captured;    ///< launched by the replay of a graph
  u32 trace_blocks;   ///< blocks that have rings
  u32 trace_records;  ///< records in each ring
  u32 trace_launch;   ///< what records of this launch are marked with
  u32 adds;           ///< finished tiles are added to what lies in `out`: reductions of many rows, node-local, staged
};
static_assert(sizeof(LaunchArguments) % 64 == 0 && sizeof(LaunchArguments) <= 4096, "kernel parameter space");

}  // namespace mk
