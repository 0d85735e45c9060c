#pragma once
// All-gather: where shards lie in the workspace, and what of them has come.
#include "device/epilogue.cuh"
#include "device/gather_schedule.cuh"

namespace mk {

/// A tile's shared memory and, behind it, the barriers of the rings through which shards are moved. The rings lie where
/// stages and panels do: a block moves shards before it computes.
template <class Base>
struct GatherTile : Base {
  static constexpr u32 kChunkBytes = ChunkWalk::kChunkBytes;
  static constexpr u32 kSlotsThatFit = Base::kBarrierOffset / kChunkBytes;
  static constexpr u32 kRingSlots = kSlotsThatFit < 12 ? kSlotsThatFit : 12;
  static constexpr u32 kCopySlots = kRingSlots / 3;
  static constexpr u32 kPushSlots = kRingSlots - kCopySlots;
  static constexpr u32 kRingBarrierOffset = (Base::kSharedBytes - 1024 + 7) / 8 * 8;
  static constexpr u32 kMovedOffset = kRingBarrierOffset + kRingSlots * 8;  ///< barrier: the block moves nothing more
  static constexpr int kSharedBytes = Base::kSharedBytes + 112;
  static_assert(1024 + kMovedOffset + 8 <= kSharedBytes && kSharedBytes <= 232448, "shared memory of one SM");
};

/// One launch: its arguments and its epoch, and where things lie in the workspaces.
template <class Tile>
struct Gathering {
  const LaunchArguments& args;
  const GatherArguments& gather;
  u32 epoch;

  MK_DEVICE u8* arena(u32 at) const {
    if (gather.landing != 0) return reinterpret_cast<u8*>(gather.landing);  // the copy engine's: only of this rank
    return reinterpret_cast<u8*>(args.workspace[at] + args.region_offset + (epoch & 1) * args.region_bytes);
  }
  MK_DEVICE u32 shard_rows() const { return gather.order == kColumns ? args.m : args.segments * args.segment_rows; }
  MK_DEVICE u64 shard_bytes() const { return (u64)shard_rows() * args.k[0] * 2; }
  /// kApart, kColumns: a rank keeps no copy of its own shard; the others' lie in the order in which they come.
  MK_DEVICE u32 slot(u32 at, u32 source) const { return source > at ? source - at - 1 : source + args.world - at - 1; }

  MK_DEVICE u32 group_of(u32 row) const { return row / gather.group_rows; }
  MK_DEVICE u32 last_group() const { return (shard_rows() - 1) / gather.group_rows; }
  /// Raised by `source` (its block `part`, or its copy engine) when rows of the group have come to rank `at`, and those
  /// of all groups before it.
  MK_DEVICE u32* flag(u32 at, u32 source, u32 group, u32 part) const {
    return Staging<Tile>{args, epoch}.flag(at, kPartialReady, source, group * gather.parts + part);
  }

  /// Where the copy engine takes the epoch from, to raise a flag with it. A rank has no other use for these flags.
  MK_DEVICE u32* sending() const { return Staging<Tile>{args, epoch}.flag(args.rank, kPartialReady, args.rank, 0); }

  /// Calls visit(offset in a gathered tensor, offset in the run, bytes) for the pieces of a run of one shard.
  template <class Visit>
  MK_DEVICE void in_gathered(u32 source, u64 offset, u32 bytes, Visit&& visit) const {
    const u64 piece_bytes = (u64)(gather.order == kColumns ? 1 : args.segment_rows) * args.k[0] * 2;
    u64 piece = offset < piece_bytes ? 0 : offset / piece_bytes;
    u64 within = offset - piece * piece_bytes;
    for (u32 done = 0; done < bytes; ++piece, within = 0) {
      const u64 rest = piece_bytes - within;
      const u32 size = rest < bytes - done ? (u32)rest : bytes - done;
      visit((piece * args.world + source) * piece_bytes + within, done, size);
      done += size;
    }
  }
  /// The same for the place of a shard in the arena of rank `at`.
  template <class Visit>
  MK_DEVICE void in_arena(u32 at, u32 source, u64 offset, u32 bytes, Visit&& visit) const {
    if (gather.order == kTogether) {
      in_gathered(source, offset, bytes, visit);
    } else {
      visit(slot(at, source) * shard_bytes() + offset, 0u, bytes);
    }
  }
};

/// Wait for a count that another thread of this block raises.
template <class Count>
MK_DEVICE u32 wait_count(const LaunchArguments& args, Count&& read, u32 expected, Role role) {
  u32 seen = read();
  if (reached(seen, expected)) return seen;
  const u64 start_ns = global_timer_ns();
  while (!reached(seen = read(), expected)) {
    if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, role, expected);
  }
  return seen;
}

