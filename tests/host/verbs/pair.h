#pragma once
// Two ranks in one process, each with a NIC of the stand-in of its own: "nic0" and "nic1".
#include "standin/standin.h"
#include "two_ranks.h"

namespace mk::test {

/// Both NICs are as `like`.
void plug_in(const standin::Device& like = {});
standin::Device efa();

Plan short_plan();
/// Opens both ranks.
void open_pair(const Plan& plan, ProxyOptions common, TransportKind kind, Sides& sides);
/// And connects them.
void join_pair(const Plan& plan, const ProxyOptions& common, TransportKind kind, Sides& sides);
/// All messages of the plan, both ways; every byte must be right. Closes.
void exchange(const Plan& plan, Sides& sides);
/// What both ranks give back is everything.
void check_nothing_is_left();

int push(Side& side, u32 peer, u64 bytes, u32 chunk, u32 epoch = 1);
host::Registration registration_of(Side& side);
bool counts(Side& side);

}  // namespace mk::test
