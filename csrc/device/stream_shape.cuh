#pragma once
// Few rows: kernels that stream the weight and keep everything else short. A tile's result goes from registers to its
// place; `kSplit` blocks of a cluster share a tile, each with a range of k, and add up in a fixed order over the
// cluster's shared memory, each for its part of the tile.
#include "device/tile.cuh"

namespace mk {

/// As TileShape, with no panels: results are stored from registers.
template <int kBlockM_, int kBlockN_, int kStages_, bool kWeightIsKn_, int kSplit_>
struct StreamShape : OperandShape<kBlockM_, kBlockN_, kWeightIsKn_> {
  using Operands = OperandShape<kBlockM_, kBlockN_, kWeightIsKn_>;
  using Operands::kGroupN, Operands::kStageBytes;
  static constexpr int kStages = kStages_, kSplit = kSplit_;
  static constexpr int kUnitsOfTile = kGroupN / 8;            ///< of one thread: two for each 16 columns
  static constexpr int kUnits = kUnitsOfTile / kSplit;        ///< of those that this block finishes
  static constexpr int kSliceBytes = kUnits * 256 * 16;       ///< fp32 partials of this block's part from one other block
  static constexpr int kExchangeBytes = (kSplit - 1) * kSliceBytes;
  static constexpr int kPanels = 0, kCopyBarriers = 0;
  static_assert(kUnits >= 1 && kUnitsOfTile % kSplit == 0, "every block of a cluster finishes as much as the others");

  static constexpr int kPanelOffset = kStages * kStageBytes;  ///< of the exchange buffer
  static constexpr int kSpareOffset = kPanelOffset, kBarrierOffset = kPanelOffset + kExchangeBytes;
  static constexpr int kBarriers = 2 * kStages + 2;
  static constexpr int kWordOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kSharedBytes = 1024 + kWordOffset + 16 + kStages * 8;
  static_assert(kSharedBytes <= 232448, "shared memory of one SM");
};

/// Addresses beyond SharedMemory's.
template <class Tile>
struct Exchange {
  const SharedMemory<Tile>& memory;

  /// All other blocks' partials of this block's part have arrived.
  MK_DEVICE u32 full() const { return memory.barrier(2 * Tile::kStages); }
  /// Unit `u` of this thread from the block that is number `slot` among the others.
  MK_DEVICE u32 at(u32 slot, int u) const {
    return memory.base + Tile::kPanelOffset + slot * Tile::kSliceBytes + (u * 256 + threadIdx.x) * 16;
  }
  MK_DEVICE void await_all(const LaunchArguments& args) const {
    if (mbarrier_try_wait_cluster(full(), 0)) return;
    const u64 start_ns = global_timer_ns();
    while (!mbarrier_try_wait_cluster(full(), 0)) {
      if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, kComputeRole, full());
    }
  }
  MK_DEVICE void init() const {
    mbarrier_init(full(), 1);
    if constexpr (Tile::kSplit > 1) mbarrier_arrive_expect(full(), Tile::kExchangeBytes);
  }
};

/// Which tiles there are, and which part of each this block takes.
template <class Tile>
struct StreamPlan {
  u32 tiles_m, tiles, k_blocks, part, first_tile, tile_step;

  MK_DEVICE explicit StreamPlan(const LaunchArguments& args) {
    tiles_m = (args.m + Tile::kBlockM - 1) / Tile::kBlockM;
    tiles = tiles_m * ((args.n + Tile::kBlockN - 1) / Tile::kBlockN);
    k_blocks = count_k_blocks(args);
    part = Tile::kSplit == 1 ? 0 : cluster_rank();
    first_tile = blockIdx.x / Tile::kSplit;
    tile_step = gridDim.x / Tile::kSplit;
  }
  MK_DEVICE u32 first_k() const { return k_blocks * part / Tile::kSplit; }
  MK_DEVICE u32 last_k() const { return k_blocks * (part + 1) / Tile::kSplit; }
  /// Row tiles of the same columns lie side by side, so that blocks of one wave share weights.
  MK_DEVICE i32 row(u32 tile) const { return tile % tiles_m * Tile::kBlockM; }
  MK_DEVICE i32 column(u32 tile) const { return tile / tiles_m * Tile::kBlockN; }
};

/// Load role: this block's k-blocks of each of its tiles.
template <class Tile>
MK_DEVICE void stream_load_role(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                                const StreamPlan<Tile>& plan) {
  Ring<Tile> ring;
  for (u32 tile = plan.first_tile; tile < plan.tiles; tile += plan.tile_step) {
    const i32 row = plan.row(tile), column = plan.column(tile);
    u32 base = 0;
    for (u32 term = 0; term < args.terms; ++term) {
      const u32 end = base + (args.k[term] + kBlockK - 1) / kBlockK;
      const u32 from = plan.first_k() > base ? plan.first_k() : base, to = plan.last_k() < end ? plan.last_k() : end;
      for (u32 block = from; block < to; ++block) {
        wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole);
        mbarrier_arrive_expect(memory.stage_full(ring.stage), Tile::kStageBytes);
        load_stage(args, memory, ring.stage, term, (block - base) * kBlockK, row, column);
        ring.advance();
      }
      base = end;
    }
  }
}

}  // namespace mk
