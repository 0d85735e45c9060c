#pragma once
// Between a kernel and the network: commands into the ring of the host's proxy, flags that arrive, and the counters by
// which the blocks of one launch find out that a chunk is complete.
#include "abi/network_arguments.h"
#include "device/sync.cuh"

namespace mk {

MK_DEVICE const NetworkArguments& network_of(const LaunchArguments& args) {
  return static_cast<const NetworkLaunchArguments&>(args).net;
}
MK_DEVICE NetworkHeader* network_header(const LaunchArguments& args) {
  return reinterpret_cast<NetworkHeader*>(args.workspace[args.rank] + network_of(args).header_offset);
}
MK_DEVICE RingControl* ring_control(const LaunchArguments& args) {
  return reinterpret_cast<RingControl*>(network_of(args).ring_control);
}
/// How the proxy numbers the rail peer of a node.
MK_DEVICE u32 rail_peer(const LaunchArguments& args, u32 node) { return node * args.world + args.rank; }

/// The flags of this rank and, since all ranks number them alike, of its peers.
struct NetworkFlags {
  const LaunchArguments& args;
  u32 epoch;

  MK_DEVICE u32 entered(u32 node) const { return (epoch & 1) * network_of(args).nodes + node; }
  MK_DEVICE u32 chunk(NetworkFlagKind kind, u32 node, u32 chunk) const {
    const NetworkArguments& net = network_of(args);
    return 2 * net.nodes + (((epoch & 1) * kNetFlagKinds + kind) * net.nodes + node) * net.max_chunks + chunk;
  }
  MK_DEVICE const u32* word(u32 index) const {
    return reinterpret_cast<const u32*>(args.workspace[args.rank] + network_of(args).flags_offset) + index;
  }
};

/// The proxy has stopped: nothing will be sent any more, and nobody is told of what arrives.
template <OperatorId kOperator>
MK_DEVICE bool network_is_down(const LaunchArguments& args, WaitSite site) {
  const u32* fault = &ring_control(args)->fault;
  // pairs-with: ring_fault acquire (proxy -> signal_role), scope sys
  if (load_acquire_sys(fault) == 0) return false;
  report_fault<kOperator>(args, kNetworkFault, site, 0, 0, 0);
  return true;
}

/// As wait_until, for a flag that a rail peer's proxy sets. The ring's fault word lies beyond PCIe: looked at seldom.
template <OperatorId kOperator>
MK_DEVICE bool wait_network(const LaunchArguments& args, const u32* flag, u32 epoch, WaitSite site) {
  constexpr u32 kRoundsBetweenLooks = 4096;
  // pairs-with: named at each call
  u32 seen = load_acquire_sys(flag);
  if (reached(seen, epoch)) return true;
  const u64 start_ns = global_timer_ns();
  for (u32 round = 1;; ++round) {
    // pairs-with: named at each call
    seen = load_acquire_sys(flag);
    if (reached(seen, epoch)) return true;
    if (load_relaxed_gpu(&workspace_header(args, args.rank)->abort) != kNoFault) return false;
    const u64 waited_ns = global_timer_ns() - start_ns;
    if (waited_ns > args.deadline_ns) {
      report_fault<kOperator>(args, kPeerTimeout, site, epoch, seen, waited_ns);
      return false;
    }
    if (round % kRoundsBetweenLooks == 0 && network_is_down<kOperator>(args, site)) return false;
  }
}

/// Until the slot of this ticket has been taken by the proxy, if it was in use. The proxy needs no kernel to go on.
template <OperatorId kOperator>
MK_DEVICE bool wait_ring_slot(const LaunchArguments& args, u64 ticket, WaitSite site) {
  NetworkHeader* header = network_header(args);
  const u64 capacity = network_of(args).ring_capacity;
  // Relaxed: only ever behind; the slot is written after this comparison, which the proxy's read of it came before.
  if (ticket < load_relaxed_gpu(&header->consumed) + capacity) return true;
  const u64* consumed = &ring_control(args)->consumed;
  const u64 start_ns = global_timer_ns();
  while (true) {
    // pairs-with: ring_credit acquire (proxy -> signal_role), scope sys
    const u64 seen = load_acquire_sys(consumed);
    // Relaxed: as above.
    store_relaxed_sys(&header->consumed, seen);
    if (ticket < seen + capacity) return true;
    if (load_relaxed_gpu(&workspace_header(args, args.rank)->abort) != kNoFault) return false;
    if (network_is_down<kOperator>(args, site)) return false;
    const u64 waited_ns = global_timer_ns() - start_ns;
    if (waited_ns > args.deadline_ns) {
      report_fault<kOperator>(args, kPeerTimeout, site, (u32)ticket, (u32)seen, waited_ns);
      return false;
    }
  }
}

/// Hands one command to the proxy. What it sends must be visible at system scope already. False when given up.
template <OperatorId kOperator>
MK_DEVICE bool push_command(const LaunchArguments& args, const Command& body, WaitSite site) {
  const NetworkArguments& net = network_of(args);
  const u64 ticket = add_relaxed_gpu(&network_header(args)->tickets, (u64)1);
  if (!wait_ring_slot<kOperator>(args, ticket, site)) return false;
  u64* words = reinterpret_cast<u64*>(net.ring_slots) + ((u32)ticket & (net.ring_capacity - 1)) * (sizeof(Command) / 8);
  // Relaxed: the header, which is stored last, releases them.
  store_relaxed_sys(words, body.source_offset);
  store_relaxed_sys(words + 1, body.destination_offset);
  store_relaxed_sys(words + 2, body.bytes);
  store_relaxed_sys(words + 3, (u64)body.chunk << 32 | body.peer);
  store_relaxed_sys(words + 4, (u64)body.epoch);
  // pairs-with: command release (signal_role -> proxy), scope sys
  store_release_sys(words + 5, ticket + 1);
  return true;
}

/// One of the `tiles` tiles of a chunk is complete; the caller's fence before this releases it. True for the last of
/// them, who then sees all, and clears the counter for the next launch.
MK_DEVICE bool count_chunk(const LaunchArguments& args, NetworkFlagKind kind, u32 node, u32 chunk, u32 tiles) {
  const NetworkArguments& net = network_of(args);
  u32* words = reinterpret_cast<u32*>(args.workspace[args.rank] + net.counters_offset);
  u32* word = words + ((u64)(kind * net.nodes + node) * net.max_chunks + chunk);
  // Relaxed: between the fences.
  if (add_relaxed_gpu(word, 1u) + 1 != tiles) return false;
  // pairs-with: chunk_tile acquire (signal_role -> signal_role), scope sys
  fence_acq_rel_sys();
  // Relaxed: the next launch, which counts again, follows in stream order.
  store_relaxed_sys(word, 0);
  return true;
}

/// Where a rank says which launch it has entered, as seen by its rail peers. See RollCall.
MK_DEVICE const u64* node_entry(const LaunchArguments& args, u32 node, u32 epoch) {
  return &network_header(args)->entered[epoch & 1][node];
}

/// As meet_peer, for a rail peer. `site.peer` is its node.
template <OperatorId kOperator>
MK_DEVICE bool meet_node(const LaunchArguments& args, u32 epoch, WaitSite site) {
  const NetworkFlags flags{args, epoch};
  // pairs-with: net_entered acquire (proxy -> signal_role), scope sys
  if (!wait_network<kOperator>(args, flags.word(flags.entered(site.peer)), epoch, site)) return false;
  // Relaxed: came before the flag.
  const u64 seen = load_relaxed_gpu(node_entry(args, site.peer, epoch));
  if (seen == entry(args, epoch)) return true;
  report_fault<kOperator>(args, kLaunchMismatch, site, args.identity, (u32)(seen >> 32), 0);
  return false;
}

}  // namespace mk
