#pragma once
// All-gather over nodes: which tile comes when, and where shards and their chunks lie.
// Plain integer arithmetic: the tests build it for the CPU.
//
// A shard goes by the network once to each node: to the rail peer of the node before, which passes it on to the node
// before that and to the other ranks of its own node. So a rank gets the shards of the next node first.
#include "abi/network_arguments.h"
#include "device/gather_schedule.cuh"

namespace mk {

/// Positions: own rows; those of the other ranks of this node; then node by node. The shards of a node come side by
/// side, so bands of rows are taken from all of them in turn.
struct NodeGatherSchedule : GatherSchedule {
  u32 local, nodes, node, in_node;  ///< ranks of a node, nodes; this rank's place

  template <class Tile>
  static MK_DEVICE NodeGatherSchedule make(const NetworkLaunchArguments& args, const GatherArguments& gather, u32 grid,
                                           u32 block) {
    NodeGatherSchedule s;
    static_cast<GatherSchedule&>(s) = GatherSchedule::template make<Tile>(args, gather, grid, block);
    s.local = args.world, s.nodes = args.net.nodes, s.node = args.net.node, s.in_node = args.rank;
    s.world = s.local * s.nodes;
    s.rank = s.node * s.local + s.in_node;
    return s;
  }

  /// The rank that is `hop` nodes and `step` places further on.
  MK_DEVICE u32 owner(u32 hop, u32 step) const {
    const u32 at = node + hop < nodes ? node + hop : node + hop - nodes;
    const u32 place = in_node + step < local ? in_node + step : in_node + step - local;
    return at * local + place;
  }

  template <class Tile>
  MK_DEVICE GatherPlace place(const GatherArguments& gather, u32 position) const {
    const u32 hop = position / (per_owner * local), of_hop = position - hop * per_owner * local;
    const u32 first_step = hop == 0 ? of_hop / per_owner : 0, sources = hop == 0 ? 1 : local;
    const u32 index = of_hop - first_step * per_owner;
    const u32 per_band = raster_group * tiles_n * sources, band = index / per_band, top = band * raster_group;
    const u32 height = rows - top < raster_group ? rows - top : raster_group;
    const u32 in_bands = index - band * per_band, step = in_bands / (height * tiles_n);
    const u32 in_band = in_bands - step * height * tiles_n;
    return at<Tile>(gather, owner(hop, first_step + step), top + in_band % height, in_band / height);
  }
};

/// Places and names of the chunks of all shards, equal on all ranks. A chunk is `group_rows` rows of a shard; shards lie
/// in the staging region of the epoch in the order of their ranks.
struct ShardChunks {
  u64 row_bytes, shard_bytes, region;  ///< `region`: offset from the workspace's start
  u32 rows, group_rows, chunks, local, nodes, max_chunks, parity;

  static MK_DEVICE ShardChunks make(const NetworkLaunchArguments& args, const GatherArguments& gather, u32 epoch) {
    ShardChunks s;
    s.rows = args.segments * args.segment_rows, s.group_rows = gather.group_rows;
    s.row_bytes = (u64)args.k[0] * 2, s.shard_bytes = s.rows * s.row_bytes;
    s.chunks = (s.rows + s.group_rows - 1) / s.group_rows;
    s.local = args.world, s.nodes = args.net.nodes, s.max_chunks = args.net.max_chunks;
    s.parity = epoch & 1;
    s.region = args.region_offset + s.parity * args.region_bytes;
    return s;
  }

  MK_DEVICE u64 first_byte(u32 chunk) const { return (u64)chunk * group_rows * row_bytes; }
  MK_DEVICE u64 bytes(u32 chunk) const {
    const u64 left = shard_bytes - first_byte(chunk), whole = group_rows * row_bytes;
    return left < whole ? left : whole;
  }
  /// From the start of the workspace of any rank to where the shard of rank `source` lies there.
  MK_DEVICE u64 slot(u32 source) const { return region + source * shard_bytes; }
  /// Which network flag tells of it.
  MK_DEVICE u32 flag(u32 source, u32 chunk) const {
    const u32 at = source / local, number = (source - at * local) * chunks + chunk;
    return 2 * nodes + ((parity * kNetFlagKinds + kNetPartial) * nodes + at) * max_chunks + number;
  }
};

}  // namespace mk
