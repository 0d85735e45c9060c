#pragma once
// All-gather + GEMM in one block: how images become operands, and each warp's role.
#include "device/block.cuh"
#include "device/gather_pull.cuh"

namespace mk {

/// Load role, one warp: it looks for images, its first lane loads.
template <class Op>
struct ImageLoader {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  const bool leads = threadIdx.x % 32 == 0;
  Trace trace;
  ImageArrivals<Op, 32> arrivals;
  Ring<Tile> ring;
  bool entered = false;
  bool fresh = true;  ///< no stage has been used

  MK_DEVICE ImageLoader(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), trace(args, kLoadLane, leads), arrivals(args, gather) {}

  /// Before the first flag is read.
  MK_DEVICE void enter() {
    if (entered) return;
    wait_phase(args, memory.entered(), 0, kLoadRole);
    arrivals.enter(load_shared(memory.epoch()));
    entered = true;
  }

  MK_DEVICE void load_weight(int stage, u32 bytes_a, const GatherPlace& place, i32 k) const {
    mbarrier_arrive_expect(memory.stage_full(stage), bytes_a + Tile::kBytesB);
    load_weight_block(args, memory, stage, place.weight, k, place.column);
  }
  MK_DEVICE void note(int stage, const GatherPlace& place) const {
    store_shared(memory.tile_note(stage), place.weight);
    store_shared(memory.tile_note(stage) + 4, place.column);
  }

  /// The rows of `source` times their part of the weight, which begins at `weight_k`. `own`: rows are read in place.
  MK_DEVICE void load(const GatherPlace& place, u32 source, bool own, i32 weight_k, bool first) {
    const u32 blocks = arrivals.images.k_blocks(), rows = place.last_row - place.row + 1;
    const bool images = !own && gather.pushes != kEngineCopies;
    const u32 bytes_a = images ? rows * kBlockK * 2 : Tile::kBytesA;
    const TensorMap* map = own ? &args.a[0] : &gather.arena[0];
    const i32 row = place.row + (own ? 0 : arrivals.images.slot(args.rank, source) * arrivals.images.shard_rows());
    u32 ahead = 0, ready = own ? blocks : 0;
    if (fresh && !own) {  // weights can be on their way before the rows are here
      ahead = blocks < (u32)Tile::kStages ? blocks : (u32)Tile::kStages;
      if (leads) {
        note(0, place);
        for (u32 i = 0; i < ahead; ++i) load_weight(i, bytes_a, place, weight_k + i * kBlockK);
      }
    }
    fresh = false;
    const u8* image = nullptr;
    if (!own) {
      enter();
      image = arrivals.images.image(args.rank, source, place.row_tile, 0);
    }
    for (u32 i = 0; i < blocks;) {
      if (i == ready) {
        const u64 since_ns = trace.now();
        ready += arrivals.await_tile(source, place.row_tile, place.row, place.last_row, i, blocks - i);
        trace.waited(since_ns);
      }
      if (!leads) i = ready;
      for (; i < ready; ++i) {
        if (i >= ahead) {
          wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
          if (first && i == 0) note(ring.stage, place);
          load_weight(ring.stage, bytes_a, place, weight_k + i * kBlockK);
        }
        const u32 full = memory.stage_full(ring.stage);
        if (images) {
          bulk_load(memory.a(ring.stage), image + (u64)i * Tile::kImageBytes, bytes_a, full);
        } else {
          tensor_load(memory.a(ring.stage), map, full, i * kBlockK, row);
        }
        ring.advance();
      }
    }
  }

  MK_DEVICE void run(const GatherSchedule& schedule) {
    for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
      const GatherPlace place = schedule.template place<Tile>(gather, position);
      trace.begin();
      const bool columns = schedule.order == kColumns;
      for (u32 step = 0; step < (columns ? args.world : 1); ++step) {
        const u32 next = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
        const u32 source = columns ? next : place.owner;
        const bool own = source == args.rank && schedule.order != kTogether;
        load(place, source, own, columns ? source * args.k[0] : 0, step == 0);
      }
      trace.end(kTraceLoad, place.owner, position);
    }
    if (leads) load_end<Tile>(args, memory, ring);
  }
};

/// One thread of each block: the epoch of the launch, for all of its threads.
template <class Op>
MK_DEVICE u32 enter_gather(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory) {
  const u32 epoch = enter_launch<Op::kOperator>(args);
  store_shared(memory.epoch(), epoch);
  mbarrier_arrive(memory.entered());
  return epoch;
}

/// Carry role: enters the launch, moves images, and does not let the launch end before every peer has entered it.
template <class Op, class Mover>
MK_DEVICE void carry_role(const LaunchArguments& args, const GatherArguments& gather,
                          const SharedMemory<typename Op::Tile>& memory) {
  Mover carrier(args, gather, memory);
  const u32 epoch = enter_gather<Op>(args, memory);
  RollCall<Op> roll(args, epoch);
  carrier.run(epoch);
  while (!roll.finished()) {
    const u32 peer = roll.peer();
    roll.trace.begin();
    if (!meet_peer<Op::kOperator>(args, epoch, WaitSite{kEntry, peer, 0})) return;
    roll.step();
  }
  if (gather.pushes == kEngineCopies && blockIdx.x == 0 && epoch != 0) {
    const Images<Op> images{args, gather, epoch};
    // pairs-with: sending acquire (gate_role -> signal_role), scope sys
    wait_until<Op::kOperator>(args, images.flag(args.rank, args.rank, 0), epoch, WaitSite{kSignalRole, args.rank, 0});
  }
}

/// The whole kernel.
template <class Op>
MK_DEVICE void run_image_block(const LaunchArguments& args, const GatherArguments& gather) {
  using Tile = typename Op::Tile;
  const auto memory = shared_memory<Tile>();
  Trace trace(args, kComputeLane, threadIdx.x == 0);
  trace.begin();
  if (threadIdx.x == 0) {
    mbarrier_init(memory.base + Tile::kSlotBarrierOffset, 1);
    memory.init();
  }
  __syncthreads();

  const auto schedule = GatherSchedule::template make<Tile>(args, gather, gridDim.x, blockIdx.x);
  const auto [group, warp, first_lane] = ThreadPlace{};
  if (group == kMathGroups) {
    decrease_registers<kHelperRegisters>();
    if (warp == 0) ImageLoader<Op>(args, gather, memory).run(schedule);
    if constexpr (Op::kPulls) {
      if (first_lane && warp == 1) Layer<Op>(args, gather, memory).run();
    }
    if (first_lane && (warp == 1 || warp == 2)) gather_store_role<Op>(args, gather, memory, schedule, warp - 1);
    if constexpr (Op::kPulls) {
      if (first_lane && warp == 3) carry_role<Op, Puller<Op>>(args, gather, memory);
    } else {
      if (first_lane && warp == 3) carry_role<Op, Carrier<Op>>(args, gather, memory);
    }
    __syncwarp();
  } else {
    increase_registers<kMathRegisters>();
    gather_compute_role<Op>(args, gather, memory, group);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (gather.pushes == kEngineCopies) audit_transfers<Op::kOperator>(args, load_shared(memory.epoch()));
    leave_launch(args, load_shared(memory.epoch()));
  }
  if constexpr (kTrace) trace.end(kTraceBlock, args.rank, load_shared(memory.epoch()));
}

}  // namespace mk
