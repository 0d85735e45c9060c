#pragma once
// All-gather + GEMM: tiles that the two blocks of a cluster share. Each multiplies half of k, and finishes the rows of
// one math group: the other group's sums go to the other block. So all blocks begin with own rows, and those of the
// peers are half of what each has left.
#include "device/gather.cuh"

namespace mk {

/// As TileShape, with panels for one math group, and room for what the other block sends, in fp32.
template <int kBlockM_, int kBlockN_, int kStages_, bool kWeightIsKn_>
struct SharedTileShape : TileShape<kBlockM_, kBlockN_, kStages_, kWeightIsKn_, false> {
  using Whole = TileShape<kBlockM_, kBlockN_, kStages_, kWeightIsKn_, false>;
  using Whole::kStages, Whole::kGroupN, Whole::kPanels, Whole::kPanelBytes;
  static constexpr int kSplit = 2, kPanelGroups = 1;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static constexpr int kUnits = kGroupN / 8;  ///< of one thread, 16 bytes each
  static constexpr int kExchangeBytes = kUnits * 128 * 16;
  static constexpr int kExchangeOffset = Whole::kPanelOffset;
  static constexpr int kPanelOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kSpareOffset = kPanelOffset + kTileBytes, kBarrierOffset = kSpareOffset;
  static constexpr int kCopyBarriers = 2;  ///< of the exchange: what was sent has come; it has been read
  static constexpr int kBarriers = 2 * kStages + 3 * kMathGroups * kPanels + kCopyBarriers + 1;
  static constexpr int kWordOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kSharedBytes = 1024 + kWordOffset + 16 + kStages * 8;
  static_assert(Whole::kSplitsRows && kExchangeBytes % 1024 == 0, "each group has rows of its own");
};

/// This block among those that share k.
template <class Tile>
MK_DEVICE u32 part_of_block() {
  return Tile::kSplit == 1 ? 0 : cluster_rank();
}

/// How one math group of a block gives its sums of half of k to the same group of the other block. Thread t writes only
/// what thread t reads there.
template <class Tile>
struct HalfSums {
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const u32 part;
  u32 turn = 0;  ///< tiles before this one

  MK_DEVICE u32 full() const { return memory.copy_full(0); }
  /// The other block has read what this one sent for a tile.
  MK_DEVICE u32 empty() const { return memory.copy_full(1); }
  MK_DEVICE u32 at(int unit) const {
    return memory.base + Tile::kExchangeOffset + (unit * 128 + threadIdx.x % 128) * 16;
  }
  MK_DEVICE void await(u32 barrier, u32 parity) const {
    if (mbarrier_try_wait_cluster(barrier, parity)) return;
    const u64 start_ns = global_timer_ns();
    while (!mbarrier_try_wait_cluster(barrier, parity)) {
      if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, kComputeRole, barrier);
    }
  }

  MK_DEVICE void give(const float* acc) const {
    if (turn == 0) {
      cluster_wait();  // its barriers are ready
    } else {
      await(empty(), (turn - 1) & 1);
    }
    const u32 to = 1 - part, mapped = map_shared(full(), to);
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
      store_async(map_shared(at(u), to), acc[u * 4], acc[u * 4 + 1], acc[u * 4 + 2], acc[u * 4 + 3], mapped);
    }
  }
  MK_DEVICE void take() const {
    if (threadIdx.x % 128 == 0) mbarrier_arrive_expect(full(), Tile::kExchangeBytes);
    await(full(), turn & 1);
  }
  /// All threads of the group have read. `reused`: the other block will send another tile's, and is still here then.
  MK_DEVICE void end(bool reused, int group) const {
    if (!reused) return;
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
    if (threadIdx.x % 128 == 0) mbarrier_arrive_cluster(map_shared(empty(), 1 - part));
  }
};

/// Compute role: the epilogue of one tile's rows that this block finishes. Two sums have one order.
template <class Op>
MK_DEVICE void finish_shared(Epilogue<Op>& epilogue, const HalfSums<typename Op::Tile>& half, const float* acc,
                             i32 column, u64 bias, u32 n) {
  using Tile = typename Op::Tile;
  using Values = typename Epilogue<Op>::Values;
#pragma unroll
  for (int index = 0; index < Tile::kPanels; ++index) {
    epilogue.wait_empty(index);
    Values panel;
#pragma unroll
    for (int i = 0; i < Values::kValues; i += 4) {
      const int first = index * Values::kValues + i;
      const Vector4 other = load_shared_vector(half.at(first / 4));
      panel.values[i] = acc[first] + __uint_as_float(other.x);
      panel.values[i + 1] = acc[first + 1] + __uint_as_float(other.y);
      panel.values[i + 2] = acc[first + 2] + __uint_as_float(other.z);
      panel.values[i + 3] = acc[first + 3] + __uint_as_float(other.w);
    }
    if constexpr (Op::kHasBias) {
      if (bias != 0) panel.add_bias(bias, n, column + index * Tile::kPanelN);
    }
    panel.store_rows(epilogue.memory.panel(epilogue.group, index));
    epilogue.hand_over(index);
  }
  ++epilogue.tiles;
}

/// Compute role: every tile of this cluster.
template <class Op>
MK_DEVICE void shared_compute_role(const LaunchArguments& args, const GatherArguments& gather,
                                   const SharedMemory<typename Op::Tile>& memory, const GatherSchedule& schedule,
                                   int group) {
  using Tile = typename Op::Tile;
  const Images<Op> images{args, gather, 0};
  HalfSums<Tile> half{args, memory, part_of_block<Tile>()};
  const u32 steps = gather.order == kColumns ? args.world : 1;
  const u32 k_blocks = (images.first_k(half.part + 1) - images.first_k(half.part)) * steps;
  Trace trace(args, kComputeLane + group, threadIdx.x % 128 == 0);
  Epilogue<Op> epilogue{args, memory, group, trace};
  Ring<Tile> ring;
#pragma unroll 1
  for (u32 position = schedule.first(), next; position < schedule.positions(); position = next, ++half.turn) {
    next = schedule.next(position);
    const TileNote note = next_tile(args, memory, ring, trace);
    float acc[Tile::kGroupN / 2];
    multiply_tile<typename Op::Element>(args, memory, ring, group, k_blocks, acc, trace);
    // The compiler does not know that the products write until the wait above: what it makes of the sums it may make
    // before, unless they seem to be written here.
#pragma unroll
    for (float& sum : acc) asm volatile("" : "+f"(sum)::"memory");
    trace.end(kTraceMainloop, kSomePeer, note.index);
    trace.begin();
    if (group != (int)half.part) {
      half.give(acc);
    } else {
      half.take();
      finish_shared(epilogue, half, acc, note.column, gather.bias[note.index], gather.n[note.index]);
      half.end(next < schedule.positions(), group);
    }
    trace.end(kTraceEpilogue, kSomePeer, note.index);
  }
}

}  // namespace mk
