// Failures over real ibverbs: each is an error with call, device, peer and errno, and nothing hangs.
#include <cerrno>
#include <cstddef>
#include <cstdlib>

#include "host/verbs/link.h"
#include "host/wait.h"
#include "verbs_tests.h"

namespace mk::test {

using namespace mk::host;

namespace {

/// The first failure of a proxy, awaited.
Error fault_of(Side& side) {
  Error error;
  Proxy& proxy = side.session->proxy();
  CHECK_EQUAL(wait_bounded(now_ns() + 30 * kSecond, [&] { return proxy.fault(error); }, [] { return false; }), 0);
  return error;
}

int push(Side& side, u32 peer, u64 bytes, u32 chunk) {
  u64 ticket = 0;
  return side.session->producer().push({0, 0, bytes, peer, chunk, 1, 0, 0}, now_ns() + 20 * kSecond, ticket);
}

void a_device_that_is_not_there_is_named() {
  const Plan plan;
  for (const TransportKind kind : {kRc, kUnordered}) {
    ProxyOptions options = options_for(plan);
    options.transport = kind;
    std::snprintf(options.device, sizeof options.device, "rxe9");
    Side side;
    const Error error = open_side(plan, options, side);
    CHECK_EQUAL(error.number, ENODEV);
    CHECK_EQUAL(std::string(error.device), std::string("rxe9"));
  }
}

void a_full_queue_loses_nothing(TransportKind kind) {
  Plan plan;
  plan.messages = 200;
  plan.slots = 64;
  plan.delays = false;
  ProxyOptions options = options_for(plan);
  options.max_outstanding = 3;  // far fewer than the messages that are ready
  Sides sides;
  join_two(plan, options, kind, sides);
  const PairOutcome outcome = run_pair(plan, sides);
  for (const Outcome* one : {&outcome.first, &outcome.second}) {
    CHECK_EQUAL(one->failure, std::string());
    CHECK_EQUAL(one->received, plan.messages);
    CHECK_EQUAL(one->wrong, 0u);
  }
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
}

void rc_with_full_queues() { a_full_queue_loses_nothing(kRc); }
void unordered_with_full_queues() { a_full_queue_loses_nothing(kUnordered); }

/// Rank 0 is told a key of rank 1's memory that there is not.
void a_wrong_key_is_refused(TransportKind kind) {
  const Plan plan;
  Sides sides;
  open_two(plan, options_for(plan), kind, sides);
  for (u32 from = 0; from < 2; ++from) {
    std::vector<u8> blob;
    CHECK(!sides[from].session->endpoint(1 - from, blob));
    if (from == 1) blob[blob.size() - sizeof(verbs::Endpoint) + offsetof(verbs::Endpoint, region_key) + 1] ^= 0x55;
    CHECK_EQUAL(text_of(sides[1 - from].session->connect(from, blob)), std::string());
  }
  for (u32 rank = 0; rank < 2; ++rank) CHECK(!sides[rank].session->proxy().start());
  CHECK_EQUAL(push(sides[0], 1, 4096, 0), 0);
  const Error error = fault_of(sides[0]);
  CHECK_EQUAL(error.number, EACCES);
  CHECK_EQUAL(error.peer, 1);
  CHECK_EQUAL(std::string(error.device).substr(0, 6), std::string("rxe0/1"));
  u32 seen = 0;
  (void)sides[1].session->wait_flag(0, 1, now_ns() + kSecond / 100, seen);
  CHECK_EQUAL(seen, 0u);
}

void rc_with_a_wrong_key() { a_wrong_key_is_refused(kRc); }
void unordered_with_a_wrong_key() { a_wrong_key_is_refused(kUnordered); }

/// A peer that has closed without meeting us first: what we send afterwards fails, and says whom it was for.
void a_peer_that_has_left_is_named(TransportKind kind) {
  const Plan plan;
  Sides sides;
  join_two(plan, options_for(plan), kind, sides);
  CHECK(!sides[1].session->proxy().stop(now_ns() + 5 * kSecond));
  (void)push(sides[0], 1, 4096, 0);
  const Error error = fault_of(sides[0]);
  CHECK_EQUAL(error.number, ENOTCONN);
  CHECK_EQUAL(error.peer, 1);
}

void rc_after_a_goodbye() { a_peer_that_has_left_is_named(kRc); }
void unordered_after_a_goodbye() { a_peer_that_has_left_is_named(kUnordered); }

/// Packets to rank 1 go to a machine that there is not: nobody acknowledges, and the connection's tries end.
void a_link_that_goes_down_is_a_lost_peer() {
  const Plan plan;
  Sides sides;
  join_two(plan, options_for(plan), kRc, sides);
  CHECK_EQUAL(std::system("ip neigh change 10.77.0.2 lladdr 02:00:00:00:00:ff dev va nud permanent"), 0);
  const u64 before = now_ns();
  (void)push(sides[0], 1, 4096, 0);
  Error error;
  Proxy& proxy = sides[0].session->proxy();
  const int waited = wait_bounded(before + 25 * kSecond, [&] { return proxy.fault(error); }, [] { return false; });
  CHECK_EQUAL(std::system("ip neigh change 10.77.0.2 lladdr 02:00:00:00:00:0b dev va nud permanent"), 0);
  CHECK_EQUAL(waited, 0);
  CHECK_EQUAL(error.number, ETIMEDOUT);
  CHECK_EQUAL(std::string(error.call), std::string("rdma write"));
  CHECK_EQUAL(error.peer, 1);
}

}  // namespace

std::vector<Test> fault_tests() {
  return {{"device/a_device_that_is_not_there_is_named", a_device_that_is_not_there_is_named},
          {"rc/a_full_queue_loses_nothing", rc_with_full_queues},
          {"rc/a_wrong_key_is_refused_and_sets_no_flag", rc_with_a_wrong_key},
          {"rc/a_peer_that_has_left_is_named", rc_after_a_goodbye},
          {"unordered/a_full_queue_loses_nothing", unordered_with_full_queues},
          {"unordered/a_wrong_key_is_refused_and_sets_no_flag", unordered_with_a_wrong_key},
          {"unordered/a_peer_that_has_left_is_named", unordered_after_a_goodbye},
          {"rc/a_link_that_goes_down_is_a_lost_peer", a_link_that_goes_down_is_a_lost_peer}};
}

}  // namespace mk::test
