#pragma once
// Between the nodes: where staged chunks lie, the threads that fill them, and the thread that hands them to the network.
#include "device/comm.cuh"
#include "device/network/ring.cuh"
#include "device/network/schedule.cuh"

namespace mk {

/// Offsets in the workspaces, for one launch. A rank exchanges nothing with itself: nodes are counted from the one after.
template <class Tile>
struct NetworkStaging {
  const LaunchArguments& args;
  u32 epoch;

  MK_DEVICE u64 region() const { return args.region_offset + (epoch & 1) * args.region_bytes; }
  MK_DEVICE u64 slot(u32 at, u32 other, u32 index) const {
    const NetworkArguments& net = network_of(args);
    const u32 run = other > at ? other - at - 1 : other + net.nodes - at - 1;
    return (u64)(run * net.slots + index % net.slots) * Tile::kTileBytes;
  }
  MK_DEVICE u64 inbox(u32 at, u32 source, u32 index) const {
    return region() + network_of(args).inbox_offset + slot(at, source, index);
  }
  MK_DEVICE u64 outbox(u32 owner, u32 index) const {
    return region() + network_of(args).outbox_offset + slot(network_of(args).node, owner, index);
  }
  MK_DEVICE u64 final_inbox(u32 at, u32 owner, u32 index) const {
    return region() + network_of(args).final_inbox_offset + slot(at, owner, index);
  }
  MK_DEVICE u64 final_outbox(u32 index) const {
    const NetworkArguments& net = network_of(args);
    return region() + net.final_outbox_offset + (u64)(index % net.slots) * Tile::kTileBytes;
  }
  MK_DEVICE u8* here(u64 offset) const { return reinterpret_cast<u8*>(args.workspace[args.rank] + offset); }
};

/// The lowest other number: whose partial an owner takes first.
MK_DEVICE u32 lowest_other(u32 own) { return own == 0 ? 1 : 0; }

/// Store thread of one math group: as ReduceSink among the ranks of this node; sums for rail peers go to the outbox, and
/// own tiles take the other nodes' sums from the inbox.
template <class Op>
struct NetworkSink : ReduceSink<Op> {
  using Tile = typename Op::Tile;
  using Base = ReduceSink<Op>;
  using Base::args, Base::memory, Base::staging, Base::group, Base::given_up;
  const typename Op::Schedule schedule;
  const NetworkStaging<Tile> boxes;
  RailTile at{0, 0};  ///< which tile the current one is
  bool nodes_known = false;

  MK_DEVICE NetworkSink(const LaunchArguments& args, const SharedMemory<Tile>& memory, int group)
      : Base(args, memory, group),
        schedule(Op::Schedule::template make<Tile>(args, gridDim.x)),
        boxes{args, staging.epoch} {}

  MK_DEVICE void wait_chunk(NetworkFlagKind kind, u32 node, u32 index, u32 tile, Role role) {
    if (given_up) return;
    const NetworkFlags flags{args, staging.epoch};
    const u32* flag = flags.word(flags.chunk(kind, node, index / network_of(args).chunk_tiles));
    // pairs-with: named at each call
    given_up = !wait_network<Op::kOperator>(args, flag, staging.epoch, WaitSite{role, node, tile});
  }

  MK_DEVICE void begin(const Task& task) {
    if constexpr (Op::kHierarchical) {
      if (task.owner != args.rank) return claim_slot(task);
    }
    at = schedule.rail(task.index);
    const bool is_own = at.node == schedule.node;
    if constexpr (Op::kHierarchical) receive_local(task);
    is_own ? receive_nodes() : claim_box();
    fence_proxy_async();  // flags were read by generic loads, the slots are read by bulk copies
    if constexpr (Op::kHierarchical) {
      load_panels(staging.partial_slot(args.rank, lowest_other(args.rank), task.index));
    } else {
      if (is_own) load_panels(boxes.here(boxes.inbox(schedule.node, lowest_other(schedule.node), at.index)));
    }
  }

  /// As in ReduceSink; the tile that last lay in the slot may be several rounds of the ring back.
  MK_DEVICE void claim_slot(const Task& task) {
    const u32 before = schedule.previous(task.owner, task.index, args.slots);
    if (before == Op::Schedule::kNone) return;
    // pairs-with: partial_free acquire (signal_role -> store_role), scope sys
    this->wait(staging.flag(args.rank, kPartialFree, task.owner, before), staging.epoch, task.owner, task.index);
  }

  MK_DEVICE void load_panels(const u8* slot) {
#pragma unroll 1
    for (int index = 0; index < Tile::kPanels; ++index) {
      const u32 staged = memory.panel_staged(group, index);
      mbarrier_arrive_expect(staged, Tile::kPanelBytes);
      bulk_load(memory.panel(group, index), slot + this->panel_offset(index), Tile::kPanelBytes, staged);
    }
  }

