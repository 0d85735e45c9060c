#pragma once
// The exchange of exchange.h without threads of its own: one loop drives any number of sides. For machines with few and
// slow processors, where a thread that waits takes the time of one that works: who has nothing to do sleeps a while.
#include <span>

#include "exchange.h"

namespace mk::test {

/// A side to drive, and who it is. Several of one process, or one.
struct Party {
  Side* side;
  u32 rank;
  u32 peer;
};

/// All messages of all parties, both ways. A party ends early where its proxy fails, or nothing comes for
/// `plan.limit_ns`. `until_received`: stops once each party has received so many (faults in the midst of traffic).
std::vector<Outcome> drive(const Plan& plan, std::span<const Party> parties, u64 until_received = ~u64{0});

/// Options of a plan for drive(): rings never fill.
ProxyOptions options_to_drive(const Plan& plan);

}  // namespace mk::test
