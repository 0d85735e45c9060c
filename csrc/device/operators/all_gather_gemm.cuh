#pragma once
// All-gather + GEMMs: out[i] = gathered @ weight[i] + bias[i], for up to four weights; and the gathered tensor.
//
// blocks      role      waits for                     signals                  touches
// the lowest  push      loaded chunks                 pushed counts            the shard; arenas of the peers; result
//             signal    pushed counts                 shard_ready at peers     flags
//             copy      shard_ready                                            the own arena; result
// all         arrival   shard_ready                   arrived counts           flags
//             load      empty stages, arrived counts  full stages              the shard or the own arena, weight
//             compute   full stages, empty panels     empty stages, full       bias
//                                                     panels
//             store     full panels                   empty panels             out
//
// The shard is contiguous. The first block also calls the roll, as every launch with peers does.
#include "device/block.cuh"
#include "device/gather_push.cuh"

namespace mk {

template <class Tile_, class Element_, bool kHasBias_>
struct AllGatherGemm {
  using Tile = Tile_;
  using Element = Element_;
  static constexpr OperatorId kOperator = kAllGatherGemm;
  static constexpr bool kReduces = false, kHasBias = kHasBias_;
  static constexpr Activation kActivation = Activation::kNone;
};

/// One thread of each block: the epoch of the launch, for all of its threads.
template <class Op>
MK_DEVICE u32 enter_gather(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory) {
  const u32 epoch = enter_launch<Op::kOperator>(args);
  store_shared(memory.epoch(), epoch);
  mbarrier_arrive(memory.entered());
  return epoch;
}

/// One thread of each helper warp: the rings are empty, their memory is for stages and panels now.
template <class Op>
MK_DEVICE void end_moving(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory) {
  const u32 moved = memory.base + Op::Tile::kMovedOffset;
  mbarrier_arrive(moved);
  wait_phase(args, moved, 0, kCopyRole);
}

/// The launch must not end before every peer has entered it.
template <class Op>
MK_DEVICE void finish_roll_call(const LaunchArguments& args, RollCall<Op>& roll) {
  while (!roll.finished()) {
    const u32 peer = roll.peer();
    if (!meet_peer<Op::kOperator>(args, roll.epoch, WaitSite{kEntry, peer, 0})) return;
    roll.step();
  }
}

/// The whole kernel.
template <class Op>
MK_DEVICE void run_gather_block(const LaunchArguments& args, const GatherArguments& gather) {
  using Tile = typename Op::Tile;
  extern __shared__ __align__(1024) u8 dynamic_shared[];
  const SharedMemory<Tile> memory{(shared_address(dynamic_shared) + 1023) & ~1023u};
  Trace trace(args, kComputeLane, threadIdx.x == 0);
  trace.begin();
  if (threadIdx.x == 0) {
    for (u32 slot = 0; slot < Tile::kRingSlots; ++slot) {
      mbarrier_init(memory.base + Tile::kRingBarrierOffset + slot * 8, 1);
    }
    mbarrier_init(memory.base + Tile::kMovedOffset, 4);
    memory.init();
  }
  __syncthreads();

  const auto schedule = GatherSchedule::template make<Tile>(args, gather, gridDim.x, blockIdx.x);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  const bool first_lane = threadIdx.x % 32 == 0;
  if (group == kMathGroups) {
    decrease_registers<kHelperRegisters>();
    if (warp == 3) {
      u32 epoch = first_lane ? enter_gather<Op>(args, memory) : 0;
      epoch = __shfl_sync(~0u, epoch, 0);
      const Gathering<Tile> launch{args, gather, epoch};
      RollCall<Op> roll(args, first_lane ? epoch : 0);
      if (first_lane && blockIdx.x < gather.blocks) {
        if (gather.pushes && epoch != 0) push_signal_role<Op>(launch, memory);
        end_moving<Op>(args, memory);
      }
      __syncwarp();
      arrival_role<Op>(launch, memory, schedule);
      if (first_lane) {
        finish_roll_call<Op>(args, roll);
        if (!gather.pushes && blockIdx.x == 0) wait_for_gate<Op>(launch);
      }
    } else if (first_lane) {
      if (blockIdx.x < gather.blocks) {
        wait_phase(args, memory.entered(), 0, kCopyRole);
        const Gathering<Tile> launch{args, gather, load_shared(memory.epoch())};
        if (warp == 0 && gather.pushes && launch.epoch != 0) {
          if (gather.result != 0) {
            push_role<Op, Tile::kPushSlots>(launch, memory);
          } else {
            push_role<Op, Tile::kRingSlots>(launch, memory);
          }
        }
        if (warp == 1 && gather.result != 0 && launch.epoch != 0) gather_copy_role<Op>(launch, memory);
        end_moving<Op>(args, memory);
      }
      if (warp == 0) gather_load_role<Op>(args, gather, memory, schedule);
      if (warp == 1 || warp == 2) gather_store_role<Op>(args, gather, memory, schedule, warp - 1);
    }
    __syncwarp();
  } else {
    increase_registers<kMathRegisters>();
    gather_compute_role<Op>(args, gather, memory, group);
  }
  __syncthreads();
  if (threadIdx.x == 0) leave_launch(args, load_shared(memory.epoch()));
  if constexpr (kTrace) trace.end(kTraceBlock, args.rank, load_shared(memory.epoch()));
}

}  // namespace mk
