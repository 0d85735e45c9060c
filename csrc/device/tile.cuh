#pragma once
// The shape of a block's work: tile, pipeline, shared memory, matrix descriptors, and the mainloop of one tile.
#include "device/element.cuh"
#include "device/generated/wgmma.cuh"
#include "device/trace.cuh"

namespace mk {

inline constexpr int kMathGroups = 2;
inline constexpr int kThreads = (kMathGroups + 1) * 128;
inline constexpr int kBlockK = 64;
inline constexpr int kFlopPerNs = 5900;  ///< of one SM at its best. Source: docs/decisions/301-tile-gemm.md
inline constexpr int kSparePanels = 2;

/// Operands of kBlockM x kBlockN products. Two math groups halve the rows (kBlockM 128) or the columns (kBlockM 64).
template <int kBlockM_, int kBlockN_, bool kWeightIsKn_>
struct OperandShape {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kWeightIsKn = kWeightIsKn_;  ///< weight in memory [k, n]; else [n, k]
  static constexpr bool kSplitsRows = kBlockM == 128;
  static constexpr int kGroupN = kSplitsRows ? kBlockN : kBlockN / kMathGroups;
  static constexpr int kPanelN = kGroupN % 64 == 0 ? 64 : kGroupN % 32 == 0 ? 32 : 16;
  static constexpr int kRowBytes = kPanelN * 2;
  static constexpr int kPanelBytes = 64 * kRowBytes;
  static constexpr int kBytesA = kBlockM * kBlockK * 2;
  static constexpr int kBytesB = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static_assert(kBlockM == 64 || kBlockM == 128, "one or two row halves");
  static_assert(kPanelN >= 16 && kGroupN % kPanelN == 0, "whole panels");
};

/// The threads of both math groups meet.
MK_DEVICE void math_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kMathGroups * 128) : "memory"); }

/// Tile of kBlockM x kBlockN. Each group's part is cut into panels of 64 rows and at most 64 columns, the unit of stores
/// and pushes.
template <int kBlockM_, int kBlockN_, int kStages_, bool kWeightIsKn_, bool kCopiesOut_>
struct TileShape : OperandShape<kBlockM_, kBlockN_, kWeightIsKn_> {
  using Operands = OperandShape<kBlockM_, kBlockN_, kWeightIsKn_>;
  using Operands::kGroupN, Operands::kPanelN, Operands::kPanelBytes, Operands::kStageBytes;
  static constexpr int kStages = kStages_;
  static constexpr int kStageReaders = kMathGroups;
  static constexpr int kSplit = 1;                  ///< blocks that share k
  static constexpr int kPanelGroups = kMathGroups;  ///< math groups that finish results in a block
  static constexpr bool kCopiesOut = kCopiesOut_;  ///< two more panels, through which finished tiles are copied out
  static constexpr int kPanels = kGroupN / kPanelN;
  static constexpr int kTileBytes = kMathGroups * kPanels * kPanelBytes;

  // Shared memory, from a 1024-byte boundary.
  static constexpr int kPanelOffset = kStages * kStageBytes;
  static constexpr int kSpareOffset = kPanelOffset + kTileBytes;
  static constexpr int kBarrierOffset = kSpareOffset + (kCopiesOut ? kSparePanels * kPanelBytes : 0);
  static constexpr int kCopyBarriers = kCopiesOut ? kSparePanels + kMathGroups * kPanels : 0;
  static constexpr int kBarriers = 2 * kStages + 3 * kMathGroups * kPanels + kCopyBarriers + 1;
  static constexpr int kWordOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kSharedBytes = 1024 + kWordOffset + 16 + kStages * 8;
  static_assert(kSharedBytes <= 232448, "shared memory of one SM");
};

/// Addresses in shared memory.
template <class Tile>
struct SharedMemory {
  u32 base;

  MK_DEVICE u32 a(int stage) const { return base + stage * Tile::kStageBytes; }
  MK_DEVICE u32 b(int stage) const { return a(stage) + Tile::kBytesA; }
  MK_DEVICE u32 panel(int group, int index) const {
    const int first = Tile::kPanelGroups == 1 ? 0 : group * Tile::kPanels;
    return base + Tile::kPanelOffset + (first + index) * Tile::kPanelBytes;
  }
  MK_DEVICE u32 spare(int index) const { return base + Tile::kSpareOffset + index * Tile::kPanelBytes; }

