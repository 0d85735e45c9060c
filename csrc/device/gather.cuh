#pragma once
// All-gather + GEMM in one block: the roles that compute.
#include "device/gather_arrivals.cuh"

namespace mk {

/// Load role: the products of one tile with one shard, k-block by k-block, into the ring.
template <class Op>
struct GatherLoader {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  Trace trace;
  Ring<Tile> ring;
  u32 arrived = 0;
  bool fresh = true;  ///< no stage has been used

  MK_DEVICE GatherLoader(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), trace(args, kLoadLane) {}

  MK_DEVICE void load_weight(int stage, u32 weight, i32 k, i32 column) {
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
  MK_DEVICE void note(int stage, const GatherPlace& place) {
    store_shared(memory.tile_note(stage), place.weight);
    store_shared(memory.tile_note(stage) + 4, place.column);
  }

  /// `own`: rows of this rank's shard, read in place; else rows that had to come. `first`: the tile begins here.
  MK_DEVICE void load(const GatherPlace& place, bool own, u32 row, i32 weight_k, bool first) {
    const u32 blocks = (args.k[0] + kBlockK - 1) / kBlockK;
    const TensorMap* map = &args.a[0];
    u32 ahead = 0;
    if (!own) {
      if (fresh) {  // weights can be on their way before the rows are here
        ahead = blocks < (u32)Tile::kStages ? blocks : (u32)Tile::kStages;
        note(0, place);
        for (u32 i = 0; i < ahead; ++i) load_weight(i, place.weight, weight_k + i * kBlockK, place.column);
      }
      const u64 since_ns = trace.now();
      // pairs-with: arrived acquire (arrival_role -> load_role), scope cta
      wait_count(args, [&] { return load_acquire_shared(memory.sent_count(0)); }, ++arrived, kLoadRole);
      trace.waited(since_ns);
      map = &gather.arena[load_shared(memory.epoch()) & 1];
    }
    fresh = false;
    for (u32 i = 0; i < blocks; ++i) {
      if (i >= ahead) {
        wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
        if (first && i == 0) note(ring.stage, place);
        load_weight(ring.stage, place.weight, weight_k + i * kBlockK, place.column);
      }
      tensor_load(memory.a(ring.stage), map, memory.stage_full(ring.stage), i * kBlockK, row);
      ring.advance();
    }
  }
};

/// Load role.
template <class Op>
MK_DEVICE void gather_load_role(const LaunchArguments& args, const GatherArguments& gather,
                                const SharedMemory<typename Op::Tile>& memory, const GatherSchedule& schedule) {
  using Tile = typename Op::Tile;
  GatherLoader<Op> loader(args, gather, memory);
  const u32 shard_rows = args.segments * args.segment_rows;
  const auto slot_of = [&](u32 source) {
    return source > args.rank ? source - args.rank - 1 : source + args.world - args.rank - 1;
  };
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<Tile>(gather, position);
    loader.trace.begin();
    if (schedule.order == kApart) {
      const bool own = place.owner == args.rank;
      loader.load(place, own, own ? place.row : slot_of(place.owner) * shard_rows + place.row, 0, true);
    } else if (schedule.order == kTogether) {
      loader.load(place, false, place.row, 0, true);
    } else {
      for (u32 step = 0; step < args.world; ++step) {
        const u32 source = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
        const u32 row = step == 0 ? place.row : slot_of(source) * args.m + place.row;
        loader.load(place, step == 0, row, source * args.k[0], step == 0);
      }
    }
    loader.trace.end(kTraceLoad, place.owner, position);
  }
  load_end<Tile>(args, memory, loader.ring);
}

/// Compute role: the epilogue of one tile.
template <class Op>
MK_DEVICE void finish_product(Epilogue<Op>& epilogue, const float* acc, i32 column, u64 bias, u32 n) {
  using Tile = typename Op::Tile;
  using Values = typename Epilogue<Op>::Values;
#pragma unroll
  for (int index = 0; index < Tile::kPanels; ++index) {
    epilogue.wait_empty(index);
    Values panel;
#pragma unroll
    for (int i = 0; i < Values::kValues; ++i) panel.values[i] = acc[index * Values::kValues + i];
    if constexpr (Op::kHasBias) {
      if (bias != 0) panel.add_bias(bias, n, column + index * Tile::kPanelN);
    }
    panel.store_rows(epilogue.memory.panel(epilogue.group, index));
    epilogue.hand_over(index);
  }
  ++epilogue.tiles;
}

/// Compute role: every tile of this block.
template <class Op>
MK_DEVICE void gather_compute_role(const LaunchArguments& args, const GatherArguments& gather,
                                   const SharedMemory<typename Op::Tile>& memory, int group) {
  using Tile = typename Op::Tile;
  const u32 k_blocks = (args.k[0] + kBlockK - 1) / kBlockK * (gather.order == kColumns ? args.world : 1);
  Trace trace(args, kComputeLane + group, threadIdx.x % 128 == 0);
  Epilogue<Op> epilogue{args, memory, group, trace};
  Ring<Tile> ring;
  // No `while (true)`: see compute_role.
  for (TileNote note = next_tile(args, memory, ring, trace); note.index != TileNote::kEnd;
       note = next_tile(args, memory, ring, trace)) {
    const i32 column = note.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN);
    float acc[Tile::kGroupN / 2];
    multiply_tile<typename Op::Element>(args, memory, ring, group, k_blocks, acc, trace);
    trace.end(kTraceMainloop, kSomePeer, note.index);
    trace.begin();
    finish_product(epilogue, acc, column, gather.bias[note.index], gather.n[note.index]);
    trace.end(kTraceEpilogue, kSomePeer, note.index);
  }
}

/// Store role: panel by panel as the math group fills them.
template <class Op, class Schedule>
MK_DEVICE void gather_store_role(const LaunchArguments& args, const GatherArguments& gather,
                                 const SharedMemory<typename Op::Tile>& memory, const Schedule& schedule, int group) {
  using Tile = typename Op::Tile;
  Trace trace(args, kStoreLane + group);
  u32 tiles = 0;
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<Tile>(gather, position);
    const i32 x = place.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN);
    const i32 y = place.out_row + (Tile::kSplitsRows ? group * 64 : 0);
#pragma unroll 1
    for (int index = 0; index < Tile::kPanels; ++index) {
      wait_phase(args, memory.panel_full(group, index), tiles & 1, kStoreRole, trace);
      if (index == 0) trace.begin();
      tensor_store(&gather.out[place.weight], memory.panel(group, index), x + index * Tile::kPanelN, y, place.run);
      bulk_commit();
      if (index > 0) {
        bulk_wait_read<1>();
        mbarrier_arrive(memory.panel_empty(group, index - 1));
      }
    }
    bulk_wait_read<0>();
    mbarrier_arrive(memory.panel_empty(group, Tile::kPanels - 1));
    trace.end(kTraceStore, place.owner, position);
    ++tiles;
  }
  bulk_wait<0>();
}

}  // namespace mk
