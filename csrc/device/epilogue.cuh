#pragma once
// What happens to one panel of accumulators before it leaves the block.
#include "device/comm.cuh"

namespace mk {

enum class Activation { kNone, kRelu, kGeluTanh, kGeluErf, kSilu };

/// Source: torch.nn.functional; fp32 throughout.
template <Activation kActivation>
MK_DEVICE float activate(float x) {
  if constexpr (kActivation == Activation::kRelu) return x < 0.f ? 0.f : x;  // keeps NaN, as torch does
  if constexpr (kActivation == Activation::kSilu) return __fdividef(x, 1.f + __expf(-x));
  if constexpr (kActivation == Activation::kGeluErf) return 0.5f * x * (1.f + erff(x * 0.70710678f));
  if constexpr (kActivation == Activation::kGeluTanh) {
    const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
    return x * (1.f - __fdividef(1.f, __expf(2.f * inner) + 1.f));  // (1 + tanh) / 2 = 1 - 1 / (exp(2 inner) + 1)
  }
  return x;
}

/// One thread's part of a panel. Fragment z covers 16 columns: values 8z, 8z+1 lie in row lane/4, columns
/// 16z + 2 (lane%4) and the next; 8z+2, 8z+3 eight rows below; 8z+4.. eight columns to the right.
template <class Element, class Tile>
struct Panel {
  static constexpr int kFragments = Tile::kPanelN / 16;
  static constexpr int kValues = Tile::kPanelN / 2;
  float values[kValues];

  /// Offset of this thread's part of fragment 0 in a panel kept in fragment order; the next lies 512 bytes on. A warp's
  /// fragments fill the same bytes as its 16 rows.
  static MK_DEVICE u32 fragment_offset() {
    return threadIdx.x / 32 % 4 * (kFragments * 512) + threadIdx.x % 32 * 16;
  }

  MK_DEVICE Vector4 packed(int fragment) const {
    const float* v = values + fragment * 8;
    return Vector4{Element::pack(v[0], v[1]), Element::pack(v[2], v[3]), Element::pack(v[4], v[5]),
                   Element::pack(v[6], v[7])};
  }
  MK_DEVICE void set(int fragment, Vector4 partial) {
    float* v = values + fragment * 8;
    v[0] = Element::low(partial.x), v[1] = Element::high(partial.x);
    v[2] = Element::low(partial.y), v[3] = Element::high(partial.y);
    v[4] = Element::low(partial.z), v[5] = Element::high(partial.z);
    v[6] = Element::low(partial.w), v[7] = Element::high(partial.w);
  }
  MK_DEVICE void add(int fragment, Vector4 partial) {
    float* v = values + fragment * 8;
    v[0] += Element::low(partial.x), v[1] += Element::high(partial.x);
    v[2] += Element::low(partial.y), v[3] += Element::high(partial.y);
    v[4] += Element::low(partial.z), v[5] += Element::high(partial.z);
    v[6] += Element::low(partial.w), v[7] += Element::high(partial.w);
  }
  MK_DEVICE void add_bias(u64 address, u32 n, i32 column) {
    const u32* bias = reinterpret_cast<const u32*>(address);
#pragma unroll
    for (int i = 0; i < 2 * kFragments; ++i) {
      const u32 at = column + i * 8 + threadIdx.x % 4 * 2;
      if (at >= n) continue;  // n is even
      const u32 pair = __ldg(bias + at / 2);
      values[i * 4] += Element::low(pair), values[i * 4 + 1] += Element::high(pair);
      values[i * 4 + 2] += Element::low(pair), values[i * 4 + 3] += Element::high(pair);
    }
  }

  /// Row-major, swizzled as the result's tensor map is.
  MK_DEVICE void store_rows(u32 panel) const {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int z = 0; z < kFragments; ++z) {
      store_matrix(panel + swizzled<Tile::kRowBytes>(row, z * 2 + lane / 16), packed(z));
    }
  }
  MK_DEVICE void store_fragments(u32 panel) const {
#pragma unroll
    for (int z = 0; z < kFragments; ++z) store_shared_vector(panel + fragment_offset() + z * 512, packed(z));
  }
};

/// Adds the accumulators of panel `index`. Registers have no addresses: where the compiler does not know the index,
/// there is code for each panel.
template <class Element, class Tile>
MK_DEVICE void add_accumulators(const float* acc, int index, Panel<Element, Tile>& sum) {
  constexpr int kValues = Panel<Element, Tile>::kValues;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    if (panel != index) continue;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum.values[i] += acc[panel * kValues + i];
  }
}

/// The sum of panel `index` over all ranks, in rank order, in fp32. `acc` are this rank's accumulators. The partial of
/// the lowest other rank lies in shared memory, at `shared`; further ones in staging slots; `slot` is the next rank's,
/// of even epochs. The first two of a sum may change places, so the partial in shared memory always comes first.
template <class Element, class Tile>
MK_DEVICE void sum_ranks(const LaunchArguments& args, const SharedMemory<Tile>& memory, u32 shared, const u8* slot,
                         const float* acc, int index, Panel<Element, Tile>& sum) {
  using Values = Panel<Element, Tile>;
  const u32 mine = Values::fragment_offset(), own = args.rank == 0 ? 1 : args.rank;
#pragma unroll
  for (int z = 0; z < Values::kFragments; ++z) sum.set(z, load_shared_vector(shared + mine + z * 512));
#pragma unroll 1
  for (u32 source = 1; source < args.world; ++source) {
    if (source == own) {
      add_accumulators(acc, index, sum);
      continue;
    }
    const u64 ranks_on = (source > args.rank ? source : source + args.world) - args.rank - 1;
    const u64 region = (load_shared(memory.epoch()) & 1) * args.region_bytes;
    const u8* partial = slot + region + ranks_on * args.slots * Tile::kTileBytes;
#pragma unroll
    for (int z = 0; z < Values::kFragments; ++z) sum.add(z, load_vector(partial + mine + z * 512));
  }
  __syncwarp();  // this warp's rows will be stored over what its lanes have read
}

