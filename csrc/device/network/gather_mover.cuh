#pragma once
// All-gather over several nodes: the kernel that moves shards, beside the one that computes.
//
// blocks     role     waits for            signals                    touches
// the first  control  entered of all       entered, commands          flags; passes chunks on to the node before
//                     net_shard
// some       own      the ring's credits   node_shard, commands       the shard; its slots on this node's ranks; result
// the rest   relay    net_shard            node_shard                 slots of rail peers' shards on this node's ranks;
//                     node_shard                                      result
//
// The blocks of a role share each chunk; the last to finish tells of it. A chunk leaves by the network from this rank's
// own slot for it: only workspaces are registered. Slots are free: the launch before the last, which used the region,
// has finished everywhere, because the last does not end before all have entered it (see NetworkRollCall). For the
// same reason what a command reads is not written before it has been sent.
#include "device/gather_engine.cuh"
#include "device/network/gather.cuh"
#include "device/network/send.cuh"

namespace mk {

struct Mover {
  using Tile = NoTile;
  static constexpr OperatorId kOperator = kAllGatherGemm;
};

/// What all roles of the mover know. `to` is shared memory: where the shard that is being copied begins at each target.
struct ShardMover {
  static constexpr u32 kUnroll = 4;
  const NetworkLaunchArguments& args;
  const GatherArguments& gather;
  const u32 epoch;
  const ShardChunks shards;
  u64* const to;
  u32 targets = 0;

  MK_DEVICE ShardMover(const NetworkLaunchArguments& args, const GatherArguments& gather, u32 epoch, u64* to)
      : args(args), gather(gather), epoch(epoch), shards(ShardChunks::make(args, gather, epoch)), to(to) {}

  MK_DEVICE u32 rank() const { return args.net.node * args.world + args.rank; }
  MK_DEVICE u32 nodes() const { return args.net.nodes; }
  MK_DEVICE u32 node_at(u32 hop) const {
    const u32 at = args.net.node + hop;
    return at < nodes() ? at : at - nodes();
  }
  MK_DEVICE u64 slot(u32 at, u32 source) const { return args.workspace[at] + shards.slot(source); }

  /// All threads: the slots of a shard on the other ranks of this node, and with `here` on this one, too.
  MK_DEVICE void aim(u32 source, bool here) {
    __syncthreads();  // nobody copies with the old ones
    targets = args.world - (here ? 0 : 1);
    if (threadIdx.x < args.world) {
      const u32 next = args.rank + threadIdx.x, peer = next < args.world ? next : next - args.world;
      if (here || threadIdx.x != 0) to[threadIdx.x - (here ? 0 : 1)] = slot(peer, source);
    }
    __syncthreads();
  }

  /// All threads: bytes of a shard at `offset`, from `base`, where the shard begins, to all targets and to `result`.
  MK_DEVICE void copy_run(u64 base, u64 offset, u64 bytes, u64 result) const {
    const uint4* from = reinterpret_cast<const uint4*>(base + offset);
    const u32 vectors = (u32)(bytes / sizeof(uint4)), stride = blockDim.x;
    for (u32 first = threadIdx.x; first < vectors; first += kUnroll * stride) {
      uint4 values[kUnroll];
#pragma unroll
      for (u32 i = 0; i < kUnroll; ++i) {
        if (first + i * stride < vectors) values[i] = from[first + i * stride];
      }
      const auto store = [&](u64 target) {
        uint4* place = reinterpret_cast<uint4*>(target);
#pragma unroll
        for (u32 i = 0; i < kUnroll; ++i) {
          if (first + i * stride < vectors) place[first + i * stride] = values[i];
        }
      };
#pragma unroll 1
      for (u32 target = 0; target < targets; ++target) store(to[target] + offset);
      if (result != 0) store(result);
    }
  }

  /// All threads of block `part` of `parts`: its share of a chunk. In the gathered tensor a shard lies in pieces.
  MK_DEVICE void copy_chunk(u64 base, u32 source, u32 chunk, u32 part, u32 parts) const {
    const u64 whole = shards.bytes(chunk), share = (whole / sizeof(uint4) + parts - 1) / parts * sizeof(uint4);
    u64 begin = part * share, end = begin + share < whole ? begin + share : whole;
    const u64 start = shards.first_byte(chunk);
    if (gather.result == 0) {
      if (begin < end) copy_run(base, start + begin, end - begin, 0);
      return;
    }
    const u64 piece_bytes = args.segment_rows * shards.row_bytes, ranks = args.world * nodes();
    for (begin += start, end += start; begin < end;) {
      const u64 piece = begin / piece_bytes, within = begin - piece * piece_bytes, rest = piece_bytes - within;
      const u64 bytes = rest < end - begin ? rest : end - begin;
      copy_run(base, begin, bytes, gather.result + (piece * ranks + source) * piece_bytes + within);
      begin += bytes;
    }
  }

  /// All threads: whether a chunk of another rank is here.
  MK_DEVICE bool came(u32 source, u32 chunk) const {
    __shared__ u32 verdict;
    if (threadIdx.x == 0) verdict = wait_chunk(source, chunk);
    __syncthreads();
    const bool here = verdict != 0;
    __syncthreads();
    return here;
  }
  MK_DEVICE bool wait_chunk(u32 source, u32 chunk) const {
    const u32 at = source / args.world;
    const bool near = at == args.net.node;
    const WaitSite site{near ? kCopyRole : kNetReceiveRole, near ? source - at * args.world : at, chunk};
    // pairs-with: net_shard acquire (proxy -> arrival_role), scope sys
    // pairs-with: node_shard acquire (mover_role -> arrival_role), scope sys
    return wait_network<kAllGatherGemm>(args, shard_flag(args, shards, args.rank, source, chunk), epoch, site);
  }

