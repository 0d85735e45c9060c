#pragma once
// All-gather + GEMMs over several nodes: the blocks that compute. What moves shards is a kernel beside this one
// (gather_mover.cuh).
//
// role     waits for                    signals              touches
// arrival  net_shard, node_shard        arrived counts       flags
// load     empty stages, arrived counts full stages          the shard or the staging region, weight
// compute  full stages, empty panels    empty stages, full   bias
//                                       panels
// store    full panels                  empty panels         out
//
// The launch must not end before the mover has read its epoch; the stream's next launch comes after both.
#include "device/block.cuh"
#include "device/gather.cuh"
#include "device/network/gather_schedule.cuh"
#include "device/network/ring.cuh"

namespace mk {

template <class Tile_, class Element_, bool kHasBias_>
struct NetworkAllGatherGemm {
  using Tile = Tile_;
  using Element = Element_;
  static constexpr OperatorId kOperator = kAllGatherGemm;
  static constexpr bool kReduces = false, kHasBias = kHasBias_, kPulls = false;
  static constexpr Activation kActivation = Activation::kNone;
};

/// The flag of a chunk as one rank of this node sees it.
MK_DEVICE u32* shard_flag(const LaunchArguments& args, const ShardChunks& shards, u32 at, u32 source, u32 chunk) {
  return reinterpret_cast<u32*>(args.workspace[at] + network_of(args).flags_offset) + shards.flag(source, chunk);
}

/// One warp: the chunks in which the rows lie that the load role reads next are here. Chunks come in any order.
template <class Op>
struct ChunkArrivals {
  const LaunchArguments& args;
  const ShardChunks shards;
  const u32 epoch;
  u32 source = ~0u, first = 0, last = 0;  ///< known to be here
  u32 met = 0;                            ///< bit set of this node's ranks
  bool given_up;

  MK_DEVICE ChunkArrivals(const NetworkLaunchArguments& args, const GatherArguments& gather, u32 epoch)
      : args(args), shards(ShardChunks::make(args, gather, epoch)), epoch(epoch), given_up(epoch == 0) {}

  MK_DEVICE void need(const GatherPlace& place) {
    const u32 begin = place.row / shards.group_rows, end = place.last_row / shards.group_rows;
    if (given_up || (source == place.owner && begin >= first && end <= last)) return;
    const u32 at = place.owner / shards.local, number = place.owner - at * shards.local;
    if (at == network_of(args).node && !(met >> number & 1)) {
      given_up = !__all_sync(~0u, meet_peer<Op::kOperator>(args, epoch, WaitSite{kLoadRole, number, begin}));
      met |= 1u << number;
      if (given_up) return;
    }
    bool came = true;
    for (u32 chunk = begin + threadIdx.x % 32; chunk <= end && came; chunk += 32) {
      const WaitSite site{at == network_of(args).node ? kLoadRole : kNetReceiveRole,
                          at == network_of(args).node ? number : at, chunk};
      // pairs-with: net_shard acquire (proxy -> arrival_role), scope sys
      // pairs-with: node_shard acquire (mover_role -> arrival_role), scope sys
      came = wait_network<Op::kOperator>(args, shard_flag(args, shards, args.rank, place.owner, chunk), epoch, site);
    }
    given_up = !__all_sync(~0u, came);
    source = place.owner, first = begin, last = end;
    fence_proxy_async();  // flags were read by generic loads, the rows are read by bulk copies
  }
};

/// Arrival role, one warp, a tile ahead of the loads.
template <class Op>
MK_DEVICE void network_arrival_role(const NetworkLaunchArguments& args, const GatherArguments& gather,
                                    const SharedMemory<typename Op::Tile>& memory, const NodeGatherSchedule& schedule,
                                    u32 epoch) {
  ChunkArrivals<Op> arrivals(args, gather, epoch);
  const bool leads = threadIdx.x % 32 == 0;
  Trace trace(args, kSignalLane, leads);
  u32 told = 0;
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<typename Op::Tile>(gather, position);
    if (place.owner == schedule.rank) continue;
    trace.begin();
    arrivals.need(place);
    trace.end_wait(kTraceReceive, place.owner, position);
    ++told;
    __syncwarp();  // the lanes' acquired flags come before the leader's release
    // pairs-with: arrived release (arrival_role -> load_role), scope cta
    if (leads) store_release_shared(memory.sent_count(0), told);
  }
}

/// Load role: own rows where they lie, the others from the staging region. Weights don't wait for rows.
template <class Op>
struct NodeGatherLoader {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  Trace trace;
  Ring<Tile> ring;
  u32 arrived = 0;
  bool fresh = true;  ///< no stage has been used

  MK_DEVICE NodeGatherLoader(const LaunchArguments& args, const GatherArguments& gather,
                             const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), trace(args, kLoadLane) {}

