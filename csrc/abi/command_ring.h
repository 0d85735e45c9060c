#pragma once
// How kernels ask the host proxy for network writes: a ring of 48-byte commands in pinned host memory (paper, 3.3).
//
// Publishing (any thread of any block): take a ticket from a counter in device memory; wait until
// ticket < consumed + capacity (a credit); write the body of slot `ticket % capacity`; then store `header` =
// ticket + 1 with release at system scope. The proxy acquires the header of the slot that it expects next, so it sees
// no torn command and nothing has to be cleared. Commands are taken in ticket order.
//
// Credits come back in RingControl: `consumed` frees ring slots, `retired` frees source memory. What frees memory at
// the destination is a command of the receiver with no bytes, of which only the flag arrives.
//
// mkcompile/runtime/proxy/abi.py mirrors this file; the shared library asserts sizes and offsets when it is loaded.
#include "abi/types.h"

namespace mk {

/// One network write and the arrival flag that follows it. Offsets count from the start of each rank's region.
struct Command {
  u64 source_offset;
  u64 destination_offset;
  u64 bytes;   ///< 0: only the flag
  u32 peer;    ///< rank in the proxy's group
  u32 chunk;   ///< which arrival flag of the peer; one writer, and one message at a time, for each flag
  u32 epoch;   ///< value that the flag gets once all bytes are there
  u32 reserved;
  u64 header;  ///< ticket + 1, written last
};
static_assert(sizeof(Command) == 48, "paper, 3.3");
static_assert(alignof(Command) == 8, "the header is one aligned word");

/// Words that the proxy writes and kernels read; each on a line of its own.
struct alignas(128) RingControl {
  u64 consumed;  ///< commands taken: the slot of ticket t can be written once t < consumed + capacity
  u64 padding_0[15];
  u64 retired;   ///< all tickets below are complete: their source memory can be written again
  u64 padding_1[15];
  u32 fault;     ///< non-zero: the proxy has stopped, and every wait of a kernel gives up
  u32 padding_2[31];
};
static_assert(sizeof(RingControl) == 384, "mirrored by mkcompile.runtime.proxy.abi");

/// Commands of one connection that are submitted together.
inline constexpr u32 kMaxBatch = 8;

}  // namespace mk
