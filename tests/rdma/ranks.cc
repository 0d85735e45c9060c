#include <cstdlib>
#include <cstring>

#include "host/wait.h"
#include "stream.h"
#include "verbs_tests.h"

namespace mk::test {

using namespace mk::host;

namespace {

constexpr u64 kUsual = 1000;
constexpr u64 kNoticed = 30 * kSecond;  ///< as fault_of() has it

}  // namespace

u64 many_messages() {
  const char* given = std::getenv("MK_RDMA_MESSAGES");
  return given == nullptr ? kUsual : std::strtoull(given, nullptr, 10);
}

u64 some_messages() { return many_messages() / 10; }

Plan plan_of(u64 messages) {
  Plan plan;
  plan.messages = messages;
  plan.slots = 64;  // enough in flight that a slow machine is never idle
  return plan;
}

void open_two(const Plan& plan, ProxyOptions options, TransportKind kind, Sides& sides) {
  open_on("rxe", plan, options, kind, sides);
}

void join_two(const Plan& plan, const ProxyOptions& common, TransportKind kind, Sides& sides) {
  join_on("rxe", plan, common, kind, sides);
}

void join_one(const Plan& plan, ProxyOptions options, const Rank& who, Channel& channel, Side& side) {
  options.transport = who.kind;
  options.rank = who.rank;
  std::snprintf(options.device, sizeof options.device, "%s", who.device);
  const u32 peer = 1 - who.rank;
  std::vector<u8> blob;
  CHECK_EQUAL(text_of(open_side(plan, options, side)), std::string());
  CHECK_EQUAL(text_of(side.session->endpoint(peer, blob)), std::string());
  channel.send(blob);
  CHECK_EQUAL(text_of(side.session->connect(peer, channel.receive())), std::string());
  CHECK_EQUAL(text_of(side.session->finish(now_ns() + 20 * kSecond)), std::string());
  channel.meet();
  CHECK_EQUAL(text_of(side.session->proxy().start()), std::string());
}

void exchange(TransportKind kind, const Plan& plan, u32 lanes) {
  ProxyOptions options = options_to_drive(plan);
  options.lanes = lanes;
  exchange(kind, plan, options);
}

void exchange(TransportKind kind, const Plan& plan, const ProxyOptions& options) {
  Sides sides;
  join_two(plan, options, kind, sides);
  const Party parties[] = {{&sides[0], 0, 1}, {&sides[1], 1, 0}};
  check_outcomes(plan, drive(plan, parties));
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
}

Error fault_when_sending(Side& side, u32 peer) {
  Error error;
  Session& session = *side.session;
  const u64 until_ns = now_ns() + kNoticed;
  while (!session.proxy().fault(error)) {
    u64 ticket = 0;
    CHECK(now_ns() < until_ns);
    (void)session.producer().push({0, 0, 4096, peer, 0, 1, 0, 0}, now_ns() + kSecond, ticket);
    (void)wait_bounded(now_ns() + kSecond / 10, [&] { return session.proxy().fault(error); }, [] { return false; });
  }
  return error;
}

void check_blame(const Error& error, const Blame& blame) {
  CHECK_EQUAL(std::string(error.call), std::string(blame.call));
  CHECK_EQUAL(std::string(error.device).substr(0, std::strlen(blame.device)), std::string(blame.device));
  CHECK_EQUAL(error.peer, blame.peer);
}

}  // namespace mk::test
