#pragma once
// All-gather + GEMM in one block: the roles that compute.
#include "device/gather_arrivals.cuh"

namespace mk {

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
    // The panels of the first tile have served another purpose: see Layer.
    if constexpr (Op::kPulls) wait_phase(args, memory.panel_staged(0, 0), 0, kComputeRole, trace);
    finish_product(epilogue, acc, column, gather.bias[note.index], gather.n[note.index]);
    trace.end(kTraceEpilogue, kSomePeer, note.index);
  }
}

/// Store role: panel by panel as math groups fill them: those of `kGroups` groups from number `group` on.
template <class Op, int kGroups = 1, class Schedule>
MK_DEVICE void gather_store_role(const LaunchArguments& args, const GatherArguments& gather,
                                 const SharedMemory<typename Op::Tile>& memory, const Schedule& schedule, int group) {
  using Tile = typename Op::Tile;
  Trace trace(args, kStoreLane + group);
  u32 tiles = 0;
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<Tile>(gather, position);
#pragma unroll 1
    for (int index = 0; index < Tile::kPanels; ++index) {
#pragma unroll 1
      for (int g = group; g < group + kGroups; ++g) {
        const i32 x = place.column + (Tile::kSplitsRows ? 0 : g * Tile::kGroupN);
        const i32 y = place.out_row + (Tile::kSplitsRows ? g * 64 : 0);
        wait_phase(args, memory.panel_full(g, index), tiles & 1, kStoreRole, trace);
        if (index == 0 && g == group) trace.begin();
        tensor_store(&gather.out[place.weight], memory.panel(g, index), x + index * Tile::kPanelN, y, place.run);
      }
      bulk_commit();
      if (index > 0) {
        bulk_wait_read<1>();
        for (int g = group; g < group + kGroups; ++g) mbarrier_arrive(memory.panel_empty(g, index - 1));
      }
    }
    bulk_wait_read<0>();
    for (int g = group; g < group + kGroups; ++g) mbarrier_arrive(memory.panel_empty(g, Tile::kPanels - 1));
    trace.end(kTraceStore, place.owner, position);
    ++tiles;
  }
  bulk_wait<0>();
}

}  // namespace mk
