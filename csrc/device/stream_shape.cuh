#pragma once
// Few rows: kernels that stream the weight and keep everything else short. A tile's result goes from registers to its
// place; `kSplit` blocks of a cluster share a tile, each with a range of k, and add up in a fixed order over the
// cluster's shared memory, each for its part of the tile.
#include "device/stream_order.cuh"
#include "device/tile.cuh"

namespace mk {

inline constexpr u32 kSenders = 2;  ///< warps that send what is handed over
inline constexpr int kMostSharedBytes = 232448;  ///< of a block

/// As TileShape, with no panels: results are stored from registers. The math groups work on one tile together, or in
/// turn (`kPingPong`), each on a tile of its own while the other one's goes to its place. Or they hand a tile over to
/// two warps that send it while they multiply the next (`kHandsOver`). A tile consists of slabs of 64 rows: what one
/// group multiplies at a time.
template <int kBlockM_, int kBlockN_, int kStages_, bool kWeightIsKn_, int kSplit_, bool kPingPong_, bool kHandsOver_>
struct StreamShape : OperandShape<kBlockM_, kBlockN_, kWeightIsKn_> {
  using Operands = OperandShape<kBlockM_, kBlockN_, kWeightIsKn_>;
  using Operands::kStageBytes, Operands::kBlockM, Operands::kBlockN;
  static constexpr int kStages = kStages_, kSplit = kSplit_;
  static constexpr bool kPingPong = kPingPong_, kHandsOver = kHandsOver_;
  static constexpr bool kSharesEnds = false, kIsOfCluster = false;  ///< see EndsShared, WholeTile
  static constexpr int kGroupN = kPingPong ? kBlockN : Operands::kGroupN;
  static constexpr bool kSlabsAreRows = kPingPong || Operands::kSplitsRows;  ///< else columns
  static constexpr int kSlabs = kBlockM / 64 * (kBlockN / kGroupN);
  static constexpr int kMine = kPingPong ? kSlabs : 1;             ///< slabs of one group
  static constexpr int kStageReaders = kPingPong ? 1 : kMathGroups;
  static constexpr int kUnitsOfSlab = kGroupN / 8;                 ///< of one thread: two for each 16 columns
  static constexpr int kUnits = kUnitsOfSlab / kSplit;             ///< of those that this block finishes
  static constexpr int kSliceBytes = kBlockM * kBlockN * 4 / kSplit;  ///< this block's part from one other block, fp32
  static constexpr int kExchangeBytes = (kSplit - 1) * kSliceBytes;   ///< of one tile
  static constexpr int kPanels = 0, kCopyBarriers = 0;
  static_assert(!kHandsOver || (kSplit == 1 && !kPingPong), "whole tiles, of both groups");
  static_assert(kUnits >= 1 && kUnitsOfSlab % kSplit == 0, "every block of a cluster finishes as much as the others");

