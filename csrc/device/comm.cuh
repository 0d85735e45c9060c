#pragma once
// Between the ranks: where staged tiles and flags lie, the threads that send tiles, and the thread that tells of them.
#include "device/schedule.cuh"
#include "device/tile.cuh"

namespace mk {

/// What becomes of a finished sum: it stays with its owner, or every rank gets it, stored straight into its result or
/// staged in its workspace and copied out there, or stored once to a multicast address behind which all results lie.
enum class Broadcast { kNone, kDirect, kStaged, kMulticast };

/// Addresses in the workspaces of all ranks, for one launch.
template <class Tile>
struct Staging {
  const LaunchArguments& args;
  u32 epoch;

  MK_DEVICE u8* region(u32 at) const {
    return reinterpret_cast<u8*>(args.workspace[at] + args.region_offset + (epoch & 1) * args.region_bytes);
  }
  /// A rank stages nothing with itself: sources are counted from the rank after.
  MK_DEVICE u64 slot_offset(u32 at, u32 source, u32 index) const {
    const u32 source_slot = source > at ? source - at - 1 : source + args.world - at - 1;
    return (u64)(source_slot * args.slots + index % args.slots) * Tile::kTileBytes;
  }
  MK_DEVICE u8* partial_slot(u32 at, u32 source, u32 index) const {
    return region(at) + slot_offset(at, source, index);
  }
  MK_DEVICE u8* final_slot(u32 at, u32 source, u32 index) const {
    return region(at) + args.final_offset + slot_offset(at, source, index);
  }
  MK_DEVICE u32* flag(u32 at, FlagKind kind, u32 source, u32 index) const {
    u32* words = reinterpret_cast<u32*>(args.workspace[at] + sizeof(WorkspaceHeader));
    return words + ((u64)(kind * args.world + source) * args.max_tiles + index);
  }
};

/// One panel of a finished tile into this rank's result, or into the residual that the result is added to.
MK_DEVICE void deliver(const LaunchArguments& args, u32 panel, i32 x, i32 y, i32 z) {
  if (args.adds) {
    tensor_add(&args.out, panel, x, y, z);
  } else {
    tensor_store(&args.out, panel, x, y, z);
  }
}

/// Store thread of one math group: receives the partials of own tiles, sends the panels of all tiles.
template <class Op>
struct ReduceSink {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  Staging<Tile> staging;
  const int group;
  u32 sent = 0;
  bool peers_known = false;  ///< all have entered this very launch
  u64 first_panel_ns = 0;
  bool given_up = false;

  MK_DEVICE ReduceSink(const LaunchArguments& args, const SharedMemory<Tile>& memory, int group)
      : args(args), memory(memory), staging{args, 0}, group(group) {
    wait_phase(args, memory.entered(), 0, kStoreRole);
    staging.epoch = load_shared(memory.epoch());
    given_up = staging.epoch == 0;  // the launch must not run: its tiles are computed, so that it drains, and not sent
  }

  MK_DEVICE void wait(const u32* flag, u32 epoch, u32 peer, u32 tile) {
    if (given_up) return;
    // pairs-with: named at each call
    given_up = !wait_until<Op::kOperator>(args, flag, epoch, WaitSite{kStoreRole, peer, tile});
  }

  MK_DEVICE void begin(const Task& task) {
    const bool own = task.owner == args.rank;
    if (own && !peers_known) meet_peers(task);
    await_peers(task, own);
    if (own) load_partials(task);
  }

  /// Of an own tile all partials have come, and where finished tiles lie in a ring, each peer has copied out what lay
  /// in this one's slot. Of a peer's tile, the owner no longer reads an earlier one of this launch that lay in the slot.
  /// Nor does the launch before the last, which used the same region: see RollCall. One wait for all: each is much code.
  MK_DEVICE void await_peers(const Task& task, bool own) {
    const u32 first = own ? 0 : task.owner, end = own ? args.world : first + 1;
    const bool is_reused = task.index >= args.slots && (!own || Op::kBroadcast == Broadcast::kStaged);
    for (u32 source = first; source < end; ++source) {
      if (source == args.rank) continue;
      for (u32 step = own ? 0 : 1; step < (is_reused ? 2 : 1); ++step) {
        const FlagKind kind = step == 0 ? kPartialReady : own ? kFinalFree : kPartialFree;
        const u32* flag = staging.flag(args.rank, kind, source, step == 0 ? task.index : task.index - args.slots);
        // pairs-with: partial_ready acquire (signal_role -> store_role), scope sys
        // pairs-with: final_free acquire (copy_role -> store_role), scope sys
        // pairs-with: partial_free acquire (signal_role -> store_role), scope sys
        wait(flag, staging.epoch, source, task.index);
      }
    }
  }

