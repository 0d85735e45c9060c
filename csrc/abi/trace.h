#pragma once
// The timeline that kernels compiled with kTrace write: one ring of records for each thread that has a role.
#include "abi/types.h"

namespace mk {

/// What a record is about. `waited_ns` is the part of the time that the thread waited for others.
enum TraceRole : u32 {
  kTraceBlock = 0,        ///< a block's whole stay; `tile` is the epoch. Opens the records of a launch
  kTraceLoad = 1,         ///< operands of one tile; waits for free stages (and for rows that a peer sends)
  kTraceMainloop = 2,     ///< products of one tile; waits for operands
  kTraceEpilogue = 3,     ///< accumulators to panels; waits for free panels and for staged partials
  kTraceReceive = 4,      ///< wait for what a peer sends: partials, free slots, finished tiles
  kTraceStore = 5,        ///< own tile to this rank's result, and to the peers' where they get it
  kTracePush = 6,         ///< partial of a tile to its owner; or a chunk of rows to a peer
  kTraceSignal = 7,       ///< flags of a tile; waits for the fence. The flags are sent after that wait
  kTraceCopy = 8,         ///< finished tile of a peer to this rank's result, from the moment that its flag was seen
  kTraceNetSend = 9,      ///< chunk handed to the host's proxy
  kTraceNetReceive = 10,  ///< chunk that came over the network
  kTraceRoles = 11,
};

/// Threads of one block that may write records. A lane belongs to one thread, so that nothing is atomic.
enum TraceLane : u32 {
  kLoadLane = 0,
  kComputeLane = 1,  ///< and 2: one for each math group
  kStoreLane = 3,    ///< and 4
  kSignalLane = 5,
  kCopyLane = 6,
  kExtraLane = 7,
  kEntryLane = 8,
  kTraceLanes = 9,
};

/// One task of one thread. Times are of %globaltimer. `launch` is LaunchArguments::trace_launch.
struct alignas(16) TraceRecord {
  u64 start_ns;
  u64 end_ns;
  u32 waited_ns;
  u32 tile;    ///< index among the tiles of its owner
  u32 launch;
  u8 role;
  u8 owner;    ///< kSomePeer where the thread does not know which
  u8 reserved[2];
};
inline constexpr u8 kSomePeer = 255;
inline constexpr u32 kNoTile = ~0u;  ///< of signals and receipts that tell of the launch itself

/// Before the records of each lane. Lane l of block b begins (b * kTraceLanes + l) * (trace_records + 1) records on.
struct alignas(16) TraceLaneHeader {
  u64 written;  ///< records so far; number i lies in slot i % trace_records
  u64 reserved[3];
};
static_assert(sizeof(TraceRecord) == 32 && sizeof(TraceLaneHeader) == sizeof(TraceRecord), "slots of one size");

}  // namespace mk
