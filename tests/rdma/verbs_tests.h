#pragma once
// Two ranks in one process, rank 0 on rxe0 and rank 1 on rxe1: what they exchange goes over the cable between these.
#include "exchange.h"

namespace mk::test {

inline constexpr u64 kSecond = 1'000'000'000;

std::vector<Test> exchange_tests();
std::vector<Test> fault_tests();

/// Opens both ranks over `kind`; each has its own NIC.
void open_two(const Plan& plan, ProxyOptions common, TransportKind kind, Sides& sides);
/// And connects them.
void join_two(const Plan& plan, const ProxyOptions& common, TransportKind kind, Sides& sides);
std::string text_of(const host::Error& error);

}  // namespace mk::test
