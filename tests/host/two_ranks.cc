#include "two_ranks.h"

#include <cstring>

#include "host/wait.h"

namespace mk::test {

using namespace mk::host;

namespace {

constexpr u64 kNoticed = 30 * kSecond;  ///< the longest that a failure may take to be one

}  // namespace

void open_on(const char* nics, const Plan& plan, ProxyOptions options, TransportKind kind, Sides& sides) {
  options.transport = kind;
  for (u32 rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    std::snprintf(options.device, sizeof options.device, "%s%u", nics, rank);
    CHECK_EQUAL(text_of(open_side(plan, options, sides[rank])), std::string());
  }
}

void join_on(const char* nics, const Plan& plan, const ProxyOptions& options, TransportKind kind, Sides& sides) {
  open_on(nics, plan, options, kind, sides);
  CHECK_EQUAL(text_of(connect_all(sides, 20 * kSecond)), std::string());
}

void check_outcomes(const Plan& plan, std::span<const Outcome> outcomes) {
  std::string failures;  // of all: what one rank reports is often only what came of the other's
  for (const Outcome& one : outcomes) failures += one.failure.empty() ? "" : "[" + one.failure + "] ";
  CHECK_EQUAL(failures, std::string());
  for (const Outcome& one : outcomes) {
    CHECK_EQUAL(one.received, plan.messages);
    CHECK_EQUAL(one.wrong, 0u);
  }
}

std::string text_of(const Error& error) {
  if (!error) return {};
  return std::string(error.call) + " " + error.device + " peer " + std::to_string(error.peer) + ": " +
         std::strerror(error.number) + " " + error.detail;
}

Error fault_of(Side& side) {
  Error error;
  Proxy& proxy = side.session->proxy();
  CHECK_EQUAL(wait_bounded(now_ns() + kNoticed, [&] { return proxy.fault(error); }, [] { return false; }), 0);
  return error;
}

}  // namespace mk::test
