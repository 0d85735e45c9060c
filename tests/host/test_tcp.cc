// tcp between two sides of one process: all bytes, several connections, staged device memory.
#include <cerrno>
#include <cstring>

#include "exchange.h"
#include "slow_engine.h"

namespace mk::test {

namespace {

using namespace mk::host;

constexpr u64 kSecond = 1'000'000'000;

void exchange_over(const Plan& plan, const ProxyOptions& common) {
  std::vector<SlowEngine> engines(2);
  std::vector<std::vector<std::byte>> bounce(2);
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    ProxyOptions options = common;
    options.transport = kTcp;
    options.rank = rank;
    if (options.bounce_bytes != 0) {
      bounce[rank].resize(options.bounce_bytes);
      options.bounce_base = reinterpret_cast<u64>(bounce[rank].data());
      use(engines[rank], options);
    }
    const Error error = open_side(plan, options, sides[rank]);
    CHECK_EQUAL(std::string(error.detail), std::string());
    CHECK(!error);
  }
  const Error error = connect_all(sides, 20 * kSecond);
  CHECK_EQUAL(std::string(error.detail), std::string());
  const PairOutcome outcome = run_pair(plan, sides);
  for (const Outcome* one : {&outcome.first, &outcome.second}) {
    CHECK_EQUAL(one->failure, std::string());
    CHECK_EQUAL(one->received, plan.messages);
    CHECK_EQUAL(one->wrong, 0u);
  }
  CHECK_EQUAL(std::string(sides[0].session->proxy().transport().device()), std::string("lo"));
  CHECK(!close_all(sides, 5 * kSecond));
}

void every_byte_arrives_before_its_flag() {
  Plan plan;
  plan.messages = 300;
  exchange_over(plan, options_for(plan));
}

void several_connections_share_the_messages() {
  Plan plan;
  plan.messages = 300;
  ProxyOptions options = options_for(plan);
  options.lanes = 3;
  exchange_over(plan, options);
}

void large_messages_come_in_parts() {
  Plan plan;
  plan.messages = 8;
  plan.slots = 2;
  plan.max_bytes = 6 << 20;  // more than is received at one look
  exchange_over(plan, options_for(plan));
}

void device_memory_goes_through_pinned_memory() {
  Plan plan;
  plan.messages = 120;
  plan.max_bytes = 100 << 10;
  ProxyOptions options = options_for(plan);
  options.lanes = 2;
  options.bounce_bytes = 4 * (32 << 10);  // slices of 16 KiB: most messages take several
  exchange_over(plan, options);
}

void closing_does_not_wait_for_peers_that_have_closed() {
  Plan plan;
  ProxyOptions options = options_for(plan);
  options.transport = kTcp;
  options.lanes = 8;
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    CHECK(!open_side(plan, options, sides[rank]));
  }
  CHECK(!meet_all(sides, 20 * kSecond));  // nobody reads the other's goodbye
  const u64 before = now_ns();
  CHECK(!sides[0].session->proxy().stop(before + 60 * kSecond));
  CHECK(!sides[1].session->proxy().stop(before + 60 * kSecond));
  CHECK(now_ns() - before < 2 * kSecond);
}

void device_memory_without_pinned_memory_is_refused() {
  Plan plan;
  SlowEngine engine;
  ProxyOptions options = options_for(plan);
  options.transport = kTcp;
  options.memory_kind = static_cast<u32>(MemoryKind::kCuda);
  use(engine, options);
  options.bounce_bytes = 0;
  Side side;
  CHECK_EQUAL(open_side(plan, options, side).number, EINVAL);
}

void an_interface_that_is_not_there_is_named() {
  Plan plan;
  ProxyOptions options = options_for(plan);
  options.transport = kTcp;
  std::strcpy(options.device, "no-such0");
  Side side;
  const Error error = open_side(plan, options, side);
  CHECK_EQUAL(error.number, ENODEV);
  CHECK_EQUAL(std::string(error.device), std::string("no-such0"));
}

void a_chosen_interface_is_used() {
  Plan plan;
  plan.messages = 20;
  ProxyOptions options = options_for(plan);
  std::strcpy(options.device, "lo");
  exchange_over(plan, options);
}

}  // namespace

std::vector<Test> tcp_tests() {
  return {{"tcp/every_byte_arrives_before_its_flag", every_byte_arrives_before_its_flag},
          {"tcp/several_connections_share_the_messages", several_connections_share_the_messages},
          {"tcp/large_messages_come_in_parts", large_messages_come_in_parts},
          {"tcp/device_memory_goes_through_pinned_memory", device_memory_goes_through_pinned_memory},
          {"tcp/closing_does_not_wait_for_peers_that_have_closed", closing_does_not_wait_for_peers_that_have_closed},
          {"tcp/device_memory_without_pinned_memory_is_refused", device_memory_without_pinned_memory_is_refused},
          {"tcp/an_interface_that_is_not_there_is_named", an_interface_that_is_not_there_is_named},
          {"tcp/a_chosen_interface_is_used", a_chosen_interface_is_used}};
}

}  // namespace mk::test