  MK_DEVICE void load_weight(int stage, u32 weight, i32 k, i32 column) const {
    const u32 full = memory.stage_full(stage);
    mbarrier_arrive_expect(full, Tile::kStageBytes);
    if constexpr (Tile::kWeightIsKn) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kBlockN / Tile::kPanelN; ++chunk) {
        tensor_load(memory.b(stage) + chunk * Tile::kPanelBytes, &args.weight[weight], full,
                    column + chunk * Tile::kPanelN, k);
      }
    } else {
      tensor_load(memory.b(stage), &args.weight[weight], full, k, column);
    }
  }
  MK_DEVICE void note(int stage, const GatherPlace& place) const {
    store_shared(memory.tile_note(stage), place.weight);
    store_shared(memory.tile_note(stage) + 4, place.column);
  }

  /// The arrival role tells of one more tile.
  MK_DEVICE void wait_rows() {
    ++arrived;
    const u64 since_ns = trace.now(), start_ns = global_timer_ns();
    // pairs-with: arrived acquire (arrival_role -> load_role), scope cta
    while (!reached(load_acquire_shared(memory.sent_count(0)), arrived)) {
      if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, kLoadRole, arrived);
    }
    trace.waited(since_ns);
  }

  MK_DEVICE void load(const GatherPlace& place, bool own, i32 row) {
    const u32 blocks = (args.k[0] + kBlockK - 1) / kBlockK;
    const TensorMap* map = &args.a[0];
    u32 ahead = 0;
    if (!own) {
      if (fresh) {
        ahead = blocks < (u32)Tile::kStages ? blocks : (u32)Tile::kStages;
        note(0, place);
        for (u32 i = 0; i < ahead; ++i) load_weight(i, place.weight, i * kBlockK, place.column);
      }
      wait_rows();
      map = &gather.arena[load_shared(memory.epoch()) & 1];
    }
    fresh = false;
    for (u32 i = 0; i < blocks; ++i) {
      if (i >= ahead) {
        wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
        if (i == 0) note(ring.stage, place);
        load_weight(ring.stage, place.weight, i * kBlockK, place.column);
      }
      tensor_load(memory.a(ring.stage), map, memory.stage_full(ring.stage), i * kBlockK, row);
      ring.advance();
    }
  }

  MK_DEVICE void run(const NodeGatherSchedule& schedule) {
    const u32 shard_rows = args.segments * args.segment_rows;
    for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
      const GatherPlace place = schedule.template place<Tile>(gather, position);
      const bool own = place.owner == schedule.rank;
      trace.begin();
      load(place, own, own ? place.row : place.owner * shard_rows + place.row);
      trace.end(kTraceLoad, place.owner, position);
    }
    load_end<Tile>(args, memory, ring);
  }
};

/// Of flags alone.
struct NoTile {
  static constexpr int kTileBytes = 0;
};

/// Raised in this rank's own workspace once the mover has read the epoch. A rank has no other use for the word.
MK_DEVICE u32* mover_word(const LaunchArguments& args, u32 epoch) {
  return Staging<NoTile>{args, epoch}.flag(args.rank, kPartialReady, args.rank, 0);
}

/// The whole kernel.
template <class Op>
MK_DEVICE void run_network_gather_block(const NetworkLaunchArguments& args, const GatherArguments& gather) {
  using Tile = typename Op::Tile;
  const auto memory = shared_memory<Tile>();
  Trace trace(args, kComputeLane, threadIdx.x == 0);
  trace.begin();
  if (threadIdx.x == 0) memory.init();
  __syncthreads();

  const auto schedule = NodeGatherSchedule::template make<Tile>(args, gather, gridDim.x, blockIdx.x);
  const auto [group, warp, first_lane] = ThreadPlace{};
  if (group == kMathGroups) {
    decrease_registers<kHelperRegisters>();
    if (warp == 3) {
      u32 epoch = 0;
      if (first_lane) {
        epoch = enter_launch<Op::kOperator>(args);
        store_shared(memory.epoch(), epoch);
        mbarrier_arrive(memory.entered());
      }
      epoch = __shfl_sync(~0u, epoch, 0);
      network_arrival_role<Op>(args, gather, memory, schedule, epoch);
      if (first_lane && blockIdx.x == 0 && epoch != 0) {
        // pairs-with: sending acquire (gate_role -> signal_role), scope sys
        wait_until<Op::kOperator>(args, mover_word(args, epoch), epoch, WaitSite{kSignalRole, args.rank, 0});
      }
    } else if (first_lane) {
      if (warp == 0) NodeGatherLoader<Op>(args, gather, memory).run(schedule);
      if (warp == 1 || warp == 2) gather_store_role<Op>(args, gather, memory, schedule, warp - 1);
    }
    __syncwarp();
  } else {
    increase_registers<kMathRegisters>();
    gather_compute_role<Op>(args, gather, memory, group);
  }
  leave_block(args, memory, trace);
}

}  // namespace mk
