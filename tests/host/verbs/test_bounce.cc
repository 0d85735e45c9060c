// The bounce buffer: NICs that must not touch the region, and an engine that is late with its copies.
#include <cerrno>
#include <cstring>

#include "../cuda_driver.h"
#include "pair.h"

namespace mk::test {

namespace {

using namespace mk::host;

/// Both regions are out of the NICs' reach; `driver` copies.
struct Rig {
  Rig(const Plan& plan, TransportKind kind, const standin::Device& like, const cuda::Driver& driver) {
    standin::Device nic = like;
    nic.refuses_memory = EFAULT;
    plug_in(nic);
    ProxyOptions options = options_for(plan);
    options.transport = kind;
    for (u32 rank = 0; rank < 2; ++rank) {
      Error error;
      engines.push_back(cuda::Engine::open(driver, 0, error));
      Side& side = sides[rank];
      side.memory.assign(region_bytes(plan), std::byte{0});
      if (rank == 0) standin::refuse(side.memory.data(), side.memory.size());
      use_engine(*engines[rank], options);
      options.rank = rank;
      options.region_base = reinterpret_cast<u64>(side.memory.data());
      options.always_bounces = rank;  // the stand-in refuses one stretch of memory only
      std::snprintf(options.device, sizeof options.device, "nic%u", rank);
      error = open_side(plan, options, side);
      if (first_error.empty()) first_error = text_of(error);
    }
  }
  std::vector<std::unique_ptr<cuda::Engine>> engines;  // outlive the proxies
  Sides sides;
  std::string first_error;
};

void every_byte_arrives(TransportKind kind, const standin::Device& nic) {
  {
    const Plan plan = short_plan();
    Rig rig(plan, kind, nic, cuda_driver());
    CHECK_EQUAL(rig.first_error, std::string());
    for (u32 rank = 0; rank < 2; ++rank) CHECK(registration_of(rig.sides[rank]) == Registration::kBounce);
    CHECK_EQUAL(text_of(connect_all(rig.sides, 5 * kSecond)), std::string());
    exchange(plan, rig.sides);
  }
  check_nothing_is_left();
}

void over_rc() { every_byte_arrives(kRc, {}); }
void over_unordered() { every_byte_arrives(kUnordered, {}); }
void over_srd() { every_byte_arrives(kSrd, efa()); }

/// Memory that the CPU can copy needs no engine.
void host_memory_is_copied_by_the_proxy() {
  plug_in();
  const Plan plan = short_plan();
  ProxyOptions options = options_for(plan);
  options.always_bounces = 1;
  Sides sides;
  join_pair(plan, options, kRc, sides);
  exchange(plan, sides);
}

/// Sockets count too, and need no NIC: so the buffer can be tried where there is a GPU alone.
void over_tcp() {
  const Plan plan = short_plan();
  ProxyOptions options = options_for(plan);
  options.transport = kTcp;
  options.always_bounces = 1;
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    std::snprintf(options.device, sizeof options.device, "lo");
    CHECK_EQUAL(text_of(open_side(plan, options, sides[rank])), std::string());
    CHECK(registration_of(sides[rank]) == Registration::kBounce);
  }
  CHECK_EQUAL(text_of(connect_all(sides, 5 * kSecond)), std::string());
  exchange(plan, sides);
}

void few_messages_in_flight_are_enough() {
  plug_in();
  const Plan plan = short_plan();
  ProxyOptions options = options_for(plan);
  options.always_bounces = 1;
  options.max_outstanding = 2;
  Sides sides;
  join_pair(plan, options, kUnordered, sides);
  exchange(plan, sides);
}

void a_copy_that_fails_is_a_fault() {
  const Plan plan = short_plan();
  cuda::Driver driver = cuda_driver();
  driver.copy = [](u64, u64, std::size_t, void*) { return 700; };
  Rig rig(plan, kRc, {}, driver);
  CHECK_EQUAL(text_of(connect_all(rig.sides, 5 * kSecond)), std::string());
  CHECK_EQUAL(push(rig.sides[0], 1, 4096, 0), 0);
  const Error error = fault_of(rig.sides[0]);
  CHECK_EQUAL(error.number, EFAULT);
}

void copies_that_never_end_are_a_fault_at_the_deadline() {
  Plan plan = short_plan();
  plan.limit_ns = kSecond / 10;
  cuda::Driver driver = cuda_driver();
  driver.query = [](void*) { return cuda::kNotReady; };
  Rig rig(plan, kRc, {}, driver);
  CHECK_EQUAL(text_of(connect_all(rig.sides, 5 * kSecond)), std::string());
  CHECK_EQUAL(push(rig.sides[0], 1, 4096, 0), 0);
  CHECK_EQUAL(fault_of(rig.sides[0]).number, ETIMEDOUT);
  const u64 before = now_ns();
  (void)close_all(rig.sides, 0);
  CHECK(now_ns() - before < 4 * kSecond);
}

void memory_that_can_not_be_locked_is_an_error() {
  cuda::Driver driver = cuda_driver();
  driver.pin = [](void*, std::size_t, unsigned) { return 2; };
  const Rig rig(short_plan(), kRc, {}, driver);
  CHECK(rig.first_error.find("can't be locked") != std::string::npos);
}

/// What a peer says of its message is not believed.
void a_message_outside_of_the_region_is_refused() {
  plug_in();
  const Plan plan = short_plan();
  ProxyOptions options = options_for(plan);
  options.transport = kRc;
  options.always_bounces = 1;
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    std::snprintf(options.device, sizeof options.device, "nic%u", rank);
    CHECK_EQUAL(text_of(open_side(plan, options, sides[rank])), std::string());
  }
  for (u32 from = 0; from < 2; ++from) {
    std::vector<u8> blob;
    CHECK(!sides[from].session->endpoint(1 - from, blob));
    if (from == 1) {  // rank 0 believes that rank 1 has more memory, which begins before the double does
      std::memset(blob.data() + 32, 0x7f, 4);
    }
    CHECK_EQUAL(text_of(sides[1 - from].session->connect(from, blob)), std::string());
  }
  for (u32 rank = 0; rank < 2; ++rank) CHECK(!sides[rank].session->proxy().start());
  u64 ticket = 0;
  const Command command{0, region_bytes(plan) + 4096, 0, 1, 0, 1, 0, 0};
  CHECK_EQUAL(sides[0].session->producer().push(command, now_ns() + kSecond, ticket), 0);
  const Error error = fault_of(sides[1]);
  CHECK_EQUAL(std::string(error.call), std::string("arrival"));
  CHECK_EQUAL(error.number, EPROTO);
  CHECK_EQUAL(error.peer, 0);
}

}  // namespace

std::vector<Test> bounce_tests() {
  return {{"bounce/every_byte_arrives_over_rc", over_rc},
          {"bounce/every_byte_arrives_over_unordered", over_unordered},
          {"bounce/every_byte_arrives_over_srd", over_srd},
          {"bounce/every_byte_arrives_over_tcp", over_tcp},
          {"bounce/host_memory_is_copied_by_the_proxy", host_memory_is_copied_by_the_proxy},
          {"bounce/few_messages_in_flight_are_enough", few_messages_in_flight_are_enough},
          {"bounce/a_copy_that_fails_is_a_fault", a_copy_that_fails_is_a_fault},
          {"bounce/copies_that_never_end_are_a_fault_at_the_deadline",
           copies_that_never_end_are_a_fault_at_the_deadline},
          {"bounce/memory_that_can_not_be_locked_is_an_error", memory_that_can_not_be_locked_is_an_error},
          {"bounce/a_message_outside_of_the_region_is_refused", a_message_outside_of_the_region_is_refused}};
}

}  // namespace mk::test