  /// The partials of this node's ranks, as in ReduceSink.
  MK_DEVICE void receive_local(const Task& task) {
    if (!this->peers_known) this->meet_peers(task);
    const u32 before = schedule.previous(args.rank, task.index, args.slots);
    for (u32 source = 0; source < args.world; ++source) {
      if (source == args.rank) continue;
      // pairs-with: partial_ready acquire (signal_role -> store_role), scope sys
      this->wait(staging.flag(args.rank, kPartialReady, source, task.index), staging.epoch, source, task.index);
      if (Op::kBroadcast == Broadcast::kStaged && at.node == schedule.node && before != Op::Schedule::kNone) {
        // pairs-with: final_free acquire (copy_role -> store_role), scope sys
        this->wait(staging.flag(args.rank, kFinalFree, source, before), staging.epoch, source, task.index);
      }
    }
  }

  /// The sums of the other nodes; and, where an own result is sent on, room in the boxes for it.
  MK_DEVICE void receive_nodes() {
    for (u32 node = 0; node < schedule.nodes; ++node) {
      if (node == schedule.node) continue;
      if (!nodes_known && !given_up) {
        given_up = !meet_node<Op::kOperator>(args, staging.epoch, WaitSite{kNetEntry, node, at.index});
      }
      // pairs-with: net_partial acquire (proxy -> store_role), scope sys
      wait_chunk(kNetPartial, node, at.index, at.index, kNetReceiveRole);
      if (Op::kBroadcast != Broadcast::kNone && at.index >= network_of(args).slots) {
        // pairs-with: net_final_free acquire (proxy -> store_role), scope sys
        wait_chunk(kNetFinalFree, node, at.index - network_of(args).slots, at.index, kNetSendRole);
      }
    }
    nodes_known = true;
  }

  /// The owner no longer reads an earlier chunk of this launch that lay in the slot, so it has left the outbox, too. Where
  /// finished tiles come back, they say so.
  MK_DEVICE void claim_box() {
    const u32 slots = network_of(args).slots;
    if (at.index < slots) return;
    // pairs-with: net_partial_free acquire (proxy -> store_role), scope sys
    // pairs-with: net_final acquire (proxy -> copy_role), scope sys
    wait_chunk(Op::kBroadcast == Broadcast::kNone ? kNetPartialFree : kNetFinal, at.node, at.index - slots, at.index,
               kNetSendRole);
  }

  MK_DEVICE void send(const Task& task, const TilePlace& place, int index, bool last) {
    if (task.owner == args.rank && (at.node != schedule.node || Op::kBroadcast != Broadcast::kNone)) {
      if (given_up) return;
      const u64 slot = at.node != schedule.node ? boxes.outbox(at.node, at.index) : boxes.final_outbox(at.index);
      bulk_store(boxes.here(slot + this->panel_offset(index)), memory.panel(group, index), Tile::kPanelBytes);
      if (at.node != schedule.node) return;
    }
    Base::send(task, place, index, last);
  }
};

/// The one thread of a block that tells other ranks and, of whole chunks, other nodes.
template <class Op>
struct NetworkSignaller : Signaller<Op> {
  using Tile = typename Op::Tile;
  using Base = Signaller<Op>;
  using Base::args, Base::memory, Base::schedule, Base::staging, Base::position, Base::published, Base::trace;

  MK_DEVICE NetworkSignaller(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                             const typename Op::Schedule& schedule, u32 epoch)
      : Base(args, memory, schedule, epoch) {}

  MK_DEVICE bool step() {
    return this->step_with([this](const Task& task) { publish(task); });
  }

  MK_DEVICE void publish(const Task& task) {
    fence_proxy_async();
    // The bulk stores of this tile are complete (the store threads waited) and the staged partials have been read.
    // pairs-with: partial_ready release (signal_role -> store_role), scope sys
    // pairs-with: partial_free release (signal_role -> store_role), scope sys
    // pairs-with: final_ready release (signal_role -> copy_role), scope sys
    // pairs-with: chunk_tile release (signal_role -> signal_role), scope sys
    fence_acq_rel_sys();
    trace.waited(trace.start_ns);
    if (task.owner != args.rank) {
      // Relaxed: the fence above releases, once for all words.
      store_relaxed_sys(staging.flag(task.owner, kPartialReady, args.rank, task.index), staging.epoch);
      return trace.end(kTraceSignal, task.owner, task.index);
    }
    const RailTile at = schedule.rail(task.index);
    const bool is_own = at.node == schedule.node;
    if constexpr (Op::kHierarchical) tell_node(task, is_own);
    if (is_own && Op::kBroadcast == Broadcast::kNone && !schedule.is_reused(at.index, schedule.node, args.rank)) {
      return trace.end(kTraceSignal, args.rank, task.index);
    }
    const NetworkFlagKind kind = !is_own ? kNetPartial : Op::kBroadcast == Broadcast::kNone ? kNetPartialFree : kNetFinal;
    const u32 per_chunk = network_of(args).chunk_tiles, chunk = at.index / per_chunk, first = chunk * per_chunk;
    const u32 left = schedule.count(at.node, args.rank) - first, tiles = left < per_chunk ? left : per_chunk;
    if (!count_chunk(args, kind, at.node, chunk, tiles)) return trace.end(kTraceSignal, args.rank, task.index);
    if (!is_own) {
      send_chunk(kind, at.node, chunk, boxes().outbox(at.node, first), tiles);
    } else {
      for (u32 step = 1; step < schedule.nodes; ++step) {
        const u32 node = schedule.node + step < schedule.nodes ? schedule.node + step : schedule.node + step - schedule.nodes;
        send_chunk(kind, node, chunk, boxes().final_outbox(first), tiles);
      }
    }
    trace.end(kTraceNetSend, at.node, chunk);
  }

