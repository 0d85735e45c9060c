#pragma once
// What a kernel whose ranks are on several nodes has besides: the ring of the host's proxy, and where network flags,
// counters and staged chunks lie. mkcompile/runtime/network_abi.py mirrors it.
//
// LaunchArguments describe one node then: `rank` and `world` count its ranks. Rail peers are the ranks with the same
// number on other nodes; they alone exchange data over the network. Offsets count from the start of a rank's workspace,
// which is the region that the proxy has registered, and are the same on every rank.
#include "abi/command_ring.h"
#include "abi/launch_arguments.h"

namespace mk {

/// Nodes that one launch can span.
inline constexpr u32 kMaxNodes = 16;

/// First bytes of the network block of a workspace; all zero before the first launch.
struct NetworkHeader {
  u64 tickets;       ///< commands that kernels have numbered
  u64 consumed;      ///< RingControl::consumed as a kernel has last read it
  u64 reserved_0[14];
  u64 entry[2];      ///< [parity of the epoch] the launch that this rank has entered, as the other nodes get it
  u64 reserved_1[14];
  u64 entered[2][kMaxNodes];  ///< [parity][node] epoch that the rail peer entered; above it, its identity
};
static_assert(sizeof(NetworkHeader) == 512, "mirrored by mkcompile.runtime.network_abi");
inline constexpr u32 kNetworkEntryOffset = 128, kNetworkEnteredOffset = 256;

/// Network flags: word [parity][node] for `entered`, then word [parity][kind][node][chunk]. Each holds the epoch of its
/// last event. Two sets by parity, since a flag may have only one message in flight. Counters: word [kind][node][chunk].
enum NetworkFlagKind : u32 {
  kNetPartial = 0,      ///< node's partial sums of a chunk of tiles that I own; a chunk of the shard
  kNetPartialFree = 1,  ///< node, the owner, has consumed the chunk that I sent
  kNetFinal = 2,        ///< node, the owner, has sent a chunk of finished tiles
  kNetFinalFree = 3,    ///< node has copied out the chunk of finished tiles that I sent
  kNetFlagKinds = 4,
};

struct NetworkArguments {
  u64 ring_control;         ///< RingControl in pinned memory
  u64 ring_slots;           ///< its commands
  u64 header_offset;        ///< NetworkHeader
  u64 flags_offset;
  u64 counters_offset;
  u64 inbox_offset;         ///< from the epoch's staging region: partial sums that came, a run of slots for each node
  u64 outbox_offset;        ///< and those that leave
  u64 final_inbox_offset;   ///< finished tiles that came, a run of slots for each node
  u64 final_outbox_offset;  ///< and those that leave: one run, which goes to all nodes
  u32 ring_capacity;        ///< a power of two
  u32 node, nodes;
  u32 max_chunks;           ///< words in each array of flags or counters
  u32 chunk_tiles;          ///< tiles of one network message
  u32 slots;                ///< staging slots for each node; whole chunks
  u32 lag;                  ///< tiles of each other node that come before the first own one
  u32 reserved;
};

/// The argument of a kernel whose ranks are on several nodes.
struct alignas(64) NetworkLaunchArguments : LaunchArguments {
  NetworkArguments net;
};
static_assert(sizeof(NetworkLaunchArguments) <= 32764, "kernel parameter space");

}  // namespace mk