  static constexpr int kPanelOffset = kStages * kStageBytes;  ///< of the exchange buffers
  static constexpr int kExchangeBarriers = 8, kTurnBarriers = 2;
  static constexpr int kHandedBuffers = kHandsOver ? 2 : 0, kHandedBytes = kBlockM * kBlockN * 2;
  static constexpr int kOtherBytes = 1024 + (kExchangeBarriers + kTurnBarriers + 1) * 8 + 16 + kStages * 3 * 8;
  /// Of the exchange: two where the second costs no stage.
  static constexpr int kBuffers = kPanelOffset + kOtherBytes + 2 * kExchangeBytes <= kMostSharedBytes ? 2 : 1;
  static constexpr int kSpareOffset = kPanelOffset, kHandedOffset = kPanelOffset + kBuffers * kExchangeBytes;
  static constexpr int kBarrierOffset = kHandedOffset + kHandedBuffers * kHandedBytes;
  static constexpr int kBarriers = 2 * kStages + kExchangeBarriers + kTurnBarriers + 2 * kHandedBuffers + 1;
  static constexpr int kWordOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kSharedBytes = 1024 + kWordOffset + 16 + kStages * 8;
  static_assert(kSharedBytes <= kMostSharedBytes, "shared memory of one SM");
};

/// Blocks of a cluster of two share only some of its tiles: see EndTurns.
template <class Shared>
struct EndsShared : Shared {
  static constexpr bool kSharesEnds = true;
  static_assert(Shared::kSplit == 2 && Shared::kPingPong, "pairs of whole tiles, each of one group");
};
/// The same memory, seen by who finishes a whole tile of a cluster that shares only some.
template <class Tile>
struct WholeTile : Tile {
  static constexpr int kSplit = 1, kUnits = Tile::kUnitsOfSlab;
  static constexpr bool kIsOfCluster = true;
};

/// How many arrive at each barrier of a block, in the order in which they lie.
template <class Tile>
MK_DEVICE constexpr u32 arrivals_at(int index) {
  constexpr int kExchange = 2 * Tile::kStages, kTurns = kExchange + Tile::kExchangeBarriers;
  constexpr int kHanded = kTurns + Tile::kTurnBarriers;
  if (index < Tile::kStages) return 1;
  if (index < kExchange) return Tile::kStageReaders;
  if (index < kExchange + Tile::kExchangeBarriers / 2) return 1;
  if (index < kTurns) return Tile::kSplit == 1 ? 1 : 4 * (Tile::kSplit - 1);  // warps of the other blocks
  if (index < kHanded) return 128;
  if (index < kHanded + Tile::kHandedBuffers) return kMathGroups * 128;
  return index < Tile::kBarriers - 1 ? kSenders : 1;
}

template <int kFrom, int kTo, class Tile>
MK_DEVICE void init_some_barriers(const SharedMemory<Tile>& memory) {
#pragma unroll
  for (int index = kFrom; index < kTo; ++index) mbarrier_init(memory.barrier(index), arrivals_at<Tile>(index));
  fence_mbarrier_init();
}

/// Three warps' first threads share them out; before anybody uses one.
template <class Tile>
MK_DEVICE void init_barriers(const SharedMemory<Tile>& memory) {
  if (threadIdx.x == 96) init_some_barriers<0, Tile::kStages>(memory);
  if (threadIdx.x == 128) init_some_barriers<Tile::kStages, 2 * Tile::kStages>(memory);
  if (threadIdx.x == 160) init_some_barriers<2 * Tile::kStages, Tile::kBarriers>(memory);
}

/// How the blocks of a cluster give each other their partials: in one buffer or in two, by turns, each math group by
/// itself. Thread t writes only what the threads t of the other blocks read.
template <class Tile>
struct Exchange {
  static constexpr u32 kGroups = Tile::kPingPong ? 1 : kMathGroups;  ///< that work on one tile
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  u32 turn = 0;  ///< tiles of this block before this one

  /// `at`: a tile's turn, which says whose it is where groups take turns.
  MK_DEVICE u32 barrier(u32 kind, u32 at) const {
    const u32 group = Tile::kPingPong ? at % kMathGroups : threadIdx.x / 128;
    return memory.barrier(2 * Tile::kStages + (kind * kMathGroups + group) * 2 + at % 2);
  }
  /// All other blocks' partials of this block's part have arrived.
  MK_DEVICE u32 full() const { return barrier(0, turn); }
  /// All other blocks have read what this one wrote for tile `at`.
  MK_DEVICE u32 empty(u32 at) const { return barrier(1, at); }
  /// Unit `u` of this thread in a slab, from the block that is number `slot` among the others.
  MK_DEVICE u32 at(u32 slot, u32 slab, int u) const {
    const u32 buffer = memory.base + Tile::kPanelOffset + turn % Tile::kBuffers * Tile::kExchangeBytes;
    return buffer + slot * Tile::kSliceBytes + ((slab * Tile::kUnits + u) * 128 + threadIdx.x % 128) * 16;
  }

