#pragma once
// Finished tiles that come to this rank: over the network from the rail peers, and from the other ranks of its node.
#include "device/network/send.cuh"

namespace mk {

/// What a block copies out of what rail peers own and send over the network, in the order in which owners finish it. With
/// several ranks in a node, this one passes the tiles on to the others.
template <class Op>
struct NetworkFinals {
  using Tile = typename Op::Tile;
  static constexpr bool kPassesOn = Op::kHierarchical;
  static constexpr Role kRole = kNetReceiveRole;
  static constexpr TraceRole kTrace = kTraceNetReceive;
  const LaunchArguments& args;
  const typename Op::Schedule& schedule;
  const u32 epoch;
  u32 next = blockIdx.x;
  u32 node = 0, index = 0;

  MK_DEVICE u32 source() const { return node; }
  MK_DEVICE u32 end() const { return schedule.per_node * (schedule.nodes - 1); }
  /// Sets the tile that `next` stands for; false where it does not exist.
  MK_DEVICE bool locate() {
    const u32 others = schedule.nodes - 1;
    index = next / others;
    node = schedule.node + 1 + next % others;
    node = node < schedule.nodes ? node : node - schedule.nodes;
    return index < schedule.count(node, args.rank);
  }
  MK_DEVICE u32 chunk() const { return index / network_of(args).chunk_tiles; }
  MK_DEVICE u32 tile() const { return schedule.handled(RailTile{node, index}); }
  MK_DEVICE Task task() const { return Task{args.rank, tile(), true}; }
  MK_DEVICE u32 seen() const {
    const NetworkFlags flags{args, epoch};
    // pairs-with: net_final acquire (proxy -> copy_role), scope sys
    return load_acquire_sys(flags.word(flags.chunk(kNetFinal, node, chunk())));
  }
  MK_DEVICE const u8* slot() const {
    const NetworkStaging<Tile> boxes{args, epoch};
    return boxes.here(boxes.final_inbox(schedule.node, node, index));
  }
  /// Give the chunk's slots back to the owner where it will need them again in this launch.
  MK_DEVICE bool is_wanted_back() const { return schedule.is_reused(index, node, args.rank); }
  MK_DEVICE void give_back() const {
    if (!count_chunk(args, kNetFinalFree, node, chunk(), network_of(args).chunk_tiles)) return;
    Command command{};
    command.peer = rail_peer(args, node);
    command.chunk = NetworkFlags{args, epoch}.chunk(kNetFinalFree, schedule.node, chunk());
    command.epoch = epoch;
    push_command<Op::kOperator>(args, command, WaitSite{kNetSendRole, node, index});
  }
};

/// What a block copies out of what the other ranks of this node have finished or passed on.
template <class Op>
struct LocalFinals {
  using Tile = typename Op::Tile;
  static constexpr bool kPassesOn = false;
  static constexpr Role kRole = kCopyRole;
  static constexpr TraceRole kTrace = kTraceCopy;
  const LaunchArguments& args;
  const typename Op::Schedule& schedule;
  const u32 epoch;
  u32 next = blockIdx.x;
  u32 owner = 0, index = 0;

  MK_DEVICE u32 source() const { return owner; }
  MK_DEVICE u32 end() const { return schedule.order.per_owner * (args.world - 1); }
  MK_DEVICE bool locate() {
    index = next / (args.world - 1);
    owner = args.rank + 1 + next % (args.world - 1);
    owner = owner < args.world ? owner : owner - args.world;
    const RailTile at = schedule.rail(index);
    return at.index < schedule.count(at.node, owner);
  }
  MK_DEVICE u32 tile() const { return index; }
  MK_DEVICE Task task() const { return Task{owner, index, true}; }
  MK_DEVICE Staging<Tile> staging() const { return {args, epoch}; }
  MK_DEVICE u32 seen() const {
    // pairs-with: final_ready acquire (signal_role -> copy_role), scope sys
    return load_acquire_sys(staging().flag(args.rank, kFinalReady, owner, index));
  }
  MK_DEVICE const u8* slot() const { return staging().final_slot(args.rank, owner, index); }
  MK_DEVICE bool is_wanted_back() const { return index + args.slots < schedule.order.per_owner; }
  MK_DEVICE void give_back() const {
    // Relaxed: the fence of the caller releases.
    store_relaxed_sys(staging().flag(owner, kFinalFree, args.rank, index), epoch);
  }
};

/// One thread copies finished tiles through `kCount` spare panels into this rank's result, from the `kFirst`th on.
template <class Op, class Finals, int kFirst, int kCount>
struct NetworkCopyOut {
  using Tile = typename Op::Tile;
  static constexpr u32 kTilePanels = kMathGroups * Tile::kPanels;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const typename Op::Schedule& schedule;
  Finals finals;
  u32 loaded = 0, stored = 0;  ///< panels of the current tile
  u32 panels = 0;              ///< stored in all
  bool arrived = false;        ///< the current tile is here, and where it is passed on there is room for it
  Trace trace;

  MK_DEVICE NetworkCopyOut(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                           const typename Op::Schedule& schedule, u32 epoch)
      : args(args), memory(memory), schedule(schedule), finals{args, schedule, epoch}, trace(args, kCopyLane) {
    if (epoch == 0) finals.next = finals.end();
    skip_missing();
  }

