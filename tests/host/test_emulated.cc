// The emulated network: right in every order, paced by its clock, and wrong where it is meant to be.
#include <cerrno>

#include "exchange.h"
#include "slow_engine.h"

namespace mk::test {

namespace {

using namespace mk::host;

constexpr u64 kSecond = 1'000'000'000;

void make_pair(const Plan& plan, const ProxyOptions& common, Sides& sides) {
  for (u32 rank = 0; rank < 2; ++rank) {
    ProxyOptions options = common;
    options.transport = kEmulated;
    options.rank = rank;
    const Error error = open_side(plan, options, sides[rank]);
    CHECK_EQUAL(error.number, 0);
  }
  CHECK(!connect_all(sides, kSecond));
}

void expect_all_right(const Plan& plan, const Outcome& outcome) {
  CHECK_EQUAL(outcome.failure, std::string());
  CHECK_EQUAL(outcome.received, plan.messages);
  CHECK_EQUAL(outcome.wrong, 0u);
}

void exchange_in(EmulatedOrder order, u64 shuffle_ns, u32 lanes) {
  Plan plan;
  plan.messages = 300;
  ProxyOptions options = options_for(plan);
  options.order = order;
  options.shuffle_ns = shuffle_ns;
  options.latency_ns = 5'000;
  options.lanes = lanes;
  Sides sides;
  make_pair(plan, options, sides);
  const PairOutcome outcome = run_pair(plan, sides);
  expect_all_right(plan, outcome.first);
  expect_all_right(plan, outcome.second);
  CHECK(!close_all(sides, 5 * kSecond));
}

void every_byte_arrives_before_its_flag_in_order() { exchange_in(kInOrder, 0, 1); }
void every_byte_arrives_before_its_flag_with_delays() { exchange_in(kInOrder, 50'000, 2); }
void every_byte_arrives_before_its_flag_out_of_order() { exchange_in(kShuffled, 100'000, 3); }

void flags_that_nobody_counts_come_too_early() {
  Plan plan;
  plan.messages = 32;
  plan.delays = false;
  ProxyOptions options = options_for(plan);
  options.order = kUncounted;
  options.shuffle_ns = 10'000'000;
  Sides sides;
  make_pair(plan, options, sides);
  const PairOutcome outcome = run_pair(plan, sides);
  CHECK(outcome.first.wrong + outcome.second.wrong > 0);
  (void)close_all(sides, 5 * kSecond);
}

void copies_of_an_engine_end_before_their_flags() {
  Plan plan;
  plan.messages = 200;
  std::vector<SlowEngine> engines(2);
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    ProxyOptions options = options_for(plan);
    options.transport = kEmulated;
    options.rank = rank;
    use(engines[rank], options);
    CHECK(!open_side(plan, options, sides[rank]));
  }
  CHECK(!connect_all(sides, kSecond));
  const PairOutcome outcome = run_pair(plan, sides);
  expect_all_right(plan, outcome.first);
  expect_all_right(plan, outcome.second);
  CHECK(!close_all(sides, 5 * kSecond));
}

void the_link_keeps_its_bandwidth_and_latency() {
  constexpr u64 kBytes = 64 << 10, kMessages = 64, kRate = 100'000'000, kLatency = 3'000'000;
  Plan plan;
  plan.slots = static_cast<u32>(kMessages);
  ProxyOptions options = options_for(plan);
  options.bandwidth_bytes_per_s = kRate;
  options.latency_ns = kLatency;
  Sides sides;
  make_pair(plan, options, sides);
  const u64 before = now_ns();
  u64 ticket = 0;
  u32 seen = 0;
  for (u32 i = 0; i < kMessages; ++i) {
    const Command command{4096, 4096, kBytes, 1, i, 1, 0, 0};
    CHECK_EQUAL(sides[0].session->producer().push(command, before + 10 * kSecond, ticket), 0);
  }
  CHECK_EQUAL(sides[1].session->wait_flag(0, 1, before + 10 * kSecond, seen), 0);
  CHECK(now_ns() - before >= kLatency);
  CHECK_EQUAL(sides[1].session->wait_flag(kMessages - 1, 1, before + 10 * kSecond, seen), 0);
  const double took = static_cast<double>(now_ns() - before) / 1e9;
  const double ideal = static_cast<double>(kBytes * kMessages) / kRate + kLatency / 1e9;
  CHECK(took >= 0.999 * ideal);
  CHECK(took <= 4 * ideal);  // other programs run here too
  CHECK(!close_all(sides, 5 * kSecond));
}

void memory_of_another_process_has_to_be_mapped() {
  Plan plan;
  ProxyOptions options = options_for(plan);
  options.transport = kEmulated;
  std::vector<u8> blob;
  Sides sides;
  CHECK(!open_side(plan, options, sides[0]));
  options.rank = 1;
  CHECK(!open_side(plan, options, sides[1]));
  CHECK(!sides[1].session->endpoint(0, blob));
  blob.back() ^= 1;  // the process number
  const Error error = sides[0].session->connect(1, blob);
  CHECK_EQUAL(error.number, EINVAL);
  CHECK_EQUAL(error.peer, 1);
}

void sides_with_different_settings_do_not_connect() {
  Plan plan;
  ProxyOptions options = options_for(plan);
  options.transport = kEmulated;
  Sides sides;
  CHECK(!open_side(plan, options, sides[0]));
  options.rank = 1;
  options.lanes = 2;
  CHECK(!open_side(plan, options, sides[1]));
  std::vector<u8> blob;
  CHECK(!sides[1].session->endpoint(0, blob));
  CHECK_EQUAL(sides[0].session->connect(1, blob).number, EPROTO);
  CHECK_EQUAL(sides[0].session->connect(1, std::span(blob).first(10)).number, EPROTO);
}

/// What all these tests rely on. A byte inside, one beside, and one far away, which is seen by one of thirteen looks.
void a_wrong_byte_is_found_wherever_it_is() {
  const Plan plan;
  const Message message{1000, 0, 30'000, 77};
  std::vector<std::byte> slot(Layout(plan).slot_bytes);
  poison(slot.data(), slot.size());
  Reader reader(plan);
  const auto looks = [&](u64 wrong_at) {
    fill(slot.data() + message.destination, message);
    slot[wrong_at] ^= std::byte{1};
    return reader.take(slot.data(), message);
  };
  CHECK(!looks(message.destination) && !looks(message.destination + message.bytes - 1));
  CHECK(!looks(message.destination - 1) && !looks(message.destination + message.bytes));
  fill(slot.data() + message.destination, message);
  CHECK(reader.take(slot.data(), message));
  bool is_seen = false;
  slot[slot.size() - 1] ^= std::byte{1};
  for (int look = 0; look < 13 && !is_seen; ++look) {
    fill(slot.data() + message.destination, message);
    is_seen = !reader.take(slot.data(), message);
  }
  CHECK(is_seen);
}

}  // namespace

std::vector<Test> emulated_tests() {
  return {
      {"messages/a_wrong_byte_is_found_wherever_it_is", a_wrong_byte_is_found_wherever_it_is},
      {"emulated/every_byte_arrives_before_its_flag_in_order", every_byte_arrives_before_its_flag_in_order},
      {"emulated/every_byte_arrives_before_its_flag_with_delays", every_byte_arrives_before_its_flag_with_delays},
      {"emulated/every_byte_arrives_before_its_flag_out_of_order", every_byte_arrives_before_its_flag_out_of_order},
      {"emulated/flags_that_nobody_counts_come_too_early", flags_that_nobody_counts_come_too_early},
      {"emulated/copies_of_an_engine_end_before_their_flags", copies_of_an_engine_end_before_their_flags},
      {"emulated/the_link_keeps_its_bandwidth_and_latency", the_link_keeps_its_bandwidth_and_latency},
      {"emulated/memory_of_another_process_has_to_be_mapped", memory_of_another_process_has_to_be_mapped},
      {"emulated/sides_with_different_settings_do_not_connect", sides_with_different_settings_do_not_connect},
  };
}

}  // namespace mk::test
