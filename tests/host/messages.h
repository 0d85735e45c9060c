#pragma once
// What two ranks send each other: made up by both from the seed, so that each byte can be checked without a third.
//
// Region of each side: flags [2 * slots], then receiving slots, then sending slots. Flag s is the arrival of a message
// in slot s, flag slots + s the credit that the peer has read it. Receiving slots are poisoned wherever no message is.
#include <cstddef>
#include <vector>

#include "abi/types.h"

namespace mk::test {

struct Plan {
  u64 messages = 1000;         ///< each way
  u32 slots = 16;
  u64 max_bytes = 64 << 10;    ///< sizes are log-uniform from 1 to this
  u64 seed = 1;                ///< the same on both sides
  bool delays = true;          ///< random pauses of senders and receivers
  u64 limit_ns = 60'000'000'000;  ///< for each wait
};

/// Offsets in a region.
struct Layout {
  explicit Layout(const Plan& plan);
  u64 slot_bytes, receive, send, end;
};

/// Offsets are inside of their slots.
struct Message {
  u64 bytes, source, destination;
  u64 key;  ///< which bytes
};

/// Message `number` from `rank`.
Message message_of(const Plan& plan, u32 rank, u64 number);
/// Epochs of a slot jump, as they do when other operators use a workspace in between.
u32 epoch_of(const Plan& plan, u64 number);

void fill(std::byte* to, const Message& message);
void poison(std::byte* at, u64 bytes);

/// Looks at a receiving slot: is the message in it, byte by byte, and poison around it? Then poisons it again. Most
/// times it looks as far as 64 bytes around, sometimes at the whole slot: a stray byte stays there until then.
class Reader {
 public:
  explicit Reader(const Plan& plan);
  bool take(std::byte* slot, const Message& message);

 private:
  const std::vector<std::byte> empty_;  ///< a slot as it is without a message
  u64 taken_ = 0;
};

}  // namespace mk::test
