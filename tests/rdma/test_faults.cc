// Failures over real ibverbs: each is an error with call, device, peer and errno, and nothing hangs. Around each fault
// messages are exchanged and checked: before it, in its midst, and afterwards by new proxies of the same process.
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "stream.h"
#include "verbs/wrong_key.h"
#include "verbs_tests.h"

namespace mk::test {

using namespace mk::host;

namespace {

constexpr u64 kKinds = 4;  ///< of faults over each transport that share some_messages()

Plan share_of_messages(u64 parts) {
  Plan plan = plan_of(std::max<u64>(some_messages() / kKinds / parts, 1));
  plan.limit_ns = 20 * kSecond;
  return plan;
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
  Plan plan = share_of_messages(1);
  plan.delays = false;
  ProxyOptions options = options_to_drive(plan);
  options.max_outstanding = 3;  // far fewer than the messages that are ready
  Sides sides;
  join_two(plan, options, kind, sides);
  const Party parties[] = {{&sides[0], 0, 1}, {&sides[1], 1, 0}};
  check_outcomes(plan, drive(plan, parties));
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const Counters& counters = sides[rank].session->proxy().counters();
    CHECK_EQUAL(counters.get(kMostOutstanding), 3u);
    CHECK(counters.get(kStalls) != 0);
  }
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
}

void rc_with_full_queues() { a_full_queue_loses_nothing(kRc); }
void unordered_with_full_queues() { a_full_queue_loses_nothing(kUnordered); }

/// Rank 1's proxy does not run, so nobody posts receives again: the sender's queues and ring fill up.
void a_receiver_that_takes_nothing_is_named() {
  const Plan plan;
  ProxyOptions options = options_for(plan);
  options.max_outstanding = 8;
  options.ring_capacity = 4;
  options.timeout_ns = 2 * kSecond;
  Sides sides;
  open_two(plan, options, kUnordered, sides);
  CHECK_EQUAL(text_of(meet_all(sides, 20 * kSecond)), std::string());
  CHECK(!sides[0].session->proxy().start());
  int status = 0;
  for (u32 i = 0; status == 0; ++i) {
    u64 ticket = 0;
    CHECK(i < 1000);
    const Command command{0, 0, 64, 1, i % plan.slots, 1, 0, 0};
    status = sides[0].session->producer().push(command, now_ns() + kSecond / 4, ticket);
  }
  CHECK_EQUAL(status, ETIMEDOUT);  // the ring stayed full
  const Error error = fault_of(sides[0]);
  check_blame(error, {"poll", "rxe0/1", 1});
  CHECK_EQUAL(error.number, ETIMEDOUT);
}

/// Rank 0 is told a key of rank 1's memory that there is not.
void a_wrong_key_is_refused(TransportKind kind) {
  const Plan plan = share_of_messages(2);
  exchange(kind, plan, 1);
  Sides sides;
  open_two(plan, options_for(plan), kind, sides);
  join_with_a_wrong_key(sides);
  const Error error = fault_when_sending(sides[0], 1);
  CHECK_EQUAL(error.number, EACCES);
  check_blame(error, {"rdma write", "rxe0/1", 1});
  u32 seen = 0;
  (void)sides[1].session->wait_flag(0, 1, now_ns() + kSecond / 100, seen);
  CHECK_EQUAL(seen, 0u);
  exchange(kind, plan, 1);
}

void rc_with_a_wrong_key() { a_wrong_key_is_refused(kRc); }
void unordered_with_a_wrong_key() { a_wrong_key_is_refused(kUnordered); }

/// A peer that has closed without meeting us first: what we send afterwards fails, and says whom it was for.
void a_peer_that_has_left_is_named(TransportKind kind) {
  const Plan plan;
  Sides sides;
  join_two(plan, options_for(plan), kind, sides);
  CHECK(!sides[1].session->proxy().stop(now_ns() + 5 * kSecond));
  const Error error = fault_when_sending(sides[0], 1);
  CHECK_EQUAL(error.number, ENOTCONN);
  check_blame(error, {"post", "rxe0/1", 1});
}

void rc_after_a_goodbye() { a_peer_that_has_left_is_named(kRc); }
void unordered_after_a_goodbye() { a_peer_that_has_left_is_named(kUnordered); }

/// Rank 1 is a process that kills itself in the midst of traffic.
void a_killed_process_is_a_lost_peer(TransportKind kind) {
  const u64 half = share_of_messages(2).messages;
  Plan plan = share_of_messages(1);
  plan.limit_ns = 2 * kSecond;  // of who waits for credits and has nothing to send
  plan.messages = 2 * half + 2 * plan.slots;  // more than can be sent without the peer
  Child other([&](Channel& channel) {
    Side side;
    join_one(plan, options_to_drive(plan), {1, kind, "rxe1"}, channel, side);
    const Party party{&side, 1, 0};
    (void)drive(plan, {&party, 1}, half);
    std::raise(SIGKILL);
  });
  Sides sides(1);
  join_one(plan, options_to_drive(plan), {0, kind, "rxe0"}, other.channel(), sides[0]);
  const Party party{&sides[0], 0, 1};
  const Outcome outcome = drive(plan, {&party, 1})[0];
  CHECK_EQUAL(other.status(), 128 + SIGKILL);
  CHECK_EQUAL(outcome.wrong, 0u);
  const Error error = fault_when_sending(sides[0], 1);
  CHECK_EQUAL(error.number, ETIMEDOUT);
  check_blame(error, {"rdma write", "rxe0/1", 1});
  exchange(kind, share_of_messages(2), 1);
}

void rc_and_a_killed_process() { a_killed_process_is_a_lost_peer(kRc); }
void unordered_and_a_killed_process() { a_killed_process_is_a_lost_peer(kUnordered); }

/// A change of the network, undone at the end.
struct Changed {
  Changed(const char* change, const char* back) : undo(back) { CHECK_EQUAL(std::system(change), 0); }
  ~Changed() {
    if (std::system(undo) != 0) std::printf("  failed: %s\n", undo);
  }
  Changed(const Changed&) = delete;
  Changed& operator=(const Changed&) = delete;
  const char* undo;
};

/// Packets to rank 1 go to a machine that there is not: nobody acknowledges, and the connection's tries end.
void packets_that_nobody_takes_are_a_lost_peer(TransportKind kind) {
  const Plan plan;
  Sides sides;
  join_two(plan, options_for(plan), kind, sides);
  const Changed neighbour("ip neigh change 10.77.0.2 lladdr 02:00:00:00:00:ff dev va nud permanent",
                          "ip neigh change 10.77.0.2 lladdr 02:00:00:00:00:0b dev va nud permanent");
  const Error error = fault_when_sending(sides[0], 1);
  CHECK_EQUAL(error.number, ETIMEDOUT);
  check_blame(error, {"rdma write", "rxe0/1", 1});
}

void rc_without_an_answer() { packets_that_nobody_takes_are_a_lost_peer(kRc); }
void unordered_without_an_answer() { packets_that_nobody_takes_are_a_lost_peer(kUnordered); }

/// As the guest has made the cable; an interface that goes down forgets its routes and neighbours.
constexpr const char* kCableDown = "ip link set va down";
constexpr const char* kCableUp =
    "ip link set va up && ip route replace 10.77.0.2 dev va src 10.77.0.1 table 101 && "
    "ip route replace 10.77.0.1 dev vb src 10.77.0.2 table 102 && "
    "ip neigh replace 10.77.0.2 lladdr 02:00:00:00:00:0b dev va nud permanent && "
    "ip neigh replace 10.77.0.1 lladdr 02:00:00:00:00:0a dev vb nud permanent";

/// The interface below rank 0's NIC goes down in the midst of traffic: both ranks have failed before it comes back.
void a_link_that_goes_down_is_an_error(TransportKind kind) {
  const u64 half = share_of_messages(2).messages;
  Plan plan = share_of_messages(1);
  plan.limit_ns = 2 * kSecond;  // of who waits for credits and has nothing to send
  plan.messages = 2 * half + 2 * plan.slots;
  Sides sides;
  join_two(plan, options_to_drive(plan), kind, sides);
  Error errors[2];
  const Party parties[] = {{&sides[0], 0, 1}, {&sides[1], 1, 0}};
  for (const Outcome& one : drive(plan, parties, half)) CHECK_EQUAL(one.wrong, 0u);
  {
    const Changed cable(kCableDown, kCableUp);
    errors[0] = fault_when_sending(sides[0], 1);
    errors[1] = fault_when_sending(sides[1], 0);
  }
  for (int rank = 0; rank < 2; ++rank) {
    std::printf("  rank %d: %s\n", rank, text_of(errors[rank]).c_str());
    CHECK_EQUAL(errors[rank].number, ENETDOWN);  // rank 1's end of the cable has no carrier either
    check_blame(errors[rank], {"rdma write", rank == 0 ? "rxe0/1" : "rxe1/1", 1 - rank});
  }
  exchange(kind, share_of_messages(2), 1);
}

void rc_and_a_link_that_goes_down() { a_link_that_goes_down_is_an_error(kRc); }
void unordered_and_a_link_that_goes_down() { a_link_that_goes_down_is_an_error(kUnordered); }

}  // namespace

