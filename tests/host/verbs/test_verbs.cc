// rc and unordered over the stand-in: who publishes flags, and what each failure is.
#include <infiniband/verbs.h>

#include <cerrno>

#include "host/wait.h"
#include "pair.h"
#include "wrong_key.h"

namespace mk::test {

namespace {

using namespace mk::host;

void a_nic_that_keeps_order_writes_flags_itself() {
  plug_in();
  {
    const Plan plan = short_plan();
    Sides sides;
    ProxyOptions options = options_for(plan);
    options.lanes = 2;
    join_pair(plan, options, kRc, sides);
    CHECK(!counts(sides[0]) && !counts(sides[1]));
    exchange(plan, sides);
    CHECK_EQUAL(standin::seen().immediates, 0u);
  }
  check_nothing_is_left();
}

void memory_is_never_registered_with_relaxed_order() {
  plug_in();
  Sides sides;
  join_pair(short_plan(), options_for(short_plan()), kRc, sides);
  CHECK_EQUAL(standin::seen().access.size(), 4u);
  for (const int access : standin::seen().access) CHECK_EQUAL(access & IBV_ACCESS_RELAXED_ORDERING, 0);
}

/// The receiver counts; its sender is told so.
void counted(const standin::Device& nic, WriteOrder order, TransportKind kind) {
  plug_in(nic);
  {
    const Plan plan = short_plan();
    Sides sides;
    ProxyOptions options = options_for(plan);
    options.write_order = order;
    options.lanes = 2;
    join_pair(plan, options, kind, sides);
    CHECK(counts(sides[0]) && counts(sides[1]));
    exchange(plan, sides);
    CHECK(standin::seen().immediates >= 4 * plan.messages);
  }
  check_nothing_is_left();
}

void a_nic_of_an_unknown_maker_is_counted() {
  standin::Device nic;
  nic.vendor = 0x14e4;
  nic.keeps_order = false;
  counted(nic, kWritesInOrder, kRc);
  CHECK(standin::seen().overtaken > 0);
}
void memory_that_needs_a_flush_is_counted() { counted({}, kWritesFlushed, kRc); }
void unordered_is_counted() { counted({}, kWritesInOrder, kUnordered); }
void a_provider_without_wr_calls_is_counted_too() {
  standin::Device nic;
  nic.has_wr_calls = false;
  nic.max_inline = 0;
  counted(nic, kWritesFlushed, kRc);
}

void a_provider_without_wr_calls_and_inline_writes_works() {
  standin::Device nic;
  nic.has_wr_calls = false;
  nic.max_inline = 0;
  plug_in(nic);
  Sides sides;
  join_pair(short_plan(), options_for(short_plan()), kRc, sides);
  exchange(short_plan(), sides);
}

/// One rank's memory keeps the order and the other's does not: each sender does what its receiver needs.
void each_receiver_says_how_its_flags_come() {
  plug_in();
  const Plan plan = short_plan();
  Sides sides;
  ProxyOptions options = options_for(plan);
  options.transport = kRc;
  for (u32 rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    options.write_order = rank == 0 ? kWritesInOrder : kWritesFlushed;
    std::snprintf(options.device, sizeof options.device, "nic%u", rank);
    CHECK_EQUAL(text_of(open_side(plan, options, sides[rank])), std::string());
  }
  CHECK_EQUAL(text_of(connect_all(sides, 5 * kSecond)), std::string());
  CHECK(!counts(sides[0]) && counts(sides[1]));
  exchange(plan, sides);
  CHECK_EQUAL(sides[0].session->proxy().counters().get(kArrivals), 0u);
  CHECK(sides[1].session->proxy().counters().get(kArrivals) >= plan.messages);  // and most credits
}

/// A negative control: a NIC that passes for orderly and is not. Flags come before their data.
void order_that_a_nic_does_not_keep_is_seen() {
  standin::Device nic;
  nic.keeps_order = false;
  plug_in(nic);
  Plan plan = short_plan();
  plan.messages = 500;
  plan.delays = false;
  Sides sides;
  join_pair(plan, options_for(plan), kRc, sides);
  const PairOutcome outcome = run_pair(plan, sides);
  CHECK(outcome.first.wrong + outcome.second.wrong > 0);
}

/// What a fault has to say.
void check_fault(Side& side, i32 number, const char* call) {
  const Error error = fault_of(side);
  CHECK_EQUAL(error.number, number);
  CHECK_EQUAL(std::string(error.call), std::string(call));
  CHECK_EQUAL(error.peer, 1);
  CHECK_EQUAL(std::string(error.device).substr(0, 12), std::string("nic0/1 gid 0"));
}

void a_failed_completion_is_a_fault() {
  for (const TransportKind kind : {kRc, kUnordered}) {
    plug_in();
    Sides sides;
    join_pair(short_plan(), options_for(short_plan()), kind, sides);
    standin::change("nic0", [](standin::Device& nic) { nic.fails_after = 0; });
    CHECK_EQUAL(push(sides[0], 1, 64, 0), 0);
    check_fault(sides[0], EIO, "rdma write");
  }
}

void a_port_that_goes_down_is_a_fault_of_its_own() {
  plug_in();
  Sides sides;
  join_pair(short_plan(), options_for(short_plan()), kRc, sides);
  standin::change("nic0", [](standin::Device& nic) {
    nic.ports[0].is_active = false;
    nic.fails_after = 0;
  });
  CHECK_EQUAL(push(sides[0], 1, 64, 0), 0);
  check_fault(sides[0], ENETDOWN, "rdma write");
}

/// Requests that were flushed say nothing; the one that broke the connection does, though it comes last.
void what_broke_a_connection_is_looked_for() {
  standin::Device nic;
  nic.flushes_first = true;
  plug_in(nic);
  Sides sides;
  ProxyOptions options = options_for(short_plan());
  options.window_ns = kSecond / 100;  // all in one batch
  join_pair(short_plan(), options, kUnordered, sides);
  standin::change("nic1", [](standin::Device& other) { other.is_dead = true; });
  for (u32 chunk = 0; chunk < 4; ++chunk) CHECK_EQUAL(push(sides[0], 1, 4096, chunk), 0);
  check_fault(sides[0], ETIMEDOUT, "rdma write");
}

void a_peer_that_is_gone_is_a_fault() {
  for (const TransportKind kind : {kRc, kUnordered}) {
    plug_in();
    Sides sides;
    join_pair(short_plan(), options_for(short_plan()), kind, sides);
    standin::change("nic1", [](standin::Device& nic) { nic.is_dead = true; });
    CHECK_EQUAL(push(sides[0], 1, 64, 0), 0);
    check_fault(sides[0], ETIMEDOUT, "rdma write");
  }
}

void a_receiver_that_is_never_ready_is_a_fault_at_the_deadline() {
  standin::Device nic;
  nic.loses_receives = true;
  plug_in(nic);
  Sides sides;
  ProxyOptions options = options_for(short_plan());
  options.timeout_ns = kSecond / 10;
  join_pair(short_plan(), options, kUnordered, sides);
  CHECK_EQUAL(push(sides[0], 1, 64, 0), 0);
  check_fault(sides[0], ETIMEDOUT, "poll");
}

void a_wrong_key_is_a_fault() {
  for (const TransportKind kind : {kRc, kUnordered}) {
    plug_in();
    Sides sides;
    open_pair(short_plan(), options_for(short_plan()), kind, sides);
    join_with_a_wrong_key(sides);
    CHECK_EQUAL(push(sides[0], 1, 4096, 0), 0);
    check_fault(sides[0], EACCES, "rdma write");
  }
}

void a_peer_that_has_said_goodbye_is_a_fault() {
  for (const TransportKind kind : {kRc, kUnordered}) {
    plug_in();
    Sides sides;
    join_pair(short_plan(), options_for(short_plan()), kind, sides);
    CHECK(!sides[1].session->proxy().stop(now_ns() + kSecond));
    CHECK_EQUAL(push(sides[0], 1, 64, 0), 0);
    check_fault(sides[0], ENOTCONN, "post");
  }
}

/// Both kinds of counted transports, each receiver with a quarter of its receives used before it looks at them.
struct Counting {
  TransportKind kind;
  WriteOrder order;
};
constexpr Counting kCounting[] = {{kRc, kWritesFlushed}, {kUnordered, kWritesInOrder}};
constexpr u32 kFewMessages = 8;

/// Rank 1's messages have all arrived, and nobody has looked at them: rank 0's proxy does not run yet.
void send_to_a_late_rank(const Counting& counting, Sides& sides) {
  ProxyOptions options = options_for(short_plan());
  options.write_order = counting.order;
  options.max_outstanding = 3;  // few receives, so that credits are due soon
  open_pair(short_plan(), options, counting.kind, sides);
  CHECK_EQUAL(text_of(meet_all(sides, kSecond)), std::string());
  CHECK(!sides[1].session->proxy().start());
  u64 ticket = 0;
  for (u32 chunk = 0; chunk < kFewMessages; ++chunk) {
    const Command command{0, 4096, 4096, 0, chunk, 1, 0, 0};
    CHECK_EQUAL(sides[1].session->producer().push(command, now_ns() + kSecond, ticket), 0);
  }
  CHECK_EQUAL(sides[1].session->producer().wait_retired(ticket, now_ns() + kSecond), 0);
}

void await(const std::function<bool()>& done) {
  CHECK_EQUAL(wait_bounded(now_ns() + 10 * kSecond, done, [] { return false; }), 0);
}

/// The proxy goes on: some rounds later it still has no fault.
void check_it_goes_on(Side& side) {
  const Proxy& proxy = side.session->proxy();
  const u64 rounds = proxy.counters().get(kRounds);
  await([&] { return proxy.stopped() || proxy.counters().get(kRounds) > rounds + 10; });
  Error error;
  (void)proxy.fault(error);
  CHECK_EQUAL(text_of(error), std::string());
}

void await_arrivals(Side& side) {
  const Counters& counters = side.session->proxy().counters();
  await([&] { return counters.get(kArrivals) == kFewMessages; });
}

void a_peer_that_has_left_is_told_no_credits() {
  for (const Counting& counting : kCounting) {
    plug_in();
    Sides sides;
    send_to_a_late_rank(counting, sides);
    CHECK(!sides[1].session->proxy().stop(now_ns() + kSecond));  // its memory is gone
    CHECK(!sides[0].session->proxy().start());
    await_arrivals(sides[0]);
    check_it_goes_on(sides[0]);
    CHECK_EQUAL(standin::seen().refused, 0u);
  }
}

void credits_that_find_the_peer_gone_are_no_failure() {
  for (const Counting& counting : kCounting) {
    plug_in();
    Sides sides;
    send_to_a_late_rank(counting, sides);
    standin::change("nic0", [](standin::Device& nic) { nic.is_held = true; });
    CHECK(!sides[0].session->proxy().start());
    await_arrivals(sides[0]);
    check_it_goes_on(sides[0]);  // the credits are on the wire
    CHECK(!sides[1].session->proxy().stop(now_ns() + kSecond));
    standin::change("nic0", [](standin::Device& nic) { nic.is_held = false; });
    await([] { return standin::seen().refused != 0; });
    check_it_goes_on(sides[0]);
  }
}

/// Rank 1 sends nothing, and learns all the same that nothing more will come.
void a_proxy_that_fails_tells_its_peers() {
  for (const TransportKind kind : {kRc, kUnordered}) {
    for (const u32 bounces : {0u, 1u}) {
      plug_in();
      Sides sides;
      ProxyOptions options = options_for(short_plan());
      options.always_bounces = bounces;
      join_pair(short_plan(), options, kind, sides);
      CHECK_EQUAL(push(sides[0], 1, 64, options.num_flags), 0);  // a flag that there is not
      CHECK_EQUAL(fault_of(sides[0]).number, EINVAL);
      const Error error = fault_of(sides[1]);
      CHECK_EQUAL(error.number, ECONNRESET);
      CHECK_EQUAL(error.peer, 0);
      CHECK_EQUAL(std::string(error.call), std::string("poll"));
      CHECK(!sides[1].session->proxy().stop(now_ns() + kSecond));
    }
  }
}

void an_endpoint_of_another_shape_is_refused() {
  plug_in();
  Sides sides;
  open_pair(short_plan(), options_for(short_plan()), kRc, sides);
  std::vector<u8> blob;
  CHECK(!sides[0].session->endpoint(1, blob));
  blob.pop_back();
  CHECK_EQUAL(sides[1].session->connect(0, blob).number, EPROTO);
}

}  // namespace

std::vector<Test> verbs_tests() {
  return {{"rc/a_nic_that_keeps_order_writes_flags_itself", a_nic_that_keeps_order_writes_flags_itself},
          {"rc/memory_is_never_registered_with_relaxed_order", memory_is_never_registered_with_relaxed_order},
          {"rc/a_nic_of_an_unknown_maker_is_counted", a_nic_of_an_unknown_maker_is_counted},
          {"rc/memory_that_needs_a_flush_is_counted", memory_that_needs_a_flush_is_counted},
          {"rc/a_provider_without_wr_calls_is_counted_too", a_provider_without_wr_calls_is_counted_too},
          {"rc/a_provider_without_wr_calls_and_inline_writes_works",
           a_provider_without_wr_calls_and_inline_writes_works},
          {"rc/each_receiver_says_how_its_flags_come", each_receiver_says_how_its_flags_come},
          {"rc/order_that_a_nic_does_not_keep_is_seen", order_that_a_nic_does_not_keep_is_seen},
          {"unordered/every_byte_arrives_before_its_flag", unordered_is_counted},
          {"verbs/a_failed_completion_is_a_fault", a_failed_completion_is_a_fault},
          {"verbs/a_port_that_goes_down_is_a_fault_of_its_own", a_port_that_goes_down_is_a_fault_of_its_own},
          {"verbs/what_broke_a_connection_is_looked_for", what_broke_a_connection_is_looked_for},
          {"verbs/a_peer_that_is_gone_is_a_fault", a_peer_that_is_gone_is_a_fault},
          {"verbs/a_receiver_that_is_never_ready_is_a_fault_at_the_deadline",
           a_receiver_that_is_never_ready_is_a_fault_at_the_deadline},
          {"verbs/a_wrong_key_is_a_fault", a_wrong_key_is_a_fault},
          {"verbs/a_peer_that_has_said_goodbye_is_a_fault", a_peer_that_has_said_goodbye_is_a_fault},
          {"verbs/a_peer_that_has_left_is_told_no_credits", a_peer_that_has_left_is_told_no_credits},
          {"verbs/credits_that_find_the_peer_gone_are_no_failure", credits_that_find_the_peer_gone_are_no_failure},
          {"verbs/a_proxy_that_fails_tells_its_peers", a_proxy_that_fails_tells_its_peers},
          {"verbs/an_endpoint_of_another_shape_is_refused", an_endpoint_of_another_shape_is_refused}};
}

}  // namespace mk::test
