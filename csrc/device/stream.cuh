#pragma once
// Kernels for few rows: one block, each warp in its role.
//
// warps  role     does
// 0-7    compute  two math groups: tensor cores, exchange in the cluster and with the peers, stores
// 8      load     one thread: this block's k range of its tiles through the ring of stages
// 11     signal   one thread: enters the launch, meets the peers
#include "device/stream_epilogue.cuh"

namespace mk {

inline constexpr int kStreamHelperRegisters = 40;
inline constexpr int kStreamMathRegisters = 232;

/// Compute role: a tile's partials are sent at once; its sum waits until the next tile's have been sent, too.
template <class Op>
MK_DEVICE void stream_compute_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory,
                                   const StreamPlan<typename Op::Tile>& plan, int group) {
  using Tile = typename Op::Tile;
  Trace trace(args, kComputeLane + group, threadIdx.x % 128 == 0);
  StreamEpilogue<Op> epilogue{args, memory, plan, group, {args, memory}, {args, 0}};
  Ring<Tile> ring;
  Unit kept[Tile::kUnits];
  u32 kept_tile = plan.tiles;
  for (u32 tile = plan.first_tile; tile < plan.tiles; tile += plan.tile_step) {
    trace.begin();
    float sum[Tile::kUnits * 4];
    {
      float acc[Tile::kGroupN / 2];
      multiply_tile<typename Op::Element>(args, memory, ring, group, plan.last_k() - plan.first_k(), acc, trace);
      epilogue.add_up(acc, tile, sum);
    }
    trace.end(kTraceMainloop, args.rank, tile);
    trace.begin();
    if constexpr (Op::kHasBias) epilogue.add_bias(tile, sum);
    if constexpr (!Op::kReduces) {
#pragma unroll
      for (int i = 0; i < Tile::kUnits * 4; ++i) sum[i] = activate<Op::kActivation>(sum[i]);
      epilogue.store(tile, 0, epilogue.rows(tile), sum);
    } else {
      if (kept_tile == plan.tiles) {
        wait_phase(args, memory.entered(), 0, kComputeRole, trace);
        epilogue.mailbox.epoch = load_shared(memory.epoch());
        epilogue.given_up = epilogue.mailbox.epoch == 0;  // the launch must not run: it drains
      }
      Unit own[Tile::kUnits];
      epilogue.send(tile, sum, own);
      if (kept_tile != plan.tiles) epilogue.finish(kept_tile, kept);
#pragma unroll
      for (int u = 0; u < Tile::kUnits; ++u) kept[u] = own[u];
      kept_tile = tile;
    }
    trace.end(kTraceEpilogue, args.rank, tile);
  }
  if constexpr (Op::kReduces) {
    if (kept_tile != plan.tiles) epilogue.finish(kept_tile, kept);
  }
}

/// Signal role: enters the launch, and meets the peers before it ends.
template <class Op>
MK_DEVICE void stream_signal_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory) {
  const u32 epoch = enter_launch<Op::kOperator>(args);
  store_shared(memory.epoch(), epoch);
  mbarrier_arrive(memory.entered());
  RollCall<Op> roll_call(args, epoch);
  const u64 start_ns = global_timer_ns();
  while (!roll_call.finished()) {
    if (roll_call.step()) continue;
    if (load_relaxed_gpu(&workspace_header(args, args.rank)->abort) != kNoFault) break;
    const u64 waited_ns = global_timer_ns() - start_ns;
    // Later than the compute threads' waits, as in signal_role.
    if (waited_ns > args.deadline_ns + args.deadline_ns / 4) {
      report_fault<Op::kOperator>(args, kPeerTimeout, WaitSite{kEntry, roll_call.peer(), 0}, epoch, roll_call.seen(),
                                  waited_ns);
      break;
    }
    __nanosleep(32);
  }
}

/// The whole kernel.
template <class Op>
MK_DEVICE void run_stream_block(const LaunchArguments& args) {
  using Tile = typename Op::Tile;
  extern __shared__ __align__(1024) u8 dynamic_shared[];
  const SharedMemory<Tile> memory{(shared_address(dynamic_shared) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    Exchange<Tile>{args, memory}.init();
    memory.init();
  }
  if (threadIdx.x == 32) prefetch_tensor_map(&args.a[0]);
  if (threadIdx.x == 64) prefetch_tensor_map(&args.weight[0]);
  __syncwarp();
  if constexpr (Tile::kSplit > 1) {
    cluster_arrive();  // the others' barriers are ready, too, before anything is sent there
    cluster_wait();
  } else {
    __syncthreads();
  }
  const StreamPlan<Tile> plan(args);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  const bool first_lane = threadIdx.x % 32 == 0;
  if (group == kMathGroups) {
    decrease_registers<kStreamHelperRegisters>();
    if (first_lane && warp == 0) stream_load_role<Tile>(args, memory, plan);
    if constexpr (Op::kReduces) {
      if (first_lane && warp == 3) stream_signal_role<Op>(args, memory);
    }
    __syncwarp();
  } else {
    increase_registers<kStreamMathRegisters>();
    stream_compute_role<Op>(args, memory, plan, group);
  }
  if constexpr (Op::kReduces) {
    __syncthreads();
    if (threadIdx.x == 0) leave_launch(args, load_shared(memory.epoch()));
  }
}

}  // namespace mk
