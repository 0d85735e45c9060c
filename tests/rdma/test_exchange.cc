// Every byte in place when its flag is seen, over real ibverbs.
#include <cerrno>
#include <cstring>

#include "stream.h"
#include "verbs_tests.h"

namespace mk::test {

using namespace mk::host;

namespace {

void the_device_and_its_address_are_named() {
  Sides sides;
  const Plan plan;
  join_two(plan, options_for(plan), kRc, sides);
  const Transport& transport = sides[1].session->proxy().transport();
  CHECK_EQUAL(std::string(transport.device()).substr(0, 11), std::string("rxe1/1 gid "));
  CHECK(transport.registration() == Registration::kHost);
  CHECK(!transport.counts());
  CHECK(!close_all(sides, 5 * kSecond));
}

void rc_in_one_connection() { exchange(kRc, plan_of(500), 1); }
void rc_in_three_connections() { exchange(kRc, plan_of(500), 3); }
void rc_many() { exchange(kRc, plan_of(many_messages()), 2); }

/// As on a GPU whose memory keeps no order: the receiver's proxy counts and publishes.
void rc_where_writes_have_no_order() {
  const Plan plan = plan_of(500);
  ProxyOptions options = options_to_drive(plan);
  options.write_order = kWritesFlushed;
  exchange(kRc, plan, options);
}

/// As where no NIC reaches a GPU's memory.
void through_a_bounce_buffer(TransportKind kind) {
  const Plan plan = plan_of(500);
  ProxyOptions options = options_to_drive(plan);
  options.always_bounces = 1;
  exchange(kind, plan, options);
}

void rc_bounced() { through_a_bounce_buffer(kRc); }
void unordered_bounced() { through_a_bounce_buffer(kUnordered); }

void unordered_counted() { exchange(kUnordered, plan_of(500), 1); }
void unordered_many() { exchange(kUnordered, plan_of(many_messages()), 1); }

void flags_that_nobody_counts_come_too_early() {
  Plan plan = plan_of(200);
  plan.delays = false;
  ProxyOptions options = options_for(plan);
  options.order = kUncounted;
  Sides sides;
  join_two(plan, options, kUnordered, sides);
  const PairOutcome outcome = run_pair(plan, sides);
  CHECK(outcome.first.wrong + outcome.second.wrong > 0);
  (void)close_all(sides, 5 * kSecond);
}

void srd_says_what_is_missing() {
  const Plan plan;
  ProxyOptions options = options_for(plan);
  options.transport = kSrd;
  Side side;
  const Error error = open_side(plan, options, side);
  CHECK(error.number == ENODEV || error.number == ENOTSUP);
  CHECK(std::strlen(error.detail) != 0);
}

}  // namespace

std::vector<Test> exchange_tests() {
  return {{"device/the_device_and_its_address_are_named", the_device_and_its_address_are_named},
          {"rc/every_byte_arrives_before_its_flag", rc_in_one_connection},
          {"rc/several_connections_share_the_messages", rc_in_three_connections},
          {"rc/what_is_counted_arrives_where_writes_have_no_order", rc_where_writes_have_no_order},
          {"rc/every_byte_goes_through_a_bounce_buffer", rc_bounced},
          {"unordered/every_byte_goes_through_a_bounce_buffer", unordered_bounced},
          {"unordered/every_byte_arrives_before_its_flag", unordered_counted},
          {"unordered/flags_that_nobody_counts_come_too_early", flags_that_nobody_counts_come_too_early},
          {"unordered/many_messages_of_1_byte_to_64_KiB", unordered_many},
          {"srd/it_says_what_is_missing", srd_says_what_is_missing},
          {"rc/many_messages_of_1_byte_to_64_KiB", rc_many}};
}

}  // namespace mk::test
