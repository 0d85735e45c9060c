#pragma once
// Two ranks of one process, each with a NIC of its own, and what is asked of them: the same of NICs that a stand-in
// makes up (tests/host/verbs) and of Soft-RoCE devices (tests/rdma).
#include <span>

#include "exchange.h"

namespace mk::test {

inline constexpr u64 kSecond = 1'000'000'000;

/// Opens both; rank r is on the device whose name is `nics` and r.
void open_on(const char* nics, const Plan& plan, ProxyOptions options, TransportKind kind, Sides& sides);
/// And connects them.
void join_on(const char* nics, const Plan& plan, const ProxyOptions& options, TransportKind kind, Sides& sides);

/// Every message of the plan has come, and no byte was wrong.
void check_outcomes(const Plan& plan, std::span<const Outcome> outcomes);

std::string text_of(const host::Error& error);
/// The first failure of a rank's proxy, awaited.
host::Error fault_of(Side& side);

}  // namespace mk::test
