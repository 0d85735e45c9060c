#pragma once
// Kernels for few rows: one block, each warp in its role.
//
// warps  role     does
// 0-7    compute  two math groups: tensor cores, exchange in the cluster and with the peers, stores
// 8      load     one thread: this block's k range of its tiles through the ring of stages
// 9, 10  store    partials that the math groups have handed over, to the peers
// 11     signal   one thread: enters the launch, meets the peers
#include "device/frame.cuh"
#include "device/stream_ends.cuh"
#include "device/stream_load.cuh"

namespace mk {

inline constexpr int kStreamHelperRegisters = 56;
inline constexpr int kStreamMathRegisters = 224;

/// Compute role: a tile's partials are sent at once. Its sum waits for the peers: while the other group multiplies, or
/// until the next tile's partials have been sent, too.
template <class Op>
struct StreamCompute {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const StreamPlan<Tile>& plan;
  const int group;
  StreamEpilogue<Op> epilogue;
  Trace trace;
  Ring<Tile> ring{};
  bool entered = false;
  u32 handed = 0;  ///< tiles

  MK_DEVICE StreamCompute(const LaunchArguments& args, const SharedMemory<Tile>& memory, const StreamPlan<Tile>& plan,
                          int group, const GatherArguments* gather = nullptr)
      : args(args), memory(memory), plan(plan), group(group),
        epilogue{args, memory, plan, group, {args, memory}, {args, 0}, gather},
        trace(args, kComputeLane + group, threadIdx.x % 128 == 0) {}

  /// This group's part of a tile that both share. `in_order`: see Turns; what it delays the second group by is less
  /// than the first one's partials take on the link where tiles have many rows.
  MK_DEVICE void multiply_shared(bool in_order, float (&acc)[Tile::kGroupN / 2]) {
    const Turns<Tile> turns{args, memory};
    const u32 k_blocks = plan.last_k() - plan.first_k(), most = in_order ? Tile::kStages : 0;
    const u32 at_end = most < k_blocks ? most : k_blocks;
#pragma unroll
    for (int i = 0; i < Tile::kGroupN / 2; ++i) acc[i] = 0.f;
#pragma unroll 1
    for (u32 left = k_blocks; left != 0;) {
      if (left == at_end && group == 1) turns.await_first(trace);
      const u32 blocks = left > at_end ? left - at_end : left;
      multiply_blocks<typename Op::Element>(args, memory, ring, group, blocks, acc, trace);
      left -= blocks;
    }
    if (in_order && group == 0) mbarrier_arrive(turns.taken(0));
  }

  /// `reused`: the buffers of the exchange in the cluster will be written again. `last`: of this block.
  MK_DEVICE void product(u32 tile, bool reused, bool last, typename StreamEpilogue<Op>::Sums& sum) {
    const u32 k_blocks = plan.last_k() - plan.first_k();
    float acc[Tile::kMine][Tile::kGroupN / 2];
    if constexpr (Tile::kPingPong) {
      const Turns<Tile> turns{args, memory};
      turns.await_turn(epilogue.exchange.turn, trace);
      multiply_slabs<typename Op::Element>(args, memory, ring, k_blocks, turns.taken(group), acc, trace);
    } else if constexpr (Op::kReduces && Tile::kBlockM > 64) {
      multiply_shared(last && (!Op::kScatters || !plan.has_own(args, tile)), acc[0]);  // all of it is sent
    } else {
      multiply_tile<typename Op::Element>(args, memory, ring, group, k_blocks, acc[0], trace);
    }
    epilogue.add_up(acc, epilogue.exchange.turn < (Tile::kPingPong ? kMathGroups : 1), reused, sum);
    if constexpr (Op::kHasBias) {
#pragma unroll
      for (int m = 0; m < Tile::kMine; ++m) epilogue.add_bias(tile, epilogue.slab(m), sum[m]);
    }
  }

  MK_DEVICE void keep(u32 tile, typename StreamEpilogue<Op>::Sums& sum) const {
#pragma unroll
    for (int m = 0; m < Tile::kMine; ++m) {
#pragma unroll
      for (int i = 0; i < Tile::kUnits * 4; ++i) sum[m][i] = activate<Op::kActivation>(sum[m][i]);
      epilogue.store(tile, epilogue.slab(m), 0, epilogue.rows(tile, epilogue.slab(m)), sum[m]);
    }
  }

  MK_DEVICE void enter() {  // before the first partial is sent
    if (entered) return;
    wait_phase(args, memory.entered(), 0, kComputeRole, trace);
    epilogue.mailbox.epoch = load_shared(memory.epoch());
    epilogue.given_up = epilogue.mailbox.epoch == 0;  // the launch must not run: it drains
    entered = true;
  }

