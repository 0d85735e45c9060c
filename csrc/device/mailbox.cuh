#pragma once
// One-shot exchange of partials, straight from registers: data words are their own flags.
//
// A mailbox word is zero until its sender stores a pair of elements there, which is never zero: a pair of zeros is sent
// as (0, -0). The one thread that waits for the word polls it until it is not zero, and stores zero back. So there is
// no flag, no fence and no epoch in the data, and what is left of a launch is what the next user expects: zeros. Words
// are written again two launches later; RollCall says why they are free by then.
#include "device/comm.cuh"

namespace mk {

/// Four values of one row, columns c, c + 1, c + 8, c + 9, as two words: the unit of exchange.
using Unit = Vector2;

MK_DEVICE u32 never_zero(u32 pair) { return pair == 0 ? 0x80000000u : pair; }

/// Where units lie: [parity of the epoch][source][tile][slab][unit][thread of the math group].
template <class Tile>
struct Mailbox {
  static constexpr u32 kUnitBytes = 128 * sizeof(Unit);
  static constexpr u32 kSlabBytes = Tile::kUnitsOfSlab * kUnitBytes;
  const LaunchArguments& args;
  u32 epoch;

  MK_DEVICE u8* slot(u32 at, u32 source) const {
    const u32 source_slot = source > at ? source - at - 1 : source + args.world - at - 1;
    const u64 number = (u64)(epoch & 1) * (args.world - 1) + source_slot;
    return reinterpret_cast<u8*>(args.workspace[at] + args.mailbox_offset + number * args.mailbox_bytes);
  }
  /// This thread's place in a slot for unit 0 of a slab; the next unit lies kUnitBytes on.
  MK_DEVICE u64 offset(u32 tile, u32 slab) const { return offset_of(tile, slab, threadIdx.x % 128); }
  MK_DEVICE u64 offset_of(u32 tile, u32 slab, u32 thread) const {
    return (u64)(tile * Tile::kSlabs + slab) * kSlabBytes + thread * sizeof(Unit);
  }
};

/// Units of one thread at one source, those that are `wanted`: how many are not here yet.
template <class Tile, int kUnits>
MK_DEVICE u32 poll_units(const u8* from, const bool (&wanted)[kUnits], Unit (&got)[kUnits]) {
  u32 missing = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (!wanted[u]) continue;
    // Relaxed: a word that is not zero is the data itself.
    got[u] = load_relaxed_sys(reinterpret_cast<const Unit*>(from + u * Mailbox<Tile>::kUnitBytes));
    missing += got[u].x == 0 || got[u].y == 0;
  }
  return missing;
}

template <int kUnits>
MK_DEVICE constexpr u32 count_wanted(const bool (&wanted)[kUnits]) {
  u32 count = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) count += wanted[u];
  return count;
}

/// Polls until all are here. False where the launch has been given up.
template <class Op, int kUnits>
MK_DEVICE bool take_units(const LaunchArguments& args, const u8* from, const bool (&wanted)[kUnits], WaitSite site,
                          Unit (&got)[kUnits]) {
  u64 start_ns = 0;
  u32 spins = 0, missing = poll_units<typename Op::Tile>(from, wanted, got);
  while (missing != 0) {
    if (++spins % 64 == 0) {
      if (load_relaxed_gpu(&workspace_header(args, args.rank)->abort) != kNoFault) return false;
      const u64 now_ns = global_timer_ns();
      if (start_ns == 0) start_ns = now_ns;
      if (now_ns - start_ns > args.deadline_ns) {
        const u32 expected = count_wanted(wanted);
        report_fault<Op::kOperator>(args, kPeerTimeout, site, expected, expected - missing, now_ns - start_ns);
        return false;
      }
    }
    missing = poll_units<typename Op::Tile>(from, wanted, got);
  }
  return true;
}

/// Hands words back to their sender.
template <class Op, int kUnits>
MK_DEVICE void clear_units(u8* from, const bool (&wanted)[kUnits]) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (!wanted[u]) continue;
    // Relaxed: the roll call of the next launch releases.
    store_relaxed_sys(reinterpret_cast<Unit*>(from + u * Mailbox<typename Op::Tile>::kUnitBytes), Unit{0, 0});
  }
}

}  // namespace mk
