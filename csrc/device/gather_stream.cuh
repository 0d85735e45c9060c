#pragma once
// All-gather + GEMMs of few rows: all rows lie in one matrix in every rank's workspace, and the weights, one after the
// other, are streamed by clusters whose blocks share k.
//
// role     waits for                    signals          touches
// entry    entered                      entered          nothing
// compute  entered; full stages         rows_brought;    the shard, workspaces of all ranks; then bias, out
//                                       empty stages
// arrival  entered, rows_brought        arrived          nothing
// load     arrived, empty stages        full stages      weight; the own workspace: a thread each
//
// Shards are so small that no block waits for its share of the link: the compute threads of the first blocks copy the
// own one to all ranks while the first weights are loaded. All blocks wait for what those bring, who wait for nobody:
// once they are resident, others may come as others end (decision 306).
#include "device/gather_block.cuh"
#include "device/stream.cuh"

namespace mk {

/// As load_weight_block, into the L2 cache.
template <class Tile>
MK_DEVICE void prefetch_weight_block(const LaunchArguments& args, u32 index, i32 k, i32 column) {
  if constexpr (Tile::kWeightIsKn) {
#pragma unroll
    for (int x = 0; x < Tile::kBlockN; x += Tile::kPanelN) tensor_prefetch(&args.weight[index], column + x, k);
  } else {
    tensor_prefetch(&args.weight[index], k, column);
  }
}

/// One launch: where the rows lie, and who tells of them.
template <class Tile>
struct FewRows {
  static constexpr u32 kVectorBytes = 16;
  const LaunchArguments& args;
  const GatherArguments& gather;
  u32 epoch;

  /// Of one shard, whose rows are multiples of them.
  MK_DEVICE u32 vectors() const { return args.segment_rows * (args.k[0] / 8); }
  MK_DEVICE u32 vectors_of_part() const { return (vectors() + gather.parts - 1) / gather.parts; }
  MK_DEVICE u8* shard_at(u32 at) const {
    return Staging<Tile>{args, epoch}.region(at) + (u64)args.rank * vectors() * kVectorBytes;
  }
  MK_DEVICE u32* flag(u32 at, u32 source, u32 part) const {
    return Staging<Tile>{args, epoch}.flag(at, kPartialReady, source, part);
  }
};

/// Compute role, before its products: this block's parts of the own shard to every rank, this one included.
template <class Op>
struct RowCopy {
  using Rows = FewRows<typename Op::Tile>;
  static constexpr u32 kThreads = kMathGroups * 128, kAtOnce = 8;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<typename Op::Tile>& memory;
  Rows rows;
  bool entered = false;

  MK_DEVICE void enter() {
    if (entered) return;
    wait_phase(args, memory.entered(), 0, kCopyRole);
    rows.epoch = load_shared(memory.epoch());
    entered = true;
  }

  MK_DEVICE void copy(u32 first, u32 end) {
    Vector4 vectors[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 at = first + i * kThreads;
      if (at < end) vectors[i] = load_global_vector(reinterpret_cast<const u8*>(gather.shard) + (u64)at * 16);
    }
    enter();
    if (rows.epoch == 0) return;  // the launch must not run: nothing is sent, and it drains
#pragma unroll 1
    for (u32 step = 1; step <= args.world; ++step) {
      const u32 to = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
      u8* target = rows.shard_at(to);
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 at = first + i * kThreads;
        // Relaxed: the fence before the flag releases.
        if (at < end) store_relaxed_sys(reinterpret_cast<Vector4*>(target + (u64)at * 16), vectors[i]);
      }
    }
  }

  /// All threads have stored their vectors. Publishes: a part of the shard.
  MK_DEVICE void tell(u32 part) const {
    math_barrier();
    if (threadIdx.x != 0 || rows.epoch == 0) return;
    // pairs-with: rows_brought release (compute_role -> arrival_role), scope sys
    fence_acq_rel_sys();
    for (u32 to = 0; to < args.world; ++to) {
      // Relaxed: the fence above releases.
      store_relaxed_sys(rows.flag(to, args.rank, part), rows.epoch);
    }
  }