  MK_DEVICE u32 barrier(int index) const { return base + Tile::kBarrierOffset + index * 8; }
  MK_DEVICE u32 stage_full(int stage) const { return barrier(stage); }
  MK_DEVICE u32 stage_empty(int stage) const { return barrier(Tile::kStages + stage); }
  MK_DEVICE u32 panel_barrier(int kind, int group, int index) const {
    return barrier(2 * Tile::kStages + (kind * kMathGroups + group) * Tile::kPanels + index);
  }
  MK_DEVICE u32 panel_full(int group, int index) const { return panel_barrier(0, group, index); }
  MK_DEVICE u32 panel_empty(int group, int index) const { return panel_barrier(1, group, index); }
  /// The staged partial of an own tile has been loaded into the panel.
  MK_DEVICE u32 panel_staged(int group, int index) const { return panel_barrier(2, group, index); }
  /// A panel that is being copied out has been loaded: first the spare panels, then the others in tile order.
  MK_DEVICE u32 copy_full(int index) const {
    return barrier(2 * Tile::kStages + 3 * kMathGroups * Tile::kPanels + index);
  }
  /// The epoch of this launch is known to the block.
  MK_DEVICE u32 entered() const { return barrier(Tile::kBarriers - 1); }

  /// Tiles of which a store warp has sent everything, counted.
  MK_DEVICE u32 sent_count(int group) const { return base + Tile::kWordOffset + group * 4; }
  MK_DEVICE u32 given_up() const { return base + Tile::kWordOffset + 8; }
  MK_DEVICE u32 epoch() const { return base + Tile::kWordOffset + 12; }
  /// What the compute role must know of the tile that begins in a stage: two words, valid while the stage is full.
  MK_DEVICE u32 tile_note(int stage) const { return base + Tile::kWordOffset + 16 + stage * 8; }

  MK_DEVICE void init() const {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      mbarrier_init(stage_full(stage), 1);
      mbarrier_init(stage_empty(stage), Tile::kStageReaders);
    }
    for (int group = 0; group < kMathGroups; ++group) {
      for (int index = 0; index < Tile::kPanels; ++index) {
        mbarrier_init(panel_full(group, index), 128);
        mbarrier_init(panel_empty(group, index), 1);
        mbarrier_init(panel_staged(group, index), 1);
      }
      store_shared(sent_count(group), 0);
    }
    for (int index = 0; index < Tile::kCopyBarriers; ++index) mbarrier_init(copy_full(index), 1);
    mbarrier_init(entered(), 1);
    store_shared(given_up(), 0);
    fence_mbarrier_init();
  }
};

/// Position in the ring of pipeline stages.
template <class Tile>
struct Ring {
  int stage = 0;
  u32 parity = 0;

  MK_DEVICE void advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// Past stages that another thread reads.
  MK_DEVICE void skip(u32 stages) {
    const u32 end = stage + stages;
    parity ^= end / Tile::kStages & 1;
    stage = end % Tile::kStages;
  }
};

/// Byte offset of a 16-byte chunk in rows of kRowBytes, swizzled as the tensor map of that row length does.
template <int kRowBytes>
MK_DEVICE u32 swizzled(u32 row, u32 chunk) {
  constexpr u32 kChunks = kRowBytes / 16;
  return row * kRowBytes + ((chunk ^ ((row * kRowBytes / 128) % kChunks)) << 4);
}

/// wgmma matrix descriptor. Source: PTX ISA, "Matrix Descriptor Format".
MK_DEVICE u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u64 swizzle) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(leading_bytes >> 4) << 16) | ((u64)(stride_bytes >> 4) << 32) |
         (swizzle << 62);
}
template <int kRowBytes>
MK_DEVICE constexpr u64 swizzle_mode() {
  return kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
}

/// Operand with k contiguous, 128-byte rows: groups of eight rows are 1024 bytes apart.
MK_DEVICE u64 k_major_descriptor(u32 address) { return matrix_descriptor(address, 16, 1024, 1); }

/// Weight with n contiguous, chunks of [64 k, kPanelN n]: chunks lie kPanelBytes apart, groups of eight k eight rows.
template <class Tile>
MK_DEVICE u64 n_major_descriptor(u32 address) {
  return matrix_descriptor(address, Tile::kPanelBytes, 8 * Tile::kRowBytes, swizzle_mode<Tile::kRowBytes>());
}

/// What the load role, which has time to spare, tells the compute role of a tile: work out nothing twice.
struct TileNote {
  static constexpr u32 kEnd = ~0u, kPeer = 1u << 31;
  u32 index;   ///< of the tile among its owner's; with kPeer where that is another rank; kEnd after the last tile
  i32 column;  ///< first column
};

/// Load role: one k-block of a weight into a stage, whose barrier expects it.
template <class Tile>
MK_DEVICE void load_weight_block(const LaunchArguments& args, const SharedMemory<Tile>& memory, int stage, u32 index,
                                 i32 k, i32 column) {
  const u32 full = memory.stage_full(stage);
  if constexpr (Tile::kWeightIsKn) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kBlockN / Tile::kPanelN; ++chunk) {
      tensor_load(memory.b(stage) + chunk * Tile::kPanelBytes, &args.weight[index], full,
                  column + chunk * Tile::kPanelN, k);
    }
  } else {
    tensor_load(memory.b(stage), &args.weight[index], full, k, column);
  }
}

