// Two machines: rank r runs in machine r ($VM_RANK), on rxe2. Both machines run the same tests in the same order, and
// each test meets the other machine's anew, so that one that fails does not take the next along.
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "stream.h"
#include "verbs_tests.h"

namespace mk::test {

using namespace mk::host;

namespace {

constexpr const char* kDevice = "rxe2";
constexpr u64 kNeverEnough = ~u64{0};

u32 own_rank() {
  const char* given = std::getenv("VM_RANK");
  CHECK(given != nullptr);
  return static_cast<u32>(std::strtoul(given, nullptr, 10));
}

Plan plan_with_limit(u64 messages) {
  Plan plan = plan_of(messages);
  plan.limit_ns = 20 * kSecond;
  return plan;
}

void every_byte(TransportKind kind, u32 number, u64 messages) {
  const Plan plan = plan_with_limit(messages);
  const u32 rank = own_rank();
  Channel channel = channel_to_other_machine(rank, number);
  Sides sides(1);
  join_one(plan, options_to_drive(plan), {rank, kind, kDevice}, channel, sides[0]);
  const Party party{&sides[0], rank, 1 - rank};
  check_outcomes(plan, drive(plan, {&party, 1}));
  channel.meet();
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
}

/// More than can be sent without the peer.
Plan plan_in_midst() {
  Plan plan = plan_with_limit(some_messages());
  plan.messages += 2 * plan.slots;
  plan.limit_ns = 2 * kSecond;  // of who waits for credits and has nothing to send
  return plan;
}

/// Messages until this rank fails or has received `enough`.
void run_into(const Plan& plan, u32 rank, Sides& sides, u64 enough) {
  const Party party{&sides[0], rank, 1 - rank};
  CHECK_EQUAL(drive(plan, {&party, 1}, enough)[0].wrong, 0u);
}

/// Rank 1's process is killed in the midst of traffic.
void killed(TransportKind kind, u32 number) {
  const Plan plan = plan_in_midst();
  const u32 rank = own_rank();
  const auto run = [&](u64 enough, Sides& sides) {
    Channel channel = channel_to_other_machine(rank, number);
    join_one(plan, options_to_drive(plan), {rank, kind, kDevice}, channel, sides[0]);
    run_into(plan, rank, sides, enough);
  };
  if (rank == 1) {
    Child one([&](Channel&) {
      Sides sides(1);
      run(plan.messages / 4, sides);
      std::raise(SIGKILL);
    });
    CHECK_EQUAL(one.status(), 128 + SIGKILL);
    return;
  }
  Sides sides(1);
  run(kNeverEnough, sides);
  const Error error = fault_when_sending(sides[0], 1);
  CHECK_EQUAL(error.number, ETIMEDOUT);
  check_blame(error, {"rdma write", kDevice, 1});
}

/// Machine 0 takes its interface down in the midst of traffic; each rank learns of it by what it sends.
void link_down(TransportKind kind, u32 number) {
  const Plan plan = plan_in_midst();
  const u32 rank = own_rank();
  Channel channel = channel_to_other_machine(rank, number);
  Sides sides(1);
  join_one(plan, options_to_drive(plan), {rank, kind, kDevice}, channel, sides[0]);
  run_into(plan, rank, sides, rank == 0 ? plan.messages / 4 : kNeverEnough);
  if (rank == 0) CHECK_EQUAL(std::system("ip link set wire down"), 0);
  const Error error = fault_when_sending(sides[0], 1 - rank);
  if (rank == 0) CHECK_EQUAL(std::system("ip link set wire up"), 0);
  std::printf("  rank %u: %s\n", rank, text_of(error).c_str());
  CHECK_EQUAL(error.number, rank == 0 ? ENETDOWN : ETIMEDOUT);
  check_blame(error, {"rdma write", kDevice, static_cast<i32>(1 - rank)});
  channel.meet();
}

}  // namespace

std::vector<Test> pair_tests() {
  return {{"pair/rc/every_byte_arrives_before_its_flag", [] { every_byte(kRc, 0, some_messages()); }},
          {"pair/unordered/every_byte_arrives_before_its_flag", [] { every_byte(kUnordered, 1, some_messages()); }},
          {"pair/rc/a_killed_process_is_a_lost_peer", [] { killed(kRc, 2); }},
          {"pair/unordered/a_killed_process_is_a_lost_peer", [] { killed(kUnordered, 3); }},
          {"pair/rc/a_link_that_goes_down_is_an_error", [] { link_down(kRc, 4); }},
          {"pair/unordered/a_link_that_goes_down_is_an_error", [] { link_down(kUnordered, 5); }},
          {"pair/rc/messages_go_on_when_the_link_is_back", [] { every_byte(kRc, 6, 500); }}};
}

}  // namespace mk::test
