#pragma once
// Ranks over real ibverbs. In one machine rank 0 is on rxe0 and rank 1 on rxe1, and what they exchange goes over the
// cable between these; of two machines each has a rank, on rxe2.
#include "processes.h"
#include "two_ranks.h"

namespace mk::test {

std::vector<Test> exchange_tests();
std::vector<Test> fault_tests();
std::vector<Test> independent_tests();
std::vector<Test> pair_tests();

/// Opens both ranks over `kind`; each has its own NIC.
void open_two(const Plan& plan, ProxyOptions common, TransportKind kind, Sides& sides);
/// And connects them.
void join_two(const Plan& plan, const ProxyOptions& common, TransportKind kind, Sides& sides);

/// One rank of two processes: opened on `device`, joined to the other through the channel, started.
struct Rank {
  u32 rank;
  TransportKind kind;
  const char* device;
};
void join_one(const Plan& plan, ProxyOptions options, const Rank& who, Channel& channel, Side& side);

/// $MK_RDMA_MESSAGES is the length of the long runs, each way.
u64 many_messages();
/// A tenth: what all faults of a transport have together, and each run between two machines.
u64 some_messages();
Plan plan_of(u64 messages);
/// All of a plan between two new ranks of this process; `options` are from options_to_drive().
void exchange(TransportKind kind, const Plan& plan, const ProxyOptions& options);
void exchange(TransportKind kind, const Plan& plan, u32 lanes);

/// fault_of() of one that goes on sending: who has nothing on its way does not learn that its peer is gone, and a
/// peer's NIC may still take what comes over some of its connections.
host::Error fault_when_sending(Side& side, u32 peer);
/// What a failure must name.
struct Blame {
  const char* call;
  const char* device;
  i32 peer;
};
void check_blame(const host::Error& error, const Blame& blame);

}  // namespace mk::test
