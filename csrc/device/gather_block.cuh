#pragma once
// All-gather + GEMM in one block: how images become operands, and each warp's role.
#include "device/block.cuh"
#include "device/gather_pull.cuh"
#include "device/gather_shared.cuh"

namespace mk {

/// Whose rows are multiplied in step `step` of a tile.
MK_DEVICE u32 source_of(const LaunchArguments& args, const GatherSchedule& schedule, const GatherPlace& place,
                        u32 step) {
  const u32 next = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
  return schedule.order == kColumns ? next : place.owner;
}
MK_DEVICE u32 steps_of(const LaunchArguments& args, const GatherSchedule& schedule) {
  return schedule.order == kColumns ? args.world : 1;
}
/// Own rows are read in place.
MK_DEVICE bool in_place(const LaunchArguments& args, const GatherSchedule& schedule, u32 source) {
  return source == args.rank && schedule.order != kTogether;
}

/// Arrival role, one warp, as far ahead of the loads as images have come: flags and fences take longer than a k-block.
template <class Op>
MK_DEVICE void image_arrival_role(const LaunchArguments& args, const GatherArguments& gather,
                                  const SharedMemory<typename Op::Tile>& memory, const GatherSchedule& schedule) {
  ImageArrivals<Op, 32> arrivals(args, gather);
  wait_phase(args, memory.entered(), 0, kLoadRole);
  arrivals.enter(load_shared(memory.epoch()));
  const u32 part = part_of_block<typename Op::Tile>(), first = arrivals.images.first_k(part);
  const u32 blocks = arrivals.images.first_k(part + 1) - first;
  u32 told = 0;
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<typename Op::Tile>(gather, position);
    for (u32 step = 0; step < steps_of(args, schedule); ++step) {
      const u32 source = source_of(args, schedule, place, step);
      if (in_place(args, schedule, source)) continue;
      for (u32 i = 0; i < blocks;) {
        const u32 came = arrivals.await_tile(source, place.row_tile, place.row, place.last_row, first + i, blocks - i);
        i += came;
        told += came;
        // pairs-with: arrived release (arrival_role -> load_role), scope cta
        if (threadIdx.x % 32 == 0) store_release_shared(memory.sent_count(0), told);
      }
    }
  }
}

/// Load role.
template <class Op>
struct ImageLoader {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  Trace trace;
  Images<Op> images;
  Ring<Tile> ring;
  u32 before = 0;     ///< k-blocks of images of the tiles before
  bool fresh = true;  ///< no stage has been used

  MK_DEVICE ImageLoader(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), trace(args, kLoadLane), images{args, gather, 0} {}

  MK_DEVICE void load_weight(int stage, u32 bytes_a, const GatherPlace& place, i32 k) const {
    mbarrier_arrive_expect(memory.stage_full(stage), bytes_a + Tile::kBytesB);
    load_weight_block(args, memory, stage, place.weight, k, place.column);
  }
  MK_DEVICE void note(int stage, const GatherPlace& place) const {
    store_shared(memory.tile_note(stage), place.weight);
    store_shared(memory.tile_note(stage) + 4, place.column);
  }

