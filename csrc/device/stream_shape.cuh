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
  static constexpr int kExchangeBytes = (kSplit - 1) * kSliceBytes;  ///< of one tile; there is room for two
  static constexpr int kPanels = 0, kCopyBarriers = 0;
  static_assert(kUnits >= 1 && kUnitsOfTile % kSplit == 0, "every block of a cluster finishes as much as the others");

  static constexpr int kPanelOffset = kStages * kStageBytes;  ///< of the exchange buffer
  static constexpr int kSpareOffset = kPanelOffset, kBarrierOffset = kPanelOffset + 2 * kExchangeBytes;
  static constexpr int kBarriers = 2 * kStages + 5;
  static constexpr int kWordOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kSharedBytes = 1024 + kWordOffset + 16 + kStages * 8;
  static_assert(kSharedBytes <= 232448, "shared memory of one SM");
};

/// How the blocks of a cluster give each other their partials: in two buffers, by turns. Thread t writes only what the
/// threads t of the other blocks read.
template <class Tile>
struct Exchange {
  static constexpr u32 kWarps = 4 * kMathGroups;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  u32 tiles = 0;  ///< exchanged so far

  MK_DEVICE u32 barrier(u32 kind) const { return memory.barrier(2 * Tile::kStages + kind * 2 + tiles % 2); }
  /// All other blocks' partials of this block's part have arrived.
  MK_DEVICE u32 full() const { return barrier(0); }
  /// All other blocks have read what this one wrote there two tiles ago.
  MK_DEVICE u32 empty() const { return barrier(1); }
  /// Unit `u` of this thread from the block that is number `slot` among the others.
  MK_DEVICE u32 at(u32 slot, int u) const {
    const u32 buffer = memory.base + Tile::kPanelOffset + tiles % 2 * Tile::kExchangeBytes;
    return buffer + slot * Tile::kSliceBytes + (u * 256 + threadIdx.x) * 16;
  }

  MK_DEVICE void init() const {
    for (u32 turn = 0; turn < 2; ++turn) {
      mbarrier_init(memory.barrier(2 * Tile::kStages + turn), 1);
      mbarrier_init(memory.barrier(2 * Tile::kStages + 2 + turn), Tile::kSplit == 1 ? 1 : kWarps * (Tile::kSplit - 1));
    }
  }
  /// Before the first partial of a tile is written.
  MK_DEVICE void begin() const {
    if (tiles >= 2) wait(empty(), (tiles / 2 & 1) ^ 1);
    if (threadIdx.x == 0) mbarrier_arrive_expect(full(), Tile::kExchangeBytes);
  }
  MK_DEVICE void await_partials() const { wait(full(), tiles / 2 & 1); }
  /// All partials have been read. `reused`: a later tile will be written over them, by blocks that are still here then.
  MK_DEVICE void end(u32 part, bool reused) {
    __syncwarp();
    if (reused && threadIdx.x % 32 < Tile::kSplit && threadIdx.x % 32 != part) {
      mbarrier_arrive_cluster(map_shared(empty(), threadIdx.x % 32));
    }
    ++tiles;
  }

 private:
  MK_DEVICE void wait(u32 barrier, u32 parity) const {
    if (mbarrier_try_wait_cluster(barrier, parity)) return;
    const u64 start_ns = global_timer_ns();
    while (!mbarrier_try_wait_cluster(barrier, parity)) {
      if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, kComputeRole, barrier);
    }
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