/// What one thread, or the `kLanes` lanes of one warp together, know of the shards of the others.
template <class Op, u32 kLanes>
struct Arrivals {
  using Tile = typename Op::Tile;
  const Gathering<Tile>& launch;
  const Role role;
  u32 known = ~0u;  ///< source of which `ready` groups have come
  u32 ready = 0;
  u32 met = 0;      ///< bit set of peers that have entered this very launch
  bool given_up;

  MK_DEVICE Arrivals(const Gathering<Tile>& launch, Role role)
      : launch(launch), role(role), given_up(launch.epoch == 0) {}

  static MK_DEVICE bool all(bool mine) { return kLanes == 1 ? mine : __all_sync(~0u, mine); }
  static MK_DEVICE u32 lane() { return kLanes == 1 ? 0 : threadIdx.x % 32; }

  /// Everything of the source at once: what most tiles find.
  MK_DEVICE bool all_here(u32 source, u32 group) const {
    bool here = true;
    for (u32 part = lane(); part < launch.gather.parts && here; part += kLanes) {
      // pairs-with: shard_ready acquire (push_signal_role -> arrival_role), scope sys
      here = reached(load_acquire_sys(launch.flag(launch.args.rank, source, group, part)), launch.epoch);
    }
    return all(here);
  }

  /// Groups up to `group` of the source are here, or the launch has been given up. May be read by bulk copies.
  MK_DEVICE void need(u32 source, u32 group) {
    if (given_up || (source == known && group < ready)) return;
    const LaunchArguments& args = launch.args;
    if (source != args.rank && !(met >> source & 1)) {
      given_up = !all(meet_peer<Op::kOperator>(args, launch.epoch, WaitSite{role, source, group}));
      met |= 1u << source;
    }
    const u32 last = launch.last_group();
    if (!given_up && all_here(source, last)) {
      group = last;
    } else if (!given_up) {
      bool came = true;
      for (u32 part = lane(); part < launch.gather.parts && came; part += kLanes) {
        const u32* flag = launch.flag(args.rank, source, group, part);
        // pairs-with: shard_ready acquire (push_signal_role -> arrival_role), scope sys
        came = wait_until<Op::kOperator>(args, flag, launch.epoch, WaitSite{role, source, group});
      }
      given_up = !all(came);
    }
    known = source;
    ready = group + 1;
    fence_proxy_async();  // flags were read by generic loads, the rows are read by bulk copies
  }
};

/// The launch must not end before the gate of the copy engine has read its epoch.
template <class Op>
MK_DEVICE void wait_for_gate(const Gathering<typename Op::Tile>& launch) {
  if (launch.epoch == 0) return;
  const LaunchArguments& args = launch.args;
  // pairs-with: sending acquire (gate_role -> signal_role), scope sys
  wait_until<Op::kOperator>(args, launch.sending(), launch.epoch, WaitSite{kSignalRole, args.rank, 0});
}

/// Arrival role, one warp: what the load role will read next is here. It looks ahead, so that flags cost the mainloop
/// nothing, and asks for all flags of a group at once.
template <class Op>
MK_DEVICE void arrival_role(const Gathering<typename Op::Tile>& launch, const SharedMemory<typename Op::Tile>& memory,
                            const GatherSchedule& schedule) {
  const LaunchArguments& args = launch.args;
  Arrivals<Op, 32> arrivals(launch, kLoadRole);
  const bool leads = threadIdx.x % 32 == 0;
  Trace trace(args, kSignalLane, leads);
  u32 told = 0;
  const auto tell = [&](u32 source, u32 tile) {
    trace.end_wait(kTraceReceive, source, tile);
    ++told;
    __syncwarp();  // the lanes' acquired flags come before the leader's release
    // pairs-with: arrived release (arrival_role -> load_role), scope cta
    if (leads) store_release_shared(memory.sent_count(0), told);
  };
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<typename Op::Tile>(launch.gather, position);
    trace.begin();
    if (schedule.order == kApart) {
      if (place.owner == args.rank) continue;
      arrivals.need(place.owner, launch.group_of(place.last_row));
      tell(place.owner, position);
    } else if (schedule.order == kTogether) {
      if (told == 0) {
        for (u32 source = 0; source < args.world; ++source) arrivals.need(source, launch.last_group());
      }
      tell(args.rank, position);
    } else {
      for (u32 step = 1; step < args.world; ++step) {
        const u32 source = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
        arrivals.need(source, launch.group_of(place.last_row));
        tell(source, position);
      }
    }
  }
}

}  // namespace mk