  /// How many of the `blocks` k-blocks of a tile have come, once there are more than `number`.
  MK_DEVICE u32 wait_images(u32 number, u32 blocks) {
    const u64 since_ns = trace.now(), start_ns = global_timer_ns();
    u32 came;
    // pairs-with: arrived acquire (arrival_role -> load_role), scope cta
    while ((came = load_acquire_shared(memory.sent_count(0)) - before, (i32)came <= (i32)number)) {
      if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, kLoadRole, number);
    }
    trace.waited(since_ns);
    return came < blocks ? came : blocks;
  }

  /// The rows of `source` times their part of the weight, which begins at `weight_k`. `own`: rows are read in place.
  MK_DEVICE void load(const GatherPlace& place, u32 source, bool own, i32 weight_k, bool first) {
    const u32 part = part_of_block<Tile>(), first_k = images.first_k(part), blocks = images.first_k(part + 1) - first_k;
    const u32 rows = place.last_row - place.row + 1;
    weight_k += first_k * kBlockK;
    const bool by_image = !own && gather.pushes != kEngineCopies;
    const u32 bytes_a = by_image ? rows * kBlockK * 2 : Tile::kBytesA;
    const TensorMap* map = own ? &args.a[0] : &gather.arena[0];
    const i32 row = place.row + (own ? 0 : images.slot(args.rank, source) * images.shard_rows());
    u32 ahead = 0, ready = own ? blocks : 0;
    if (fresh && !own) {  // weights can be on their way before the rows are here
      ahead = blocks < (u32)Tile::kStages ? blocks : (u32)Tile::kStages;
      note(0, place);
      for (u32 i = 0; i < ahead; ++i) load_weight(i, bytes_a, place, weight_k + i * kBlockK);
    }
    fresh = false;
    const u8* image = nullptr;
    if (!own) {
      wait_phase(args, memory.entered(), 0, kLoadRole);
      images.epoch = load_shared(memory.epoch());
      image = images.image(args.rank, source, place.row_tile, first_k);
    }
    for (u32 i = 0; i < blocks; ++i) {
      if (i == ready) ready = wait_images(i, blocks);
      if (i >= ahead) {
        wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
        if (first && i == 0) note(ring.stage, place);
        load_weight(ring.stage, bytes_a, place, weight_k + i * kBlockK);
      }
      const u32 full = memory.stage_full(ring.stage);
      if (by_image) {
        bulk_load(memory.a(ring.stage), image + (u64)i * Tile::kImageBytes, bytes_a, full);
      } else {
        tensor_load(memory.a(ring.stage), map, full, (first_k + i) * kBlockK, row);
      }
      ring.advance();
    }
    if (!own) before += blocks;
  }

  MK_DEVICE void run(const GatherSchedule& schedule) {
    for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
      const GatherPlace place = schedule.template place<Tile>(gather, position);
      trace.begin();
      for (u32 step = 0; step < steps_of(args, schedule); ++step) {
        const u32 source = source_of(args, schedule, place, step);
        const i32 weight_k = schedule.order == kColumns ? source * args.k[0] : 0;
        load(place, source, in_place(args, schedule, source), weight_k, step == 0);
      }
      trace.end(kTraceLoad, place.owner, position);
    }
    load_end<Tile>(args, memory, ring);
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
    for (int i = 0; i < 2; ++i) mbarrier_init(memory.base + Tile::kSlotBarrierOffset + i * 8, 1);
    memory.init();
  }
  __syncthreads();
  if constexpr (Tile::kSplit > 1) cluster_arrive();  // who sends to the other block waits for it: HalfSums::begin

  const auto schedule =
      GatherSchedule::template make<Tile>(args, gather, gridDim.x / Tile::kSplit, blockIdx.x / Tile::kSplit);
  const auto [group, warp, first_lane] = ThreadPlace{};
  if (group == kMathGroups) {
    decrease_registers<kHelperRegisters>();
    if (first_lane && warp == 0) ImageLoader<Op>(args, gather, memory).run(schedule);
    if constexpr (Op::kPulls) {
      if (first_lane && warp == 1) Layer<Op>(args, gather, memory).run();
    }
    if (first_lane && warp == 1) {
      const int stored = part_of_block<Tile>();  // both groups', or those of the one that finishes results here
      gather_store_role<Op, Tile::kPanelGroups>(args, gather, memory, schedule, stored);
    }
    if (warp == 2) image_arrival_role<Op>(args, gather, memory, schedule);
    if constexpr (Op::kPulls) {
      if (first_lane && warp == 3) carry_role<Op, Puller<Op>>(args, gather, memory);
    } else {
      if (first_lane && warp == 3) carry_role<Op, Carrier<Op>>(args, gather, memory);
    }
    __syncwarp();
  } else {
    increase_registers<kMathRegisters>();
    if constexpr (Tile::kSplit > 1) {
      shared_compute_role<Op>(args, gather, memory, schedule, group);
    } else {
      gather_compute_role<Op>(args, gather, memory, group);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (gather.pushes == kEngineCopies) audit_transfers<Op::kOperator>(args, load_shared(memory.epoch()));
    leave_launch(args, load_shared(memory.epoch()));
  }
  if constexpr (kTrace) trace.end(kTraceBlock, args.rank, load_shared(memory.epoch()));
}

}  // namespace mk