  /// The first partial goes into the panels, which are free: this thread waited for its own stores to have read them.
  MK_DEVICE void load_partials(const Task& task) {
    fence_proxy_async();  // flags were read by generic loads, the slots are read by bulk copies
    const u8* slot = staging.partial_slot(args.rank, args.rank == 0 ? 1 : 0, task.index);
#pragma unroll 1
    for (int index = 0; index < Tile::kPanels; ++index) {
      const u32 staged = memory.panel_staged(group, index);
      mbarrier_arrive_expect(staged, Tile::kPanelBytes);
      bulk_load(memory.panel(group, index), slot + panel_offset(index), Tile::kPanelBytes, staged);
    }
  }

  /// Before anything of a peer is used, and before anything is stored into its result.
  MK_DEVICE void meet_peers(const Task& task) {
    for (u32 peer = 0; peer < args.world && !given_up; ++peer) {
      if (peer == args.rank) continue;
      given_up = !meet_peer<Op::kOperator>(args, staging.epoch, WaitSite{kStoreRole, peer, task.index});
    }
    peers_known = true;
  }

  MK_DEVICE u32 panel_offset(int index) const { return (group * Tile::kPanels + index) * Tile::kPanelBytes; }

  /// Pushes are spread over the next tile's mainloop: a burst on the link stalls this SM's own loads. After the last
  /// tile of a block there is nothing to protect.
  MK_DEVICE void pace(int index, bool last) {
    if (args.pace_ns == 0 || last) return;
    if (index == 0) first_panel_ns = global_timer_ns();
    const u64 due_ns = first_panel_ns + (2 * index + group) * (args.pace_ns / 2);
    while (global_timer_ns() < due_ns) __nanosleep(64);
  }

  MK_DEVICE void send(const Task& task, const TilePlace& place, int index, bool last) {
    const u32 panel = memory.panel(group, index);
    if (task.owner != args.rank) {
      pace(index, last);
      if (given_up) return;
      bulk_store(staging.partial_slot(task.owner, args.rank, task.index) + panel_offset(index), panel,
                 Tile::kPanelBytes);
      return;
    }
    const i32 x = place.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN) + index * Tile::kPanelN;
    const i32 y = place.out_row + (Tile::kSplitsRows ? group * 64 : 0);
    if constexpr (Op::kBroadcast == Broadcast::kMulticast) {
      pace(index, last);
      if (!given_up) tensor_store(&args.peer_out[0], panel, x, y, place.segment);  // the switch writes all, own included
      return;
    }
    if constexpr (Op::kBroadcast != Broadcast::kNone) {
      pace(index, last);
      for (u32 step = 1; step < args.world && !given_up; ++step) {
        const u32 peer = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
        if constexpr (Op::kBroadcast == Broadcast::kDirect) {
          tensor_store(&args.peer_out[peer], panel, x, y, place.segment);
        } else {
          bulk_store(staging.final_slot(peer, args.rank, task.index) + panel_offset(index), panel, Tile::kPanelBytes);
        }
      }
    }
    deliver(args, panel, x, y, place.segment);
  }

  MK_DEVICE void end(const Task& task, const typename Op::Schedule& schedule) {
    if (!Op::publishes(args, schedule, task)) return;
    bulk_wait<0>();
    if (given_up) store_shared(memory.given_up(), 1);
    // pairs-with: sent release (store_role -> signal_role), scope cta
    store_release_shared(memory.sent_count(group), ++sent);
  }
};

/// One thread of each launch: tells the peers which launch this rank has entered, and does not let it end before all of
/// them have entered the same one. So when a launch begins, every peer has entered the one before: the one before that
/// has finished everywhere, and its staging region, which this launch uses, is free.
template <class Op>
struct RollCall {
  const LaunchArguments& args;
  const u32 epoch;
  u32 missing = 0;  ///< bit set of peers
  Trace trace;