  MK_DEVICE bool finished() const { return finals.next >= finals.end(); }
  MK_DEVICE void skip_missing() {
    while (!finished() && !finals.locate()) finals.next += gridDim.x;
  }
  MK_DEVICE u32 seen() const { return finals.seen(); }
  MK_DEVICE WaitSite site() const { return WaitSite{Finals::kRole, finals.source(), finals.index}; }

  MK_DEVICE u32 panel(u32 at) const { return memory.spare(kFirst + (panels + at) % kCount); }
  MK_DEVICE u32 barrier(u32 at) const { return memory.copy_full(kFirst + (panels + at) % kCount); }
  MK_DEVICE u32 uses(u32 at) const { return (panels + at) / kCount; }

  /// Never waits for another rank. Returns whether anything was done.
  MK_DEVICE bool step() {
    if (finished()) return false;
    if (!arrived) {
      if (!reached(finals.seen(), finals.epoch) || !has_room()) return false;
      trace.begin();
      fence_proxy_async();  // the flag was read by a generic load, the slot is read by bulk copies
      arrived = true;
    }
    const u32 behind = loaded - stored;
    if (loaded < kTilePanels && behind < kCount) {
      load_panel(behind);
      return true;
    }
    if (!mbarrier_test_wait(barrier(0), uses(0) & 1)) return false;
    store_panel();
    if (stored == kTilePanels) finish_tile();
    return true;
  }

  MK_DEVICE Staging<Tile> staging() const { return {args, finals.epoch}; }

  /// Where tiles are passed on through a ring: all ranks of this node have read what lay in the slot.
  MK_DEVICE bool has_room() const {
    if constexpr (Finals::kPassesOn) {
      const u32 before = schedule.previous(args.rank, finals.tile(), args.slots);
      if (before == Op::Schedule::kNone) return true;
      for (u32 peer = 0; peer < args.world; ++peer) {
        if (peer == args.rank) continue;
        // pairs-with: final_free acquire (copy_role -> store_role), scope sys
        const u32 seen = load_acquire_sys(staging().flag(args.rank, kFinalFree, peer, before));
        if (!reached(seen, finals.epoch)) return false;
      }
    }
    return true;
  }

  MK_DEVICE void load_panel(u32 behind) {
    bulk_wait_read<0>();  // the store that last used this panel
    mbarrier_arrive_expect(barrier(behind), Tile::kPanelBytes);
    bulk_load(panel(behind), finals.slot() + loaded * Tile::kPanelBytes, Tile::kPanelBytes, barrier(behind));
    ++loaded;
  }

  MK_DEVICE void store_panel() {
    const TilePlace place = schedule.template place<Tile>(args, finals.task());
    const u32 group = stored / Tile::kPanels, index = stored % Tile::kPanels;
    const i32 x = place.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN) + index * Tile::kPanelN;
    tensor_store(&args.out, panel(0), x, place.out_row + (Tile::kSplitsRows ? group * 64 : 0), place.segment);
    if constexpr (Finals::kPassesOn) {
      const u32 tile = finals.tile();
      for (u32 peer = 0; peer < args.world; ++peer) {
        if (peer == args.rank) continue;
        bulk_store(staging().final_slot(peer, args.rank, tile) + stored * Tile::kPanelBytes, panel(0),
                   Tile::kPanelBytes);
      }
    }
    bulk_commit();
    ++stored;
    ++panels;
  }

  MK_DEVICE void finish_tile() {
    if constexpr (Finals::kPassesOn) bulk_wait<0>();
    if (Finals::kPassesOn || finals.is_wanted_back()) {
      fence_proxy_async();
      // All loads from the slot have completed on their barriers; what was passed on lies there. Publishes both.
      // pairs-with: final_free release (copy_role -> store_role), scope sys
      // pairs-with: final_ready release (signal_role -> copy_role), scope sys
      // pairs-with: chunk_tile release (signal_role -> signal_role), scope sys
      fence_acq_rel_sys();
    }
    if constexpr (Finals::kPassesOn) {
      for (u32 peer = 0; peer < args.world; ++peer) {
        if (peer == args.rank) continue;
        // Relaxed: the fence above releases.
        store_relaxed_sys(staging().flag(peer, kFinalReady, args.rank, finals.tile()), finals.epoch);
      }
    }
    if (finals.is_wanted_back()) finals.give_back();
    trace.end(Finals::kTrace, finals.source(), finals.index);
    loaded = stored = 0;
    arrived = false;
    finals.next += gridDim.x;
    skip_missing();
  }
};

/// Nothing comes back over the network: reduce-scatter.
template <class Op>
struct NoFinals {
  MK_DEVICE NoFinals(const LaunchArguments&, const SharedMemory<typename Op::Tile>&, const typename Op::Schedule&, u32) {}
  MK_DEVICE bool finished() const { return true; }
  MK_DEVICE u32 seen() const { return 0; }
  MK_DEVICE WaitSite site() const { return WaitSite{kCopyRole, 0, 0}; }
  MK_DEVICE bool step() { return false; }
};

}  // namespace mk