  /// Before the first partial of a tile is written. `first`: of this thread; the others' barriers are ready, too.
  MK_DEVICE void begin(bool first) const {
    if (first) cluster_wait();
    const u32 before = turn - Tile::kBuffers;  // the tile whose buffer this one's takes over
    if (turn >= Tile::kBuffers) await(empty(before), before / 2 & 1);
    if (threadIdx.x % 128 == 0) mbarrier_arrive_expect(full(), Tile::kExchangeBytes / kGroups);
  }
  MK_DEVICE void await_partials() const { await(full(), turn / 2 & 1); }
  /// All partials have been read. `reused`: a later tile will be written over them, by blocks that are still here then.
  MK_DEVICE void end(u32 part, bool reused) const {
    __syncwarp();
    if (reused && threadIdx.x % 32 < Tile::kSplit && threadIdx.x % 32 != part) {
      mbarrier_arrive_cluster(map_shared(empty(turn), threadIdx.x % 32));
    }
  }

 private:
  MK_DEVICE void await(u32 barrier, u32 parity) const {
    if (mbarrier_try_wait_cluster(barrier, parity)) return;
    const u64 start_ns = global_timer_ns();
    while (!mbarrier_try_wait_cluster(barrier, parity)) {
      if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, kComputeRole, barrier);
    }
  }
};

/// Who multiplies, where groups take turns: a group waits for its turn, so that it never waits for a phase of a stage's
/// barrier while an earlier one of the same parity is still to come.
///
/// Where they share a tile: who multiplies the k-blocks that are all here at the end, of a block's last tile. The first
/// group does so alone, and its partials are on the link while the second multiplies.
template <class Tile>
struct Turns {
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;

  /// All threads of a group have seen the last k-block of their tile.
  MK_DEVICE u32 taken(u32 group) const {
    return memory.barrier(2 * Tile::kStages + Tile::kExchangeBarriers + group);
  }
  /// Before tile number `turn` of this block.
  MK_DEVICE void await_turn(u32 turn, Trace& trace) const {
    if (turn > 0) wait_phase(args, taken((turn - 1) % 2), (turn - 1) / 2 & 1, kComputeRole, trace);
  }
  /// The second group, before the last k-blocks of a shared tile.
  MK_DEVICE void await_first(Trace& trace) const { wait_phase(args, taken(0), 0, kComputeRole, trace); }
};

/// Which part of each tile this block takes.
template <class Tile>
struct StreamPlan : StreamOrder {
  u32 k_blocks, part;
  u32 bytes_a;  ///< that a k-block of `a` takes: rows beyond the last are not loaded, and nobody looks at their sums

  MK_DEVICE StreamPlan(const LaunchArguments& args, bool scatters)
      : StreamOrder(make(args, Tile::kBlockM, Tile::kBlockN, scatters, blockIdx.x / Tile::kSplit,
                         gridDim.x / Tile::kSplit)) {
    k_blocks = count_k_blocks(args);
    part = Tile::kSplit == 1 ? 0 : cluster_rank();
    bytes_a = (args.m < Tile::kBlockM ? (args.m + 7) / 8 * 8 : Tile::kBlockM) * kBlockK * 2;
  }
  MK_DEVICE u32 first_k() const { return k_blocks * part / Tile::kSplit; }
  MK_DEVICE u32 last_k() const { return k_blocks * (part + 1) / Tile::kSplit; }
  MK_DEVICE u32 k_blocks_of_turn(const EndTurns& turns, u32 turn) const {
    return turns.is_shared(turn) ? last_k() - first_k() : k_blocks;
  }
  /// Where in its k range a tile begins: not all blocks at the same rows of `a`, of which few lie in one slice of L2.
  MK_DEVICE u32 start_k(const LaunchArguments& args, u32 tile) const {
    return args.lag == 0 ? 0 : column_tile(tile) * args.lag % (last_k() - first_k());
  }
  /// Of a scatter's tile: has this rank rows in it, and has a peer? Both, perhaps, where rows come in segments.
  MK_DEVICE bool has_own(const LaunchArguments& args, u32 tile) const {
    const u32 first = row(tile), own = args.rank * args.segment_rows;
    return args.segments > 1 || (first < own + args.segment_rows && first + Tile::kBlockM > own);
  }
  MK_DEVICE bool has_peers(const LaunchArguments& args, u32 tile) const {
    const u32 first = row(tile), own = args.rank * args.segment_rows;
    const u32 end = first + Tile::kBlockM < args.m ? first + Tile::kBlockM : args.m;
    return args.segments > 1 || first < own || end > own + args.segment_rows;
  }
  MK_DEVICE i32 row(u32 tile) const { return row_tile(tile) * Tile::kBlockM; }
  MK_DEVICE i32 column(u32 tile) const { return column_tile(tile) * Tile::kBlockN; }
};