/// Load role: one k-block of both operands.
template <class Tile>
MK_DEVICE void load_stage(const LaunchArguments& args, const SharedMemory<Tile>& memory, int stage, u32 term, i32 k,
                          i32 row, i32 column) {
  tensor_load(memory.a(stage), &args.a[term], memory.stage_full(stage), k, row);
  load_weight_block(args, memory, stage, term, k, column);
}

/// Load role: one tile's operands, k-block by k-block, into the ring.
template <class Tile>
MK_DEVICE void load_tile(const LaunchArguments& args, const SharedMemory<Tile>& memory, Ring<Tile>& ring, TileNote note,
                         i32 row, Trace& trace) {
  bool first = true;
  for (u32 term = 0; term < args.terms; ++term) {
    for (u32 k = 0; k < args.k[term]; k += kBlockK) {
      wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
      const u32 full = memory.stage_full(ring.stage);
      if (first) {
        store_shared(memory.tile_note(ring.stage), note.index);
        store_shared(memory.tile_note(ring.stage) + 4, note.column);
        first = false;
      }
      mbarrier_arrive_expect(full, Tile::kStageBytes);
      load_stage(args, memory, ring.stage, term, k, row, note.column);
      ring.advance();
    }
  }
}

/// Load role: no more tiles.
template <class Tile>
MK_DEVICE void load_end(const LaunchArguments& args, const SharedMemory<Tile>& memory, const Ring<Tile>& ring) {
  wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole);
  store_shared(memory.tile_note(ring.stage), TileNote::kEnd);
  mbarrier_arrive(memory.stage_full(ring.stage));
}

/// Compute role: the next tile, once its first k-block is here.
template <class Tile>
MK_DEVICE TileNote next_tile(const LaunchArguments& args, const SharedMemory<Tile>& memory, const Ring<Tile>& ring,
                             Trace& trace) {
  trace.begin();
  wait_phase(args, memory.stage_full(ring.stage), ring.parity, kComputeRole, trace);
  const u32 note = memory.tile_note(ring.stage);
  return TileNote{load_shared(note), (i32)load_shared(note + 4)};
}

MK_DEVICE u32 k_blocks_of(const LaunchArguments& args, u32 term) { return (args.k[term] + kBlockK - 1) / kBlockK; }
MK_DEVICE u32 count_k_blocks(const LaunchArguments& args) {
  u32 blocks = 0;
  for (u32 term = 0; term < args.terms; ++term) blocks += k_blocks_of(args, term);
  return blocks;
}

/// Compute role: one group's part of some k-blocks of a tile, acc += A * B, or acc = A * B where the tile starts with
/// them: the first product writes what the others add to, and nobody has to clear it. A stage is handed back one
/// k-block late, when the products that read it are known to be finished.
template <class Element, bool kStarts = false, class Tile, int kAccumulators>
MK_DEVICE void multiply_blocks(const LaunchArguments& args, const SharedMemory<Tile>& memory, Ring<Tile>& ring,
                               int group, u32 k_blocks, float (&acc)[kAccumulators], Trace& trace) {
  using Mma = Wgmma<Tile::kGroupN, Element, Tile::kWeightIsKn>;
  constexpr u32 kOffsetA = Tile::kSplitsRows ? 64 * kBlockK * 2 : 0;
  constexpr u32 kOffsetB = Tile::kSplitsRows ? 0 : Tile::kGroupN * kBlockK * 2;
  constexpr u32 kStepB = Tile::kWeightIsKn ? 16 * Tile::kRowBytes : 32;  // sixteen k further on
  constexpr u32 kProductsNs = Tile::kBlockM * Tile::kBlockN * kBlockK * 2 / kFlopPerNs;  // those still under way
  const bool leader = threadIdx.x % 128 == 0;
  int previous = -1;
  for (u32 block = 0; block < k_blocks; ++block) {
    wait_phase(args, memory.stage_full(ring.stage), ring.parity, kComputeRole, trace, block == 0 ? 0 : kProductsNs);
    const u64 a = k_major_descriptor(memory.a(ring.stage) + group * kOffsetA);
    const u32 b_address = memory.b(ring.stage) + group * kOffsetB;
    const u64 b = Tile::kWeightIsKn ? n_major_descriptor<Tile>(b_address) : k_major_descriptor(b_address);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      Mma::multiply(acc, a + step * 2, b + step * (kStepB >> 4), kStarts && step == 0 ? block : 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && leader) mbarrier_arrive(memory.stage_empty(previous));
    previous = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  if (leader) mbarrier_arrive(memory.stage_empty(previous));
}

/// All k-blocks of a tile: acc = A * B.
template <class Element, class Tile, int kAccumulators>
MK_DEVICE void multiply_tile(const LaunchArguments& args, const SharedMemory<Tile>& memory, Ring<Tile>& ring, int group,
                             u32 k_blocks, float (&acc)[kAccumulators], Trace& trace) {
  // Cleared, and every product accumulates: left undefined until the first product they would be kept alive, and
  // spilled, round the loop over tiles.
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.f;
  multiply_blocks<Element>(args, memory, ring, group, k_blocks, acc, trace);
}

}  // namespace mk
