#pragma once
// Counted notification, for networks that deliver in any order (srd, unordered): the pieces of a message each carry an
// immediate of 32 bits, and the receiver publishes the flag when it has seen all of them.
//
// The flag's value does not fit beside slot and count. It travels as one more piece: four bytes written into the
// landing word of the slot, host memory that only the receiver's proxy reads, and only when all pieces have come. So a
// message of n data pieces has n + 1 pieces, and a flag alone has one.
#include <vector>

#include "host/error.h"

namespace mk::host {

inline constexpr u32 kSlotBits = 20;
inline constexpr u32 kMaxSlots = 1u << kSlotBits;
/// Data pieces of one message are one less.
inline constexpr u32 kMaxPieces = (1u << (32 - kSlotBits)) - 1;

struct Immediate {
  u32 slot;
  u32 pieces;  ///< of the whole message, value piece included; the same in each of them
};

constexpr u32 encode(const Immediate& immediate) noexcept { return immediate.pieces << kSlotBits | immediate.slot; }
constexpr Immediate decode(u32 bits) noexcept { return {bits & (kMaxSlots - 1), bits >> kSlotBits}; }

/// Pieces seen so far, for each slot of the own flag array. One writer and one message at a time make this enough.
class Arrivals {
 public:
  explicit Arrivals(u32 num_flags) : pending_(num_flags), peers_(num_flags, kNobody) {}

  /// A piece has come. 1: it was the message's last, publish its flag now; 0: more to come; -1: `error` says what is
  /// wrong with it (a slot that does not exist, counts that differ, two peers on one slot).
  int add(u32 peer, u32 bits, Error& error) noexcept;

 private:
  static constexpr u32 kNobody = ~0u;
  struct Pending {
    u32 seen = 0;
    u32 pieces = 0;
  };
  std::vector<Pending> pending_;
  std::vector<u32> peers_;
};

}  // namespace mk::host
