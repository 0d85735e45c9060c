#pragma once
// Two ranks exchange messages of random size at random offsets, with credits, and check every byte. Works over any
// transport: each side is a Session and two threads, in one process or in two.
#include <memory>

#include "check.h"
#include "host/session.h"
#include "messages.h"

namespace mk::test {

/// What a side saw.
struct Outcome {
  u64 received = 0;
  u64 wrong = 0;         ///< messages with a wrong byte, inside or around them
  std::string failure;   ///< of a wait or of the proxy; empty: none
};

/// One side: memory, proxy.
struct Side {
  std::vector<std::byte> memory;
  std::unique_ptr<host::Session> session;
};

/// Sides of one process. They write into each other's memory, so all stop before one goes.
class Sides {
 public:
  explicit Sides(std::size_t count = 2) : sides_(count) {}
  ~Sides();
  Sides(const Sides&) = delete;
  Sides& operator=(const Sides&) = delete;

  Side& operator[](std::size_t rank) { return sides_[rank]; }
  std::size_t size() const { return sides_.size(); }

 private:
  std::vector<Side> sides_;
};

/// Options that fit a plan; the caller fills in rank, world, transport and what else it wants, then calls open_side().
ProxyOptions options_for(const Plan& plan);
u64 region_bytes(const Plan& plan);
host::Error open_side(const Plan& plan, ProxyOptions options, Side& side);

/// Connects sides of one process with each other, all at once.
host::Error meet_all(Sides& sides, u64 limit_ns);
/// The same, and starts them.
host::Error connect_all(Sides& sides, u64 limit_ns);

/// Sends and receives all messages of one side; returns when both are done.
Outcome run_side(const Plan& plan, Side& side, u32 rank, u32 peer);

/// Both sides of a pair in this process.
struct PairOutcome {
  Outcome first, second;
};
PairOutcome run_pair(const Plan& plan, Sides& sides);

/// Stops both at once. The first failure, if any.
host::Error close_all(Sides& sides, u64 limit_ns);

}  // namespace mk::test
