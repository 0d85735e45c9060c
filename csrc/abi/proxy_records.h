#pragma once
// What Python reads of a running proxy, and the options that it starts one with. mkcompile.runtime.proxy.abi mirrors
// this file.
#include "abi/types.h"

namespace mk {

/// Counters of one proxy; each only grows.
enum ProxyCounter : u32 {
  kCommands = 0,        ///< taken from the ring
  kBatches = 1,         ///< calls of the transport that took something
  kPartialBatches = 2,  ///< those with fewer commands than kMaxBatch
  kRefusals = 3,        ///< calls of the transport that left commands for later
  kCompletions = 4,
  kBytesSent = 5,       ///< of completed commands
  kArrivals = 6,        ///< flags that this proxy published
  kStalls = 7,          ///< rounds with a ready command and no room for it in flight
  kMostOutstanding = 8, ///< largest number of commands in flight
  kRounds = 9,          ///< of the proxy's loop
  kLongestRound = 10,   ///< ns of the longest: a call of a driver that did not come back, or a thread without a core
  kNumCounters = 16,
};

enum ProxyEventKind : u32 { kTaken = 0, kPosted = 1, kCompleted = 2, kArrived = 3, kFaulted = 4 };

/// One entry of the timeline. `time_ns` is CLOCK_MONOTONIC; arrivals have no ticket (0) and no bytes.
struct ProxyEvent {
  u64 time_ns;
  u64 ticket;
  u64 bytes;
  u32 peer;
  u32 chunk;
  u32 epoch;
  u32 kind_and_lane;  ///< kind | lane << 8
};
static_assert(sizeof(ProxyEvent) == 40, "mirrored by mkcompile.runtime.proxy.abi");

enum TransportKind : u32 { kEmulated = 0, kTcp = 1, kRc = 2, kUnordered = 3, kSrd = 4, kNumTransports = 5 };

/// How the emulated network treats messages.
enum EmulatedOrder : u32 {
  kInOrder = 0,
  kShuffled = 1,   ///< pieces of messages arrive in random order and are counted, as on SRD
  kUncounted = 2,  ///< a negative control: the flag is one more piece that nobody counts, so it can come first
};

/// Does whoever polls a flag of the region see what a NIC wrote before it?
enum WriteOrder : u32 {
  kWritesInOrder = 0,    ///< yes: host memory, and GPUs that order such writes for themselves
  kWritesFlushed = 1,    ///< after a flush by the receiver's proxy, which publishes the flags
  kWritesUnordered = 2,  ///< no, and nothing can be done: NICs must not write there
};

/// All settings of a proxy. Addresses are 0 where there is none; texts end with 0.
struct ProxyOptions {
  u64 region_base, region_bytes, flags_offset;
  u64 ring_control, ring_slots;  ///< memory of the ring (pinned, zero), or 0: the proxy allocates it
  u64 copy_context, copy_start, copy_finished, copy_pin, copy_unpin;  ///< host::CopyEngine
  u64 flag_context, flag_flush, flag_write, flag_commit;  ///< host::FlagWriter
  u64 bounce_base, bounce_bytes;  ///< tcp: pinned memory for regions that sockets can't reach, or 0
  u64 peer_bases;                                     ///< emulated: u64[world], regions as mapped here, or 0
  u64 dmabuf_offset;
  u64 window_ns;     ///< how long a command may wait for others of its connection
  u64 timeout_ns;    ///< without any completion while commands are in flight: a fault
  u64 idle_spin_ns;  ///< how long an idle proxy looks at full speed before it sleeps in short steps
  u64 seed;
  u64 bandwidth_bytes_per_s, latency_ns, shuffle_ns;  ///< emulated; 0 bandwidth: without limit
  u32 transport;     ///< TransportKind
  u32 memory_kind;   ///< host::MemoryKind
  i32 dmabuf;        ///< descriptor, or -1
  u32 num_flags;
  u32 rank, world, lanes, max_outstanding;
  u32 ring_capacity, timeline_capacity;
  u32 order;         ///< EmulatedOrder
  u32 write_order;   ///< WriteOrder of the region's memory
  u32 always_bounces;  ///< not 0: through a bounce buffer, though the network may reach the region
  u32 reserved;
  char device[64];   ///< NIC or interface; empty: chosen automatically
};

}  // namespace mk
