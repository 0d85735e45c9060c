#pragma once
// All-gather: where shards lie in the workspace, and what of them has come.
#include "device/epilogue.cuh"
#include "device/gather_schedule.cuh"

namespace mk {

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
};

/// What one thread knows of the shards of the others.
template <class Op>
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

  /// Everything of the source at once: what most tiles find.
  MK_DEVICE bool all_here(u32 source, u32 group) const {
    bool here = true;
    for (u32 part = 0; part < launch.gather.parts && here; ++part) {
      // pairs-with: shard_ready acquire (copy_engine -> engine_arrivals_role), scope sys
      here = reached(load_acquire_sys(launch.flag(launch.args.rank, source, group, part)), launch.epoch);
    }
    return here;
  }

  /// Groups up to `group` of the source are here, or the launch has been given up. May be read by bulk copies.
  MK_DEVICE void need(u32 source, u32 group) {
    if (given_up || (source == known && group < ready)) return;
    const LaunchArguments& args = launch.args;
    if (source != args.rank && !(met >> source & 1)) {
      given_up = !meet_peer<Op::kOperator>(args, launch.epoch, WaitSite{role, source, group});
      met |= 1u << source;
    }
    const u32 last = launch.last_group();
    if (!given_up && all_here(source, last)) {
      group = last;
    } else if (!given_up) {
      bool came = true;
      for (u32 part = 0; part < launch.gather.parts && came; ++part) {
        const u32* flag = launch.flag(args.rank, source, group, part);
        // pairs-with: shard_ready acquire (copy_engine -> engine_arrivals_role), scope sys
        came = wait_until<Op::kOperator>(args, flag, launch.epoch, WaitSite{role, source, group});
      }
      given_up = !came;
    }
    known = source;
    ready = group + 1;
    fence_proxy_async();  // flags were read by generic loads, the rows are read by bulk copies
  }
};

/// After the last rows have been read: were they still what had come? See `disown_transfers`.
template <OperatorId kOperator>
MK_DEVICE void audit_transfers(const LaunchArguments& args, u32 epoch) {
  // pairs-with: lost_peer acquire (gate_role -> audit_role), scope sys
  const u32 lost = load_acquire_sys(&workspace_header(args, args.rank)->lost_peer);
  if (lost != 0) report_fault<kOperator>(args, kPeerGaveUp, WaitSite{kCopyRole, lost - 1, 0}, epoch, lost, 0);
}

/// The launch must not end before the gate of the copy engine has read its epoch.
template <class Op>
MK_DEVICE void wait_for_gate(const Gathering<typename Op::Tile>& launch) {
  if (launch.epoch == 0) return;
  const LaunchArguments& args = launch.args;
  // pairs-with: sending acquire (gate_role -> signal_role), scope sys
  wait_until<Op::kOperator>(args, launch.sending(), launch.epoch, WaitSite{kSignalRole, args.rank, 0});
}

}  // namespace mk