/// Compute role: the epilogue of one tile.
template <class Op>
struct Epilogue {
  using Tile = typename Op::Tile;
  using Values = Panel<typename Op::Element, Tile>;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const int group;
  Trace& trace;
  u32 tiles = 0, own_tiles = 0;
  /// Panels that have code of their own in reductions, so that the tensor cores wait less long. With a bias that is too
  /// much to compile.
  static constexpr int kWrittenOut = Op::kHasBias ? 1 : Tile::kPanels;

  MK_DEVICE void hand_over(int index) const {
    fence_proxy_async_shared();
    mbarrier_arrive(memory.panel_full(group, index));
  }
  MK_DEVICE void wait_empty(int index) const {
    wait_phase(args, memory.panel_empty(group, index), (tiles & 1) ^ 1, kComputeRole, trace);
  }
  /// Not in place: accumulators written outside wgmma make ptxas serialise all of them.
  MK_DEVICE void take(const float* acc, i32 column, int index, Values& panel) const {
#pragma unroll
    for (int i = 0; i < Values::kValues; ++i) panel.values[i] = acc[index * Values::kValues + i];
    if constexpr (Op::kHasBias) panel.add_bias(args.bias, args.n, column + index * Tile::kPanelN);
  }

  /// A tile that stays here and needs no one else.
  MK_DEVICE void finish_local(const float* acc, i32 column) {
#pragma unroll
    for (int index = 0; index < Tile::kPanels; ++index) {
      wait_empty(index);
      Values panel;
      take(acc, column, index, panel);
      if constexpr (Op::kActivation != Activation::kNone) {
#pragma unroll
        for (int i = 0; i < Values::kValues; ++i) panel.values[i] = activate<Op::kActivation>(panel.values[i]);
      }
      panel.store_rows(memory.panel(group, index));
      hand_over(index);
    }
    ++tiles;
  }

  /// A partial for the tile's owner.
  MK_DEVICE void finish_partial(const float* acc, i32 column) {
#pragma unroll kWrittenOut
    for (int index = 0; index < Tile::kPanels; ++index) {
      wait_empty(index);
      Values panel;
      // Adding to -0 changes nothing, not even a sign.
#pragma unroll
      for (int i = 0; i < Values::kValues; ++i) panel.values[i] = -0.f;
      add_accumulators(acc, index, panel);
      if constexpr (Op::kHasBias) panel.add_bias(args.bias, args.n, column + index * Tile::kPanelN);
      panel.store_fragments(memory.panel(group, index));
      hand_over(index);
    }
    ++tiles;
  }

  /// An own tile, the sum of every rank's part.
  MK_DEVICE void finish_own(const float* acc, u32 tile, i32 column) {
    const Staging<Tile> even{args, 0};
    // Of two ranks the other's partial is in shared memory: no division to find its slot.
    const u32 next = args.rank + 1 < args.world ? args.rank + 1 : 0;
    const u8* slot = args.world > 2 ? even.partial_slot(args.rank, next, tile) : nullptr;
#pragma unroll kWrittenOut
    for (int index = 0; index < Tile::kPanels; ++index) {
      const u32 shared = memory.panel(group, index), in_tile = (group * Tile::kPanels + index) * Tile::kPanelBytes;
      wait_phase(args, memory.panel_staged(group, index), own_tiles & 1, kComputeRole, trace);
      Values panel;
      sum_ranks(args, memory, shared, slot + in_tile, acc, index, panel);
      if constexpr (Op::kHasBias) panel.add_bias(args.bias, args.n, column + index * Tile::kPanelN);
      if (args.scale != 1.f) {
#pragma unroll
        for (int i = 0; i < Values::kValues; ++i) panel.values[i] *= args.scale;
      }
      panel.store_rows(shared);
      hand_over(index);
    }
    ++tiles;
    ++own_tiles;
  }
};

/// Compute role: every tile of this block; the epilogue of one overlaps the loads of the next.
template <class Op>
MK_DEVICE void compute_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory, int group) {
  using Tile = typename Op::Tile;
  const u32 k_blocks = count_k_blocks(args);
  Trace trace(args, kComputeLane + group, threadIdx.x % 128 == 0);
  Epilogue<Op> epilogue{args, memory, group, trace};
  Ring<Tile> ring;
  float acc[Tile::kGroupN / 2];
#pragma unroll
  for (int i = 0; i < Tile::kGroupN / 2; ++i) acc[i] = 0.f;  // once: see multiply_blocks
  // No `while (true)`: under one, ptxas gives the role only the registers of the launch, and spills.
  for (TileNote note = next_tile(args, memory, ring, trace); note.index != TileNote::kEnd;
       note = next_tile(args, memory, ring, trace)) {
    const i32 column = note.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN);
    multiply_blocks<typename Op::Element, true>(args, memory, ring, group, k_blocks, acc, trace);
    const u32 owner = note.index & TileNote::kPeer ? kSomePeer : args.rank, index = note.index & ~TileNote::kPeer;
    trace.end(kTraceMainloop, owner, index);
    trace.begin();
    if constexpr (!Op::kReduces) {
      epilogue.finish_local(acc, column);
    } else {
      if (note.index & TileNote::kPeer) {
        epilogue.finish_partial(acc, column);
      } else {
        epilogue.finish_own(acc, note.index, column);
      }
    }
    trace.end(kTraceEpilogue, owner, index);
  }
}

}  // namespace mk
