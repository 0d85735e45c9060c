#pragma once
// Load role of the kernels for few rows: one thread, k-block by k-block into the ring of stages.
#include "device/stream_shape.cuh"

namespace mk {

/// Load role: one k-block of a tile, whose first row and column are given.
template <class Tile>
MK_DEVICE void load_k_block(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                            const StreamPlan<Tile>& plan, Ring<Tile>& ring, u32 block, i32 row, i32 column,
                            Trace& trace) {
  u32 term = 0;
  for (u32 blocks = k_blocks_of(args, 0); block >= blocks; blocks = k_blocks_of(args, term)) {
    block -= blocks;
    ++term;
  }
  wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
  mbarrier_arrive_expect(memory.stage_full(ring.stage), plan.bytes_a + Tile::kBytesB);
  load_stage(args, memory, ring.stage, term, block * kBlockK, row, column);
  ring.advance();
}

/// Load role, in a cluster that shares its ends.
template <class Tile>
MK_DEVICE void load_turns(const LaunchArguments& args, const SharedMemory<Tile>& memory, const StreamPlan<Tile>& plan) {
  const EndTurns turns = EndTurns::make(plan, plan.part);
  Ring<Tile> ring;
  Trace trace(args, kLoadLane);
  for (u32 turn = 0; turn < turns.count; ++turn) {
    const u32 tile = plan.tile(turns.position(plan, turn)), first = turns.is_shared(turn) ? plan.first_k() : 0;
    const u32 end = first + plan.k_blocks_of_turn(turns, turn);
    const i32 row = plan.row(tile), column = plan.column(tile);
    trace.begin();
    for (u32 block = first; block < end; ++block) load_k_block(args, memory, plan, ring, block, row, column, trace);
    trace.end(kTraceLoad, args.rank, tile);
  }
}

/// Load role: this block's k-blocks of each of its tiles.
template <class Tile>
MK_DEVICE void stream_load_role(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                                const StreamPlan<Tile>& plan) {
  if constexpr (Tile::kSharesEnds) {
    load_turns(args, memory, plan);
    return;
  }
  Ring<Tile> ring;
  Trace trace(args, kLoadLane);
  const u32 count = plan.last_k() - plan.first_k();
  for (u32 position = plan.first; position < plan.tiles; position += plan.step) {
    const u32 tile = plan.tile(position);
    const i32 row = plan.row(tile), column = plan.column(tile);
    u32 at = plan.start_k(args, tile);
    trace.begin();
    for (u32 i = 0; i < count; ++i) {
      load_k_block(args, memory, plan, ring, plan.first_k() + at, row, column, trace);
      at = at + 1 == count ? 0 : at + 1;
    }
    trace.end(kTraceLoad, args.rank, tile);
  }
}

}  // namespace mk
