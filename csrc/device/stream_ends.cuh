#pragma once
// All-reduces of clusters of two whose blocks take turns with whole tiles, and share only the first and the last one.
#include "device/stream_epilogue.cuh"

namespace mk {

template <class Op>
struct WholeTiles : Op {
  using Tile = WholeTile<typename Op::Tile>;
};

/// Compute role of a cluster that shares its ends: groups take turns, with shared tiles and with whole ones.
template <class Op>
struct EndsCompute {
  using Tile = typename Op::Tile;
  using Whole = WholeTile<Tile>;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const StreamPlan<Tile>& plan;
  const int group;
  static_assert(Op::kOperator == kGemmAllReduce, "the rows of a scatter have owners: their tiles come last");
  Trace trace;
  Ring<Tile> ring{};
  bool entered = false, met = false;

  MK_DEVICE EndsCompute(const LaunchArguments& args, const SharedMemory<Tile>& memory, const StreamPlan<Tile>& plan,
                        int group)
      : args(args), memory(memory), plan(plan), group(group),
        trace(args, kComputeLane + group, threadIdx.x % 128 == 0) {}

  using Finish = StreamEpilogue<WholeTiles<Op>>;

  /// Rounded once for all who add them, as StreamEpilogue::round.
  template <class Epilogue>
  MK_DEVICE void round(const Epilogue& epilogue, u32 tile, typename Epilogue::Sums& sum,
                       typename Epilogue::Partials& own) const {
#pragma unroll
    for (int m = 0; m < Tile::kMine; ++m) {
      if constexpr (Op::kHasBias) epilogue.add_bias(tile, m, sum[m]);
    }
    epilogue.round(sum, own);
  }
  /// Of a shared tile, this block's units: in both halves of `own`, of which one counts.
  MK_DEVICE void share(u32 tile, u32 exchange, bool reused, const float (&acc)[Tile::kMine][Tile::kGroupN / 2],
                       typename Finish::Partials& own) {
    const StreamEpilogue<Op> epilogue{args, memory, plan, group, {args, memory, exchange}, {args, 0}};
    typename StreamEpilogue<Op>::Sums sum;
    typename StreamEpilogue<Op>::Partials half;
    epilogue.add_up(acc, !met, reused, sum);
    met = true;
    round(epilogue, tile, sum, half);
#pragma unroll
    for (int m = 0; m < Tile::kMine; ++m) {
#pragma unroll
      for (int u = 0; u < Tile::kUnits; ++u) own[m][u] = own[m][Tile::kUnits + u] = half[m][u];
    }
  }
  /// Before the first partial is sent.
  MK_DEVICE void enter(Finish& finish) {
    if (entered) return;
    wait_phase(args, memory.entered(), 0, kComputeRole, trace);
    finish.mailbox.epoch = load_shared(memory.epoch());
    finish.given_up = finish.mailbox.epoch == 0;  // the launch must not run: it drains
    entered = true;
  }

  MK_DEVICE void run() {
    const EndTurns ends = EndTurns::make(plan, plan.part);
    const Turns<Tile> turns{args, memory};
    const SharedMemory<Whole> whole{memory.base};
    const StreamPlan<Whole> whole_plan(args, false);
    Finish finish{args, whole, whole_plan, group, {args, whole}, {args, 0}};
    for (u32 turn = 0; turn < ends.count; ++turn) {
      const u32 k_blocks = plan.k_blocks_of_turn(ends, turn);
      if (turn % 2 != group) {
        ring.skip(k_blocks);
        continue;
      }
      trace.begin();
      const u32 tile = plan.tile(ends.position(plan, turn));
      const bool last = turn + 1 == ends.count;
      float acc[Tile::kMine][Tile::kGroupN / 2];
      turns.await_turn(turn, trace);
      multiply_slabs<typename Op::Element>(args, memory, ring, k_blocks, turns.taken(group), acc, trace);
      trace.end(kTraceMainloop, args.rank, tile);
      trace.begin();
      typename Finish::Partials own;
      if (ends.is_shared(turn)) {
        share(tile, last ? ends.lead : 0, !last && Tile::kBuffers == 1, acc, own);
        finish.part = plan.part;
      } else {
        typename Finish::Sums sum;
        finish.add_up(acc, false, false, sum);
        round(finish, tile, sum, own);
        finish.part = Finish::kAll;
      }
      enter(finish);
      finish.send(tile, own, args.pace_ns != 0 && !last);
      finish.finish(tile, own);
      trace.end(kTraceEpilogue, args.rank, tile);
    }
  }
};

}  // namespace mk