  MK_DEVICE void run() {
    const u32 length = rows.vectors_of_part(), all = rows.vectors();
#pragma unroll 1
    for (u32 part = blockIdx.x; part < gather.parts; part += gridDim.x) {
      const u32 first = part * length, end = first + length < all ? first + length : all;
#pragma unroll 1
      for (u32 at = first; at < end; at += kThreads * kAtOnce) copy(at + threadIdx.x, end);
      enter();
      tell(part);
    }
  }
};

/// Arrival role, one warp: all parts of all shards are here, the own ones first, or the launch has been given up. Not
/// the thread that loads: its fence would wait for the weights that are on their way.
template <class Op>
MK_DEVICE void few_rows_arrival_role(const LaunchArguments& args, const GatherArguments& gather,
                                     const SharedMemory<typename Op::Tile>& memory) {
  wait_phase(args, memory.entered(), 0, kLoadRole);
  const FewRows<typename Op::Tile> rows{args, gather, load_shared(memory.epoch())};
  bool given_up = rows.epoch == 0;
  const bool leads = threadIdx.x % 32 == 0;
  for (u32 step = 0; step < args.world && !given_up; ++step) {
    const u32 source = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
    const WaitSite site{kLoadRole, source, 0};
    Trace meeting(args, kSignalLane, leads && source != args.rank);
    meeting.begin();
    bool mine = source == args.rank || meet_peer<Op::kOperator>(args, rows.epoch, site);
    meeting.end_wait(kTraceReceive, source, kNoTile);
    for (u32 part = threadIdx.x % 32; part < gather.parts && mine; part += 32) {
      // pairs-with: rows_brought acquire (compute_role -> arrival_role), scope sys
      mine = wait_until<Op::kOperator>(args, rows.flag(args.rank, source, part), rows.epoch, site);
    }
    given_up = !__all_sync(~0u, mine);
  }
  __syncwarp();         // what the lanes have acquired comes before the release of one of them
  fence_proxy_async();  // rows were written by ordinary stores, they are read by bulk copies
  // pairs-with: arrived release (arrival_role -> load_role), scope cta
  if (leads) store_release_shared(memory.sent_count(0), 1);
}

/// Load role, one thread: this block's k-blocks of the weight, whatever becomes of the rows. What the ring has no room
/// for goes into the cache while rows are waited for and the memory is idle.
template <class Op>
MK_DEVICE void few_rows_weight_role(const LaunchArguments& args, const GatherArguments& gather,
                                    const SharedMemory<typename Op::Tile>& memory,
                                    const StreamPlan<typename Op::Tile>& plan) {
  using Tile = typename Op::Tile;
  constexpr u32 kFetchedAhead = (128 << 10) / Tile::kBytesB;  // what the memory gives a block meanwhile
  const u32 count = plan.last_k() - plan.first_k();
  Ring<Tile> ring;
  Trace trace(args, kLoadLane);
  for (u32 position = plan.first; position < plan.tiles; position += plan.step) {
    const u32 tile = plan.tile(position);
    const GatherTarget<Tile> to(gather, plan.column(tile));
    trace.begin();
    for (u32 i = 0; i < count; ++i) {
      if (position == plan.first && i == Tile::kStages) {
        const u32 end = count < Tile::kStages + kFetchedAhead ? count : Tile::kStages + kFetchedAhead;
#pragma unroll 1
        for (u32 next = i; next < end; ++next) {
          prefetch_weight_block<Tile>(args, to.weight, (plan.first_k() + next) * kBlockK, to.column());
        }
      }
      wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
      mbarrier_arrive_expect(memory.stage_full(ring.stage), plan.bytes_a + Tile::kBytesB);
      load_weight_block(args, memory, ring.stage, to.weight, (plan.first_k() + i) * kBlockK, to.column());
      ring.advance();
    }
    trace.end(kTraceLoad, args.rank, tile);
  }
}