  MK_DEVICE NetworkStaging<Tile> boxes() const { return {args, staging.epoch}; }

  /// The other ranks of this node, of a tile that this rank has summed.
  MK_DEVICE void tell_node(const Task& task, bool is_own) {
    for (u32 peer = 0; peer < args.world; ++peer) {
      if (peer == args.rank) continue;
      // Relaxed: the fence of publish() releases.
      store_relaxed_sys(staging.flag(peer, kPartialFree, args.rank, task.index), staging.epoch);
      if (is_own && Op::kBroadcast != Broadcast::kNone) {
        store_relaxed_sys(staging.flag(peer, kFinalReady, args.rank, task.index), staging.epoch);
      }
    }
  }

  /// One message, or for a slot that is free again a flag alone.
  MK_DEVICE void send_chunk(NetworkFlagKind kind, u32 node, u32 chunk, u64 source, u32 tiles) {
    const u32 first = chunk * network_of(args).chunk_tiles;
    const NetworkStaging<Tile> box = boxes();
    Command command{};
    if (kind != kNetPartialFree) command.source_offset = source;  // a credit has no bytes, and no place they lie in
    if (kind == kNetPartial) command.destination_offset = box.inbox(node, schedule.node, first);
    if (kind == kNetFinal) command.destination_offset = box.final_inbox(node, schedule.node, first);
    command.bytes = kind == kNetPartialFree ? 0 : (u64)tiles * Tile::kTileBytes;
    command.peer = rail_peer(args, node);
    command.chunk = NetworkFlags{args, staging.epoch}.chunk(kind, schedule.node, chunk);
    command.epoch = staging.epoch;
    if (!push_command<Op::kOperator>(args, command, WaitSite{kNetSendRole, node, first})) position = schedule.positions();
  }
};

/// RollCall, for the ranks of this node and, over the network, for the rail peers.
template <class Op>
struct NetworkRollCall {
  RollCall<Op> local;
  const LaunchArguments& args;
  const u32 epoch;
  u32 missing = 0;  ///< bit set of nodes

  MK_DEVICE NetworkRollCall(const LaunchArguments& args, u32 epoch) : local(args, epoch), args(args), epoch(epoch) {
    if (blockIdx.x != 0 || epoch == 0) return;
    const NetworkArguments& net = network_of(args);
    missing = ((1u << net.nodes) - 1) & ~(1u << net.node);
    // Relaxed: the header of the command releases it.
    store_relaxed_sys(&network_header(args)->entry[epoch & 1], entry(args, epoch));
    const u64 parity_bytes = (epoch & 1) * sizeof(u64);
    Command command{};
    command.source_offset = net.header_offset + kNetworkEntryOffset + parity_bytes;
    command.destination_offset =
        net.header_offset + kNetworkEnteredOffset + parity_bytes * kMaxNodes + net.node * sizeof(u64);
    command.bytes = sizeof(u64);
    command.chunk = NetworkFlags{args, epoch}.entered(net.node);
    command.epoch = epoch;
    for (u32 node = 0; node < net.nodes; ++node) {
      if (node == net.node) continue;
      command.peer = rail_peer(args, node);
      if (!push_command<Op::kOperator>(args, command, WaitSite{kNetEntry, node, 0})) missing = 0;
    }
  }

  MK_DEVICE bool finished() const { return local.finished() && missing == 0; }
  MK_DEVICE WaitSite site() const {
    return local.finished() ? WaitSite{kNetEntry, (u32)__ffs(missing) - 1, 0} : WaitSite{kEntry, local.peer(), 0};
  }
  MK_DEVICE u32 seen() const {
    if (!local.finished()) return local.seen();
    const NetworkFlags flags{args, epoch};
    // pairs-with: net_entered acquire (proxy -> signal_role), scope sys
    return load_acquire_sys(flags.word(flags.entered(__ffs(missing) - 1)));
  }
  /// Strike off the next rail peer if it is here; never waits. One that is elsewhere ends the launch.
  MK_DEVICE bool step() {
    if (!local.finished()) return local.step();
    if (missing == 0 || !reached(seen(), epoch)) return false;
    meet_node<Op::kOperator>(args, epoch, site());
    missing &= missing - 1;
    return true;
  }
};

}  // namespace mk
