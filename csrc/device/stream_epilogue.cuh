#pragma once
// What becomes of a tile in registers: summed over the cluster, then over the ranks, then stored.
#include "device/epilogue.cuh"
#include "device/mailbox.cuh"
#include "device/stream_target.cuh"

namespace mk {

/// Compute role of one thread: from accumulators to results, slab by slab.
template <class Op>
struct StreamEpilogue {
  using Tile = typename Op::Tile;
  using Element = typename Op::Element;
  static constexpr int kMine = Tile::kMine, kUnits = Tile::kUnits;
  static constexpr int kOfBlock = Tile::kIsOfCluster ? kUnits / 2 : kUnits;  ///< units of a shared tile
  static constexpr int kAtOnce = kOfBlock < 8 ? kOfBlock : 8;  ///< more units would not fit into registers
  using Sums = float[kMine][kUnits * 4];
  using Partials = Unit[kMine][kUnits];
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const StreamPlan<Tile>& plan;
  const int group;
  Exchange<Tile> exchange;
  Mailbox<Tile> mailbox;
  const GatherArguments* gather = nullptr;
  bool given_up = false;
  u32 part = kAll;  ///< kIsOfCluster: the block of the cluster whose units of the tile are this thread's
  static constexpr u32 kAll = 2;

  MK_DEVICE bool has(int u) const {
    if constexpr (Tile::kIsOfCluster) return part == kAll || (u32)u / kOfBlock == part;
    return true;
  }
  MK_DEVICE u32 slab(int mine) const { return Tile::kPingPong ? mine : group; }
  MK_DEVICE u32 first_unit() const { return plan.part * kUnits; }
  /// Whether a unit is of the thread's upper row or of the lower one.
  MK_DEVICE u32 half(int u) const { return kUnits % 2 == 0 ? u % 2 : first_unit() % 2; }
  MK_DEVICE auto target(u32 tile) const {
    if constexpr (Op::kOperator == kAllGatherGemm) {
      return GatherTarget<Tile>(*gather, plan.column(tile));
    } else {
      return OnlyTarget<Tile>{args, plan, tile};
    }
  }
  template <class Target>
  MK_DEVICE u32 column(const Target& to, u32 slab, int u) const {
    return to.column() + (Tile::kSlabsAreRows ? 0 : slab * Tile::kGroupN) + (first_unit() + u) / 2 * 16;
  }
  MK_DEVICE RowPair rows(u32 tile, u32 slab) const {
    const u32 in_tile = (Tile::kSlabsAreRows ? slab * 64 : 0) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    return RowPair::template of<Op::kScatters>(args, plan.row(tile) + in_tile);
  }
  MK_DEVICE u64 place(u32 tile, u32 slab) const {
    return mailbox.offset(tile, slab) + first_unit() * Mailbox<Tile>::kUnitBytes;
  }

  /// Accumulators of unit `u` of the whole slab; both indices are constants.
  static MK_DEVICE float value(const float* acc, int u, int i) {
    return acc[u / 2 * 8 + u % 2 * 2 + i / 2 * 4 + i % 2];
  }

