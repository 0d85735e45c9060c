// The command ring: nothing torn, nothing lost, nothing overwritten, whatever the timing.
#include <cerrno>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "host/ring.h"
#include "host/wait.h"

namespace mk::test {

namespace {

using namespace mk::host;

constexpr u64 kSecond = 1'000'000'000;

struct RingMemory {
  explicit RingMemory(u32 capacity_) : capacity(capacity_), slots(capacity_) {}
  CommandRing ring() { return {&control, slots.data(), capacity}; }
  HostProducer producer() { return {&control, slots.data(), capacity}; }

  u32 capacity;
  RingControl control{};
  std::vector<Command> slots;
};

/// Spends a random while, often none: threads meet at every place.
class Delays {
 public:
  explicit Delays(u64 seed) : random_(seed) {}
  void maybe() {
    const u64 choice = random_() % 16;
    if (choice == 0) std::this_thread::yield();
    if (choice == 1) {
      for (u64 spin = random_() % 500; spin > 0; --spin) asm volatile("");
    }
  }

 private:
  std::mt19937_64 random_;
};

Command command_of(u32 producer, u64 number) {
  const u64 mark = u64{producer} << 40 | number;
  return {mark, ~mark, mark * 3, producer, static_cast<u32>(number), static_cast<u32>(mark), 0, 0};
}

void several_producers_lose_and_tear_nothing() {
  constexpr u32 kProducers = 3;
  constexpr u64 kEach = 4000;
  RingMemory memory(16);
  HostProducer producer = memory.producer();
  std::vector<std::thread> threads;
  for (u32 id = 0; id < kProducers; ++id) {
    threads.emplace_back([&producer, id] {
      Delays delays(id);
      for (u64 number = 0; number < kEach; ++number) {
        u64 ticket = 0;
        delays.maybe();
        if (producer.push(command_of(id, number), now_ns() + 60 * kSecond, ticket) != 0) return;
      }
    });
  }
  CommandRing ring = memory.ring();
  std::vector<u64> next(kProducers);
  Delays delays(99);
  bool sound = true;
  const auto ready = [&] { return ring.ready(); };
  for (u64 taken = 0; taken < kProducers * kEach && sound; ++taken) {
    sound = wait_bounded(now_ns() + 60 * kSecond, ready, [] { return false; }) == 0;
    if (!sound) break;
    const Command command = ring.take();
    sound = command.peer < kProducers && command.chunk == next[command.peer];
    if (!sound) break;
    const Command expected = command_of(command.peer, next[command.peer]++);
    sound = command.source_offset == expected.source_offset && command.epoch == expected.epoch &&
            command.destination_offset == expected.destination_offset && command.bytes == expected.bytes;
    delays.maybe();
    ring.free_taken();
  }
  if (!sound) ring.stop_producers();
  for (std::thread& thread : threads) thread.join();
  CHECK(sound);
  CHECK(!ring.ready());
}

void a_full_ring_is_an_error_after_the_limit_and_not_a_hole() {
  RingMemory memory(4);
  HostProducer producer = memory.producer();
  CommandRing ring = memory.ring();
  u64 ticket = 0;
  for (u64 i = 0; i < 4; ++i) CHECK_EQUAL(producer.push(command_of(0, i), now_ns() + kSecond, ticket), 0);
  CHECK_EQUAL(producer.push(command_of(0, 4), now_ns() + 2'000'000, ticket), ETIMEDOUT);
  CHECK(ring.ready());
  CHECK_EQUAL(ring.take().chunk, 0u);
  ring.free_taken();
  CHECK_EQUAL(producer.push(command_of(0, 5), now_ns() + kSecond, ticket), 0);
  CHECK_EQUAL(ticket, 4u);
  for (u32 chunk : {1u, 2u, 3u, 5u}) {
    CHECK(ring.ready());
    CHECK_EQUAL(ring.take().chunk, chunk);
  }
  CHECK(!ring.ready());
}

void producers_stop_waiting_when_the_proxy_stops() {
  RingMemory memory(1);
  HostProducer producer = memory.producer();
  CommandRing ring = memory.ring();
  u64 ticket = 0;
  CHECK_EQUAL(producer.push(command_of(0, 0), now_ns() + kSecond, ticket), 0);
  int status = 0;
  std::thread waiting([&] {
    u64 mine = 0;
    status = producer.push(command_of(0, 1), now_ns() + 60 * kSecond, mine);
  });
  ring.stop_producers();
  waiting.join();
  CHECK_EQUAL(status, EPIPE);
  CHECK_EQUAL(producer.wait_retired(ticket, now_ns() + 60 * kSecond), EPIPE);
}

}  // namespace

std::vector<Test> ring_tests() {
  return {{"ring/several_producers_lose_and_tear_nothing", several_producers_lose_and_tear_nothing},
          {"ring/a_full_ring_is_an_error_after_the_limit_and_not_a_hole",
           a_full_ring_is_an_error_after_the_limit_and_not_a_hole},
          {"ring/producers_stop_waiting_when_the_proxy_stops", producers_stop_waiting_when_the_proxy_stops}};
}

}  // namespace mk::test