  MK_DEVICE RollCall(const LaunchArguments& args, u32 epoch) : args(args), epoch(epoch), trace(args, kEntryLane) {
    if (blockIdx.x != 0 || epoch == 0) return;
    missing = ((1u << args.world) - 1) & ~(1u << args.rank);
    // The launch before this one has finished here. Publishes: its staging region may be written again.
    trace.begin();
    // pairs-with: entered release (signal_role -> signal_role), scope sys
    fence_acq_rel_sys();
    trace.waited(trace.start_ns);
    for (u32 peer = 0; peer < args.world; ++peer) {
      // Relaxed: the fence above releases.
      if (peer != args.rank) store_relaxed_sys(entered_word(args, peer, args.rank, epoch), entry(args, epoch));
    }
    trace.end(kTraceSignal, args.rank, kNoTile);
    trace.begin();
  }

  MK_DEVICE bool finished() const { return missing == 0; }
  MK_DEVICE u32 peer() const { return __ffs(missing) - 1; }
  MK_DEVICE u32 seen() const {
    // pairs-with: entered acquire (signal_role -> signal_role), scope sys
    return (u32)load_acquire_sys(entered_word(args, args.rank, peer(), epoch));
  }
  /// Strike off the next peer if it is here; never waits. A peer that is elsewhere ends the launch.
  MK_DEVICE bool step() {
    if (finished() || !reached(seen(), epoch)) return false;
    know_peer<Op::kOperator>(args, epoch, WaitSite{kEntry, peer(), 0});
    trace.end_wait(kTraceReceive, peer(), kNoTile);
    missing &= missing - 1;
    return true;
  }
};

/// The one thread of a block that tells other ranks of finished tiles. Its fence waits for all bytes that the GPU has on
/// the link; no thread with other work to do could bear that.
template <class Op>
struct Signaller {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const typename Op::Schedule& schedule;
  const Staging<Tile> staging;
  u32 position = blockIdx.x;
  u32 published = 0;
  Trace trace;

  MK_DEVICE Signaller(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                      const typename Op::Schedule& schedule, u32 epoch)
      : args(args), memory(memory), schedule(schedule), staging{args, epoch}, trace(args, kSignalLane) {
    if (epoch == 0) position = schedule.positions();
  }

  MK_DEVICE bool finished() const { return position >= schedule.positions(); }

  MK_DEVICE bool step() {
    return step_with([this](const Task& task) {
      publish(task);
      trace.end(kTraceSignal, task.owner, task.index);
    });
  }

  /// Tell of the next tile if both store threads have sent it; never waits. Returns whether anything was done.
  template <class Tell>
  MK_DEVICE bool step_with(Tell tell) {
    if (finished()) return false;
    const Task task = schedule.task(position);
    if (!task.valid || !Op::publishes(args, schedule, task)) {
      position += gridDim.x;
      return true;
    }
    // pairs-with: sent acquire (store_role -> signal_role), scope cta
    if (load_acquire_shared(memory.sent_count(0)) == published) return false;
    // pairs-with: sent acquire (store_role -> signal_role), scope cta
    if (load_acquire_shared(memory.sent_count(1)) == published) return false;
    ++published;
    position += gridDim.x;
    if (load_shared(memory.given_up())) {
      position = schedule.positions();
    } else {
      trace.begin();
      tell(task);
    }
    return true;
  }

  MK_DEVICE void publish(const Task& task) {
    fence_proxy_async();
    // The bulk stores of this tile are complete (the store threads waited) and the staged partials have been read.
    // pairs-with: partial_ready release (signal_role -> store_role), scope sys
    // pairs-with: partial_free release (signal_role -> store_role), scope sys
    // pairs-with: final_ready release (signal_role -> copy_role), scope sys
    fence_acq_rel_sys();
    trace.waited(trace.start_ns);
    if (task.owner != args.rank) {
      // Relaxed: the fence above releases, once for all words.
      store_relaxed_sys(staging.flag(task.owner, kPartialReady, args.rank, task.index), staging.epoch);
      return;
    }
    for (u32 peer = 0; peer < args.world; ++peer) {
      if (peer == args.rank) continue;
      // Relaxed: as above.
      store_relaxed_sys(staging.flag(peer, kPartialFree, args.rank, task.index), staging.epoch);
      if constexpr (Op::kBroadcast != Broadcast::kNone) {
        store_relaxed_sys(staging.flag(peer, kFinalReady, args.rank, task.index), staging.epoch);
      }
    }
  }
};

}  // namespace mk