  /// This block's units, summed over the blocks of the cluster in their order. `first`: exchange of this thread.
  template <int kAccumulators>
  MK_DEVICE void add_up(const float (&acc)[kMine][kAccumulators], bool first, bool reused, Sums& sum) const {
    if constexpr (Tile::kSplit == 1) {
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
#pragma unroll
        for (int i = 0; i < kUnits * 4; ++i) sum[m][i] = value(acc[m], i / 4, i % 4);
      }
    } else {
      exchange.begin(first);
      Sums own;
#pragma unroll
      for (int m = 0; m < kMine; ++m) give(acc[m], slab(m), own[m]);
      exchange.await_partials();
#pragma unroll
      for (int m = 0; m < kMine; ++m) collect(own[m], slab(m), sum[m]);
      exchange.end(plan.part, reused);
    }
  }
  MK_DEVICE void give(const float* acc, u32 slab, float (&own)[kUnits * 4]) const {
#pragma unroll
    for (u32 to = 0; to < Tile::kSplit; ++to) {
      const u32 slot = plan.part < to ? plan.part : plan.part - 1, full = map_shared(exchange.full(), to);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = value(acc, to * kUnits + u, i);
        if (to != plan.part) {
          store_async(map_shared(exchange.at(slot, slab, u), to), v[0], v[1], v[2], v[3], full);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) own[u * 4 + i] = v[i];
        }
      }
    }
  }
  MK_DEVICE void collect(const float (&own)[kUnits * 4], u32 slab, float (&sum)[kUnits * 4]) const {
#pragma unroll
    for (int i = 0; i < kUnits * 4; ++i) sum[i] = 0.f;
#pragma unroll
    for (u32 from = 0; from < Tile::kSplit; ++from) {
      const u32 slot = from < plan.part ? from : from - 1;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float v[4] = {own[u * 4], own[u * 4 + 1], own[u * 4 + 2], own[u * 4 + 3]};
        if (from != plan.part) {
          const Vector4 loaded = load_shared_vector(exchange.at(slot, slab, u));
          v[0] = __uint_as_float(loaded.x), v[1] = __uint_as_float(loaded.y);
          v[2] = __uint_as_float(loaded.z), v[3] = __uint_as_float(loaded.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[u * 4 + i] += v[i];
      }
    }
  }

  MK_DEVICE void add_bias(u32 tile, u32 slab, float (&sum)[kUnits * 4]) const {
    const auto to = target(tile);
    const u32* bias = reinterpret_cast<const u32*>(to.bias());
    if (Op::kOperator == kAllGatherGemm && bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2 * kUnits; ++i) {
      const u32 at = column(to, slab, i / 2) + i % 2 * 8 + threadIdx.x % 4 * 2;
      if (at >= to.n()) continue;  // n is a multiple of 8
      const u32 pair = __ldg(bias + at / 2);
      sum[i * 2] += Element::low(pair), sum[i * 2 + 1] += Element::high(pair);
    }
  }

  /// Two lanes exchange halves, so that each stores four columns in a row.
  template <int kValues>
  MK_DEVICE void store(u32 tile, u32 slab, int first, const RowPair& rows, const float (&sum)[kValues]) const {
    const auto to = target(tile);
    u16* out = reinterpret_cast<u16*>(to.out());
    const u32 quarter = threadIdx.x % 4;
    const bool odd = quarter & 1;
#pragma unroll
    for (int u = 0; u < kValues / 4; ++u) {
      const u32 left = Element::pack(sum[u * 4], sum[u * 4 + 1]), right = Element::pack(sum[u * 4 + 2], sum[u * 4 + 3]);
      const u32 other = __shfl_xor_sync(~0u, odd ? left : right, 1);
      const u32 at = column(to, slab, first + u) + (odd ? 8 + (quarter - 1) * 2 : quarter * 2);
      const u32 h = half(first + u);
      if (!rows.is_valid(h) || rows.owner_of(h) != args.rank || at >= to.n()) continue;
      store_global(reinterpret_cast<Vector2*>(out + (u64)rows.out_row_of(h) * to.out_stride() + at),
                   odd ? Vector2{other, right} : Vector2{left, other});
    }
  }

  /// This rank's partials, rounded once for all who add them, this rank included: so all ranks get the same bits.
  MK_DEVICE void round(const Sums& sum, Partials& own) const {
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        own[m][u].x = never_zero(Element::pack(sum[m][u * 4], sum[m][u * 4 + 1]));
        own[m][u].y = never_zero(Element::pack(sum[m][u * 4 + 2], sum[m][u * 4 + 3]));
      }
    }
  }

  /// To the warps that send.
  MK_DEVICE void hand_over(u32 turn, const Partials& own, Trace& trace) const {
    const HandOver<Tile> handed{args, memory};
    handed.await_free(turn, trace);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) store_shared_pair(handed.at(turn, group, u, threadIdx.x % 128), own[0][u]);
    mbarrier_arrive(handed.full(turn));
  }

  /// `paced`: spread over the time of the next tile; a burst on the link would stall the loads of this SM.
  MK_DEVICE void send(u32 tile, const Partials& own, bool paced) const {
    if (given_up) return;
    u64 due_ns = paced ? global_timer_ns() : 0;
#pragma unroll 1
    for (u32 step = 1; step < args.world; ++step) {
      const u32 peer = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
        const RowPair rows = this->rows(tile, slab(m));
        u8* to = mailbox.slot(peer, args.rank) + place(tile, slab(m));
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const u32 h = half(u);
          if (!rows.is_valid(h) || (Op::kScatters && rows.owner_of(h) != peer) || !has(u)) continue;
          if (paced) {
            while (global_timer_ns() < due_ns) __nanosleep(32);
            due_ns += args.pace_ns;
          }
          // Relaxed: each word is data and flag in one.
          store_relaxed_sys(reinterpret_cast<Unit*>(to + u * Mailbox<Tile>::kUnitBytes), own[m][u]);
        }
      }
    }
  }

  /// The sum over all ranks in rank order, in fp32, of the rows that this rank gets; some units at a time.
  MK_DEVICE void finish(u32 tile, const Partials& own) {
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const RowPair rows = this->rows(tile, slab(m));
#pragma unroll
      for (int first = 0; first < kUnits; first += kAtOnce) {
        if (has(first)) finish_some(tile, slab(m), first, rows, own[m]);
      }
    }
  }
  MK_DEVICE void finish_some(u32 tile, u32 slab, int first, const RowPair& rows, const Unit (&own)[kUnits]) {
    const u64 offset = place(tile, slab) + first * Mailbox<Tile>::kUnitBytes;
    bool wanted[kAtOnce];
    float sum[kAtOnce * 4];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      wanted[u] = rows.is_valid(half(first + u)) && rows.owner_of(half(first + u)) == args.rank;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce * 4; ++i) sum[i] = 0.f;
#pragma unroll 1
    for (u32 source = 0; source < args.world; ++source) {
      Unit got[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) got[u] = own[first + u];
      if (source != args.rank && !given_up) {
        u8* from = mailbox.slot(args.rank, source) + offset;
        given_up = !take_units<Op>(args, from, wanted, WaitSite{kComputeRole, source, tile}, got);
        if (!given_up) clear_units<Op>(from, wanted);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        sum[u * 4] += Element::low(got[u].x), sum[u * 4 + 1] += Element::high(got[u].x);
        sum[u * 4 + 2] += Element::low(got[u].y), sum[u * 4 + 3] += Element::high(got[u].y);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce * 4; ++i) sum[i] *= args.scale;
    store(tile, slab, first, rows, sum);
  }
};

}  // namespace mk