/// Load role, another thread: the rows beside them, once all are here.
template <class Op>
MK_DEVICE void few_rows_row_role(const LaunchArguments& args, const GatherArguments& gather,
                                 const SharedMemory<typename Op::Tile>& memory,
                                 const StreamPlan<typename Op::Tile>& plan) {
  using Tile = typename Op::Tile;
  const u32 count = plan.last_k() - plan.first_k();
  Ring<Tile> ring;
  Trace trace(args, kStoreLane);
  trace.begin();
  const u64 start_ns = global_timer_ns();
  // pairs-with: arrived acquire (arrival_role -> load_role), scope cta
  while (load_acquire_shared(memory.sent_count(0)) == 0) {
    if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, kLoadRole, 0);
  }
  trace.waited(trace.start_ns);
  const TensorMap* map = &gather.arena[load_shared(memory.epoch()) & 1];
  for (u32 position = plan.first; position < plan.tiles; position += plan.step) {
    const i32 row = plan.row(plan.tile(position));
    for (u32 i = 0; i < count; ++i) {
      wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole);
      tensor_load(memory.a(ring.stage), map, memory.stage_full(ring.stage), (plan.first_k() + i) * kBlockK, row);
      ring.advance();
    }
  }
  trace.end(kTraceLoad, args.rank, 0);
}

/// Entry role: the launch does not end before every peer has entered it.
template <class Op>
MK_DEVICE void few_rows_entry_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory) {
  const u32 epoch = enter_gather<Op>(args, memory);
  RollCall<Op> roll(args, epoch);
  while (!roll.finished()) {
    roll.trace.begin();
    if (!meet_peer<Op::kOperator>(args, epoch, WaitSite{kEntry, roll.peer(), 0})) return;
    roll.step();
  }
}

/// The whole kernel.
template <class Op>
MK_DEVICE void run_stream_gather_block(const LaunchArguments& args, const GatherArguments& gather) {
  using Tile = typename Op::Tile;
  const auto memory = shared_memory<Tile>();
  Trace trace(args, kComputeLane, threadIdx.x == 0);
  init_barriers(memory);
  if (threadIdx.x == 32) prefetch_tensor_map(&args.weight[0]);
  if (threadIdx.x < 2) prefetch_tensor_map(&gather.arena[threadIdx.x]);
  if (threadIdx.x == 0) store_shared(memory.sent_count(0), 0);
  __syncthreads();
  if constexpr (Tile::kSplit > 1) cluster_arrive();  // who sends to others waits for them: Exchange::begin
  const StreamPlan<Tile> plan(args, false);
  launch_dependents();
  await_predecessors();
  trace.begin();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  if (group == kMathGroups) {
    decrease_registers<kStreamHelperRegisters>();
    if (warp == 0 && threadIdx.x % 32 == 0) few_rows_weight_role<Op>(args, gather, memory, plan);
    if (warp == 1 && threadIdx.x % 32 == 0) few_rows_row_role<Op>(args, gather, memory, plan);
    if (warp == 2) few_rows_arrival_role<Op>(args, gather, memory);
    if (warp == 3 && threadIdx.x % 32 == 0) few_rows_entry_role<Op>(args, memory);
    __syncwarp();
  } else {
    increase_registers<kStreamMathRegisters>();
    RowCopy<Op>{args, gather, memory, {args, gather, 0}}.run();
    StreamCompute<Op>(args, memory, plan, group, &gather).run();
  }
  leave_block(args, memory, trace);
}

template <class Tile_, class Element_, bool kHasBias_>
struct StreamAllGatherGemm {
  using Tile = Tile_;
  using Element = Element_;
  static constexpr OperatorId kOperator = kAllGatherGemm;
  static constexpr bool kReduces = false, kScatters = false, kHasBias = kHasBias_;
  static constexpr Activation kActivation = Activation::kNone;
};

}  // namespace mk