std::vector<Test> fault_tests() {
  return {{"device/a_device_that_is_not_there_is_named", a_device_that_is_not_there_is_named},
          {"rc/a_full_queue_loses_nothing", rc_with_full_queues},
          {"rc/a_wrong_key_is_refused_and_sets_no_flag", rc_with_a_wrong_key},
          {"rc/a_peer_that_has_left_is_named", rc_after_a_goodbye},
          {"rc/a_killed_process_is_a_lost_peer", rc_and_a_killed_process},
          {"rc/packets_that_nobody_takes_are_a_lost_peer", rc_without_an_answer},
          {"rc/a_link_that_goes_down_is_an_error", rc_and_a_link_that_goes_down},
          {"unordered/a_full_queue_loses_nothing", unordered_with_full_queues},
          {"unordered/a_receiver_that_takes_nothing_is_named", a_receiver_that_takes_nothing_is_named},
          {"unordered/a_wrong_key_is_refused_and_sets_no_flag", unordered_with_a_wrong_key},
          {"unordered/a_peer_that_has_left_is_named", unordered_after_a_goodbye},
          {"unordered/a_killed_process_is_a_lost_peer", unordered_and_a_killed_process},
          {"unordered/packets_that_nobody_takes_are_a_lost_peer", unordered_without_an_answer},
          {"unordered/a_link_that_goes_down_is_an_error", unordered_and_a_link_that_goes_down}};
}

}  // namespace mk::test