/// Partials on their way from the math groups to the warps that send them, in two buffers by turns.
template <class Tile>
struct HandOver {
  static constexpr u32 kBuffers = Tile::kHandedBuffers;
  static constexpr int kFirst = 2 * Tile::kStages + Tile::kExchangeBarriers + Tile::kTurnBarriers;  ///< barrier
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;

  /// `turn`: tiles that this block has handed over before this one.
  MK_DEVICE u32 full(u32 turn) const { return memory.barrier(kFirst + turn % kBuffers); }
  MK_DEVICE u32 free(u32 turn) const { return memory.barrier(kFirst + kBuffers + turn % kBuffers); }
  /// A unit of one thread; that of the next thread follows.
  MK_DEVICE u32 at(u32 turn, u32 slab, u32 unit, u32 thread) const {
    const u32 buffer = memory.base + Tile::kHandedOffset + turn % kBuffers * Tile::kHandedBytes;
    return buffer + ((slab * Tile::kUnitsOfSlab + unit) * 128 + thread) * 8;
  }
  MK_DEVICE void await_full(u32 turn) const { wait_phase(args, full(turn), turn / kBuffers & 1, kStoreRole); }
  /// Before the tile is written.
  MK_DEVICE void await_free(u32 turn, Trace& trace) const {
    if (turn >= kBuffers) wait_phase(args, free(turn), (turn / kBuffers - 1) & 1, kComputeRole, trace);
  }
};

/// Compute role: all slabs of a tile by one group. As multiply_tile; the slabs share the weight. All threads arrive at
/// `taken` once no k-block is left to wait for.
template <class Element, class Tile, int kAccumulators>
MK_DEVICE void multiply_slabs(const LaunchArguments& args, const SharedMemory<Tile>& memory, Ring<Tile>& ring,
                              u32 k_blocks, u32 taken, float (&acc)[Tile::kMine][kAccumulators], Trace& trace) {
  using Mma = Wgmma<Tile::kGroupN, Element, Tile::kWeightIsKn>;
  constexpr u32 kStepB = Tile::kWeightIsKn ? 16 * Tile::kRowBytes : 32;
  const bool leader = threadIdx.x % 128 == 0;
#pragma unroll
  for (int slab = 0; slab < Tile::kMine; ++slab) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) acc[slab][i] = 0.f;
  }
  int previous = -1;
  for (u32 block = 0; block < k_blocks; ++block) {
    wait_phase(args, memory.stage_full(ring.stage), ring.parity, kComputeRole, trace);
    const u32 b_address = memory.b(ring.stage);
    const u64 b = Tile::kWeightIsKn ? n_major_descriptor<Tile>(b_address) : k_major_descriptor(b_address);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
#pragma unroll
      for (int slab = 0; slab < Tile::kMine; ++slab) {
        const u64 a = k_major_descriptor(memory.a(ring.stage) + slab * 64 * kBlockK * 2);
        Mma::multiply(acc[slab], a + step * 2, b + step * (kStepB >> 4));
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && leader) mbarrier_arrive(memory.stage_empty(previous));
    previous = ring.stage;
    ring.advance();
  }
  mbarrier_arrive(taken);
  wgmma_wait<0>();
  if (leader) mbarrier_arrive(memory.stage_empty(previous));
}

}  // namespace mk