  /// To the peers, by others but for this block's `last` tile, after which there are no loads to protect.
  MK_DEVICE void pass_on(u32 tile, const typename StreamEpilogue<Op>::Partials& own, bool last) {
    if (Op::kScatters && !plan.has_peers(args, tile)) return;
    if constexpr (Tile::kHandsOver) {
      if (!last) {
        epilogue.hand_over(handed++, own, trace);
        return;
      }
    }
    epilogue.send(tile, own, Tile::kPingPong && args.pace_ns != 0 && !last);
  }

  MK_DEVICE void finish(u32 tile, const typename StreamEpilogue<Op>::Partials& own) {
    if (!Op::kScatters || plan.has_own(args, tile)) epilogue.finish(tile, own);
  }

  MK_DEVICE void run() {
    typename StreamEpilogue<Op>::Partials kept;
    u32 turn = 0, kept_tile = plan.tiles;
    for (u32 position = plan.first; position < plan.tiles; position += plan.step, ++turn) {
      if (Tile::kPingPong && turn % 2 != group) {
        ring.skip(plan.last_k() - plan.first_k());
        continue;
      }
      trace.begin();
      epilogue.exchange.turn = turn;
      const u32 tile = plan.tile(position);
      typename StreamEpilogue<Op>::Sums sum;
      const bool last = position + plan.step >= plan.tiles;
      product(tile, position + Tile::kBuffers * plan.step < plan.tiles, last, sum);
      trace.end(kTraceMainloop, args.rank, tile);
      trace.begin();
      if constexpr (!Op::kReduces) {
        keep(tile, sum);
      } else {
        enter();
        typename StreamEpilogue<Op>::Partials own;
        epilogue.round(sum, own);
        pass_on(tile, own, last);
        if constexpr (Tile::kPingPong) {
          finish(tile, own);
        } else {
          if (kept_tile != plan.tiles) finish(kept_tile, kept);
#pragma unroll
          for (int u = 0; u < Tile::kUnits; ++u) kept[0][u] = own[0][u];
          kept_tile = tile;
        }
      }
      trace.end(kTraceEpilogue, args.rank, tile);
    }
    if constexpr (Op::kReduces && !Tile::kPingPong) {
      if (kept_tile != plan.tiles) finish(kept_tile, kept);
    }
  }
};

/// Sends what the math groups hand over: see `StreamCompute::pass_on`.
template <class Op>
MK_DEVICE void stream_send_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory,
                                const StreamPlan<typename Op::Tile>& plan, u32 warp) {
  using Tile = typename Op::Tile;
  const HandOver<Tile> handed{args, memory};
  const u32 lane = threadIdx.x % 32, thread = (warp * 32 + lane) * 2;  // of two math threads, whose rows are the same
  Trace trace(args, kStoreLane + warp, lane == 0);
  wait_phase(args, memory.entered(), 0, kStoreRole);
  const Mailbox<Tile> mailbox{args, load_shared(memory.epoch())};
  u64 due_ns = 0;
#pragma unroll 1
  for (u32 position = plan.first, turn = 0; position + plan.step < plan.tiles; position += plan.step) {
    const u32 tile = plan.tile(position);
    if (Op::kScatters && !plan.has_peers(args, tile)) continue;
    handed.await_full(turn);
    trace.begin();
    if (global_timer_ns() > due_ns) due_ns = global_timer_ns();
#pragma unroll 1
    for (u32 step = 1; step < args.world && mailbox.epoch != 0; ++step) {
      const u32 peer = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
#pragma unroll 1
      for (u32 slab = 0; slab < Tile::kSlabs; ++slab) {
        const u32 in_tile = (Tile::kSlabsAreRows ? slab * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
        const RowPair rows = RowPair::of<Op::kScatters>(args, plan.row(tile) + in_tile);
        u8* to = mailbox.slot(peer, args.rank) + mailbox.offset_of(tile, slab, thread);
#pragma unroll 1
        for (u32 u = 0; u < Tile::kUnitsOfSlab; ++u) {
          if (!rows.is_valid(u % 2) || (Op::kScatters && rows.owner_of(u % 2) != peer)) continue;
          while (global_timer_ns() < due_ns) __nanosleep(32);
          due_ns += args.pace_ns;
          // Relaxed: each word is data and flag in one.
          store_relaxed_sys(reinterpret_cast<Vector4*>(to + u * Mailbox<Tile>::kUnitBytes),
                            load_shared_vector(handed.at(turn, slab, u, thread)));
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(handed.free(turn));
    ++turn;
    trace.end(kTracePush, args.rank, tile);
  }
}

/// How a launch of reductions ends: all blocks but the first are counted out when they have entered, and the first,
/// which stays until its last sums, sets the counts back. So no block waits at its end for a count to come back; and a
/// launch that waits for a peer is in the way of any other on its workspace, which is noticed.
struct StreamExit {
  const LaunchArguments& args;
  WorkspaceHeader* const header = workspace_header(args, args.rank);

  MK_DEVICE void count_out() const {
    // pairs-with: counted_out release (signal_role -> signal_role), scope sys
    fence_acq_rel_sys();
    add_relaxed_gpu(&header->blocks_out, 1);
  }
  /// The first block. The others enter in their turn, whatever waits for a peer; counts of an aborted workspace, on
  /// which launches may have met, mean nothing. Blocks that find no room within the limit are this rank's own fault;
  /// the launch drains then, as one that a peer has left.
  template <OperatorId kOperator>
  MK_DEVICE void await_others() const {
    const u64 start_ns = global_timer_ns();
    while (true) {
      // pairs-with: counted_out acquire (signal_role -> signal_role), scope sys
      const u32 out = load_acquire_sys(&header->blocks_out);
      if (out >= gridDim.x - 1) return;
      if (load_relaxed_gpu(&header->abort) != kNoFault) return;
      const u64 waited_ns = global_timer_ns() - start_ns;
      if (waited_ns > stall_limit_ns(args)) {
        report_fault<kOperator>(args, kPeerTimeout, WaitSite{kEntry, args.rank, 0}, gridDim.x - 1, out, waited_ns);
        return;
      }
      __nanosleep(64);
    }
  }
  MK_DEVICE void end(u32 epoch) const {
    header->blocks_in = 0;
    header->blocks_out = 0;
    if (epoch != 0) header->epoch = epoch;
  }
};

/// Signal role: enters the launch, and meets the peers before it ends.
template <class Op>
MK_DEVICE void stream_signal_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory) {
  const u32 epoch = enter_launch<Op::kOperator>(args);
  store_shared(memory.epoch(), epoch);
  mbarrier_arrive(memory.entered());
  if (blockIdx.x != 0) {
    StreamExit{args}.count_out();
    return;
  }
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
  StreamExit{args}.template await_others<Op::kOperator>();
}

/// The whole kernel.
template <class Op>
MK_DEVICE void run_stream_block(const LaunchArguments& args) {
  using Tile = typename Op::Tile;
  const auto memory = shared_memory<Tile>();
  Trace trace(args, kComputeLane, threadIdx.x == 0);
  init_barriers(memory);
  if (threadIdx.x == 32) prefetch_tensor_map(&args.a[0]);
  if (threadIdx.x == 64) prefetch_tensor_map(&args.weight[0]);
  __syncthreads();
  if constexpr (Tile::kSplit > 1) cluster_arrive();  // who sends to others waits for them: Exchange::begin
  const StreamPlan<Tile> plan(args, Op::kScatters);
  launch_dependents();
  await_predecessors();
  trace.begin();  // stays of one launch and the next do not overlap: that is how their tasks are told apart
  const auto [group, warp, first_lane] = ThreadPlace{};
  if (group == kMathGroups) {
    decrease_registers<kStreamHelperRegisters>();
    if (first_lane && warp == 0) stream_load_role<Tile>(args, memory, plan);
    if constexpr (Op::kReduces) {
      if (first_lane && warp == 3) stream_signal_role<Op>(args, memory);
      if constexpr (Tile::kHandsOver) {
        if (warp == 1 || warp == 2) stream_send_role<Op>(args, memory, plan, warp - 1);
      }
    }
    __syncwarp();
  } else {
    increase_registers<kStreamMathRegisters>();
    if constexpr (Tile::kSharesEnds) {
      EndsCompute<Op>(args, memory, plan, group).run();
    } else {
      StreamCompute<Op>(args, memory, plan, group).run();
    }
  }
  if (kTrace || (Op::kReduces && blockIdx.x == 0)) __syncthreads();
  if constexpr (Op::kReduces) {
    if (blockIdx.x == 0 && threadIdx.x == 0) StreamExit{args}.end(load_shared(memory.epoch()));
  }
  if constexpr (kTrace) trace.end(kTraceBlock, args.rank, Op::kReduces ? load_shared(memory.epoch()) : 0);
}

}  // namespace mk