  /// One thread, of a chunk that is in this rank's slot: to the node before. False when given up.
  MK_DEVICE bool send(u32 source, u32 chunk) const {
    const u32 before = node_at(nodes() - 1);
    Command command{};
    command.source_offset = command.destination_offset = shards.slot(source) + shards.first_byte(chunk);
    command.bytes = shards.bytes(chunk);
    command.peer = rail_peer(args, before);
    command.chunk = shards.flag(source, chunk);
    command.epoch = epoch;
    return push_command<kAllGatherGemm>(args, command, WaitSite{kNetSendRole, before, chunk});
  }

  /// One thread of each block that has copied its share of a chunk: the last tells the other ranks of this node.
  MK_DEVICE bool tell(u32 source, u32 chunk, u32 parts) const {
    const u32 at = source / args.world, number = (source - at * args.world) * shards.chunks + chunk;
    // Publishes this block's share, to the last block and through it to all who hear of the chunk.
    // pairs-with: chunk_tile release (signal_role -> signal_role), scope sys
    fence_acq_rel_sys();
    if (!count_chunk(args, kNetPartial, at, number, parts)) return false;
    for (u32 peer = 0; peer < args.world; ++peer) {
      // pairs-with: node_shard release (mover_role -> arrival_role), scope sys
      // Relaxed: count_chunk fences after its last count.
      if (peer != args.rank) store_relaxed_sys(shard_flag(args, shards, peer, source, chunk), epoch);
    }
    return true;
  }
};

/// Own role: this rank's shard, to this node's ranks and, from its own slot, to the node before.
MK_DEVICE void mover_own_role(ShardMover& mover, u32 part, u32 parts) {
  mover.aim(mover.rank(), true);
  for (u32 chunk = 0; chunk < mover.shards.chunks; ++chunk) {
    mover.copy_chunk(mover.gather.shard, mover.rank(), chunk, part, parts);
    __syncthreads();  // all threads' stores come before the fence of the one that tells
    if (threadIdx.x == 0 && mover.tell(mover.rank(), chunk, parts)) mover.send(mover.rank(), chunk);
  }
}

/// Relay role: what rail peers send, to this node's other ranks; and where the gathered tensor is returned, all shards
/// into it. Those that this rank passes on come before those that others do, so no two ranks wait for each other.
MK_DEVICE void mover_relay_role(ShardMover& mover, u32 part, u32 parts) {
  const LaunchArguments& args = mover.args;
  for (u32 hop = 0; hop < mover.nodes(); ++hop) {
    for (u32 step = 0; step < args.world; ++step) {
      const u32 place = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
      const u32 source = mover.node_at(hop) * args.world + place;
      const bool is_rail = hop != 0 && step == 0;
      if ((hop == 0 && step == 0) || (!is_rail && mover.gather.result == 0)) continue;
      mover.aim(source, false);
      if (!is_rail) mover.targets = 0;
      for (u32 chunk = 0; chunk < mover.shards.chunks; ++chunk) {
        if (!mover.came(source, chunk)) return;
        mover.copy_chunk(mover.slot(args.rank, source), source, chunk, part, parts);
        __syncthreads();
        if (threadIdx.x == 0 && is_rail) mover.tell(source, chunk, parts);
      }
    }
  }
}

/// Control role, one thread: chunks of other nodes go on to the node before as they come.
MK_DEVICE void mover_forward_role(const ShardMover& mover) {
  for (u32 hop = 1; hop + 1 < mover.nodes(); ++hop) {
    const u32 source = mover.node_at(hop) * mover.args.world + mover.args.rank;
    for (u32 chunk = 0; chunk < mover.shards.chunks; ++chunk) {
      if (!mover.wait_chunk(source, chunk) || !mover.send(source, chunk)) return;
    }
  }
}

/// Control role, another thread: who has entered this very launch.
MK_DEVICE void mover_roll_call(const ShardMover& mover) {
  NetworkRollCall<Mover> roll(mover.args, mover.epoch);
  while (!roll.finished()) {
    const WaitSite site = roll.site();
    const bool here = roll.local.finished() ? meet_node<kAllGatherGemm>(mover.args, mover.epoch, site)
                                            : meet_peer<kAllGatherGemm>(mover.args, mover.epoch, site);
    if (!here) return;
    roll.step();
  }
}

/// The whole kernel; `GatherArguments::parts` blocks send the own shard.
MK_DEVICE void run_gather_mover(const NetworkLaunchArguments& args, const GatherArguments& gather) {
  __shared__ u64 targets[kMaxWorld];
  __shared__ u32 launch_epoch;
  if (threadIdx.x == 0) {
    launch_epoch = current_epoch(args);
    // Publishes: all blocks have read the epoch, the launch may end.
    if (launch_epoch != 0 && count_chunk(args, kNetFinal, 0, 0, gridDim.x)) {
      // pairs-with: sending release (gate_role -> signal_role), scope sys
      // Relaxed: count_chunk fences after its last count.
      store_relaxed_sys(mover_word(args, launch_epoch), launch_epoch);
    }
  }
  __syncthreads();
  const u32 epoch = launch_epoch, own = gather.parts;
  if (epoch == 0) return;
  ShardMover mover(args, gather, epoch, targets);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) mover_roll_call(mover);
    if (threadIdx.x == 32) mover_forward_role(mover);
  } else if (blockIdx.x <= own) {
    mover_own_role(mover, blockIdx.x - 1, own);
  } else {
    mover_relay_role(mover, blockIdx.x - 1 - own, gridDim.x - 1 - own);
  }
}

}  // namespace mk
