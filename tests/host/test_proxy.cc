// The proxy over a transport of which the test decides everything.
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <memory>
#include <mutex>

#include "check.h"
#include "host/proxy.h"
#include "host/wait.h"

namespace mk::test {

namespace {

using namespace mk::host;

constexpr u64 kMillisecond = 1'000'000, kSecond = 1000 * kMillisecond;

/// What the test and the transport share. The lock is the test's: a real transport has none.
struct Script {
  std::mutex mutex;
  std::vector<std::vector<Write>> batches;
  std::deque<u64> completions;
  u32 room = ~0u;  ///< writes that post() still takes
  Error post_error, poll_error;
  bool closed = false;
  u32 publish_slot = ~0u;
};

class Scripted final : public Transport {
 public:
  Scripted(Script& script, Publisher& publisher) : script_(script), publisher_(publisher) {}
  const char* device() const noexcept override { return "scripted"; }
  Registration registration() const noexcept override { return Registration::kNone; }
  Error register_memory() override { return {}; }
  Error endpoint(u32, std::vector<u8>&) override { return {}; }
  Error connect(u32, std::span<const u8>) override { return {}; }
  Error finish(u64) override { return {}; }
  int post(u32, u32, std::span<const Write> writes, Error& error) noexcept override {
    const std::scoped_lock lock(script_.mutex);
    if (script_.post_error) return error = script_.post_error, -1;
    const u32 taken = std::min(script_.room, static_cast<u32>(writes.size()));
    script_.room -= taken;
    if (taken != 0) script_.batches.emplace_back(writes.begin(), writes.begin() + taken);
    return static_cast<int>(taken);
  }
  int poll(std::span<u64> tickets, Error& error) noexcept override {
    const std::scoped_lock lock(script_.mutex);
    if (script_.poll_error) return error = script_.poll_error, -1;
    if (script_.publish_slot != ~0u && publisher_.publish({1, script_.publish_slot, 77, 0, 0}, error) < 0) return -1;
    script_.publish_slot = ~0u;
    std::size_t count = 0;
    for (; count < tickets.size() && !script_.completions.empty(); ++count) {
      tickets[count] = script_.completions.front();
      script_.completions.pop_front();
    }
    return static_cast<int>(count);
  }
  void close(u64) noexcept override { script_.closed = true; }

 private:
  Script& script_;
  Publisher& publisher_;
};

struct Rig {
  explicit Rig(u64 window_ns = 0, u64 timeout_ns = 60 * kSecond, u32 max_outstanding = 64)
      : memory(4096), slots(64), producer(&control, slots.data(), 64) {
    Region region;
    region.base = memory.data();
    region.bytes = memory.size();
    region.num_flags = 16;
    const ProxySettings settings{0, 2, 2, max_outstanding, 256, window_ns, timeout_ns, kMillisecond};
    proxy = std::make_unique<Proxy>(settings, region, FlagWriter{}, CommandRing(&control, slots.data(), 64));
    proxy->use(std::make_unique<Scripted>(script, *proxy));
    proxy->set_limits(1, {4096, 16, true});
  }
  ~Rig() { (void)proxy->stop(now_ns() + kSecond); }

  u64 push(u32 chunk, u64 bytes = 8, u32 peer = 1, u64 source = 64) {
    u64 ticket = 0;
    const Command command{source, 128, bytes, peer, chunk, 5, 0, 0};
    CHECK_EQUAL(producer.push(command, now_ns() + kSecond, ticket), 0);
    return ticket;
  }
  template <class Done>
  void until(Done done) {
    const auto locked = [&] {
      const std::scoped_lock lock(script.mutex);
      return done();
    };
    CHECK_EQUAL(wait_bounded(now_ns() + 20 * kSecond, locked, [] { return false; }), 0);
  }
  Error fault() {
    Error error;
    until([&] { return proxy->fault(error); });
    return error;
  }
  void complete(u64 ticket) {
    const std::scoped_lock lock(script.mutex);
    script.completions.push_back(ticket);
  }

  std::vector<std::byte> memory;
  RingControl control{};
  std::vector<Command> slots;
  HostProducer producer;
  Script script;
  std::unique_ptr<Proxy> proxy;
};

void ready_commands_of_a_connection_go_out_together() {
  Rig rig(kSecond);  // a partial batch would wait for a second
  for (u32 i = 0; i < 16; ++i) rig.push(2 * (i % 8));  // even chunks: connection 0
  for (u32 i = 0; i < 8; ++i) rig.push(2 * i + 1);
  CHECK(!rig.proxy->start());
  rig.until([&] { return rig.script.batches.size() == 3; });
  for (const auto& batch : rig.script.batches) {
    CHECK_EQUAL(batch.size(), std::size_t{kMaxBatch});
    for (const Write& write : batch) CHECK_EQUAL(write.slot % 2, batch[0].slot % 2);
  }
  CHECK_EQUAL(rig.proxy->counters().get(kPartialBatches), 0u);
  for (u64 ticket = 0; ticket < 24; ++ticket) rig.complete(ticket);
}

void a_partial_batch_goes_out_when_its_window_ends() {
  constexpr u64 kWindow = 30 * kMillisecond;
  Rig rig(kWindow);
  for (u32 i = 0; i < 3; ++i) rig.push(0);
  const u64 before = now_ns();
  CHECK(!rig.proxy->start());
  rig.until([&] { return rig.proxy->counters().get(kPartialBatches) == 1; });
  CHECK(now_ns() - before >= kWindow);
  CHECK_EQUAL(rig.script.batches[0].size(), 3u);
  for (u64 ticket = 0; ticket < 3; ++ticket) rig.complete(ticket);
}

void what_the_transport_has_no_room_for_is_offered_again_in_order() {
  Rig rig;
  rig.script.room = 5;
  for (u32 i = 0; i < 12; ++i) rig.push(0);
  CHECK(!rig.proxy->start());
  rig.until([&] { return rig.script.room == 0; });
  {
    const std::scoped_lock lock(rig.script.mutex);
    rig.script.room = 100;
  }
  rig.until([&] { return rig.script.room == 93; });
  u64 next = 0;
  for (const auto& batch : rig.script.batches) {
    for (const Write& write : batch) CHECK_EQUAL(write.ticket, next++);
  }
  CHECK(rig.proxy->counters().get(kRefusals) > 0);
  for (u64 ticket = 0; ticket < 12; ++ticket) rig.complete(ticket);
}

void source_credits_come_back_in_order() {
  Rig rig;
  for (u32 i = 0; i < 3; ++i) rig.push(i);
  CHECK(!rig.proxy->start());
  rig.until([&] { return rig.proxy->counters().get(kBatches) >= 2; });
  rig.complete(2);
  rig.complete(1);
  rig.until([&] { return rig.proxy->counters().get(kCompletions) == 2; });
  CHECK_EQUAL(rig.producer.wait_retired(0, now_ns() + 5 * kMillisecond), ETIMEDOUT);
  rig.complete(0);
  CHECK_EQUAL(rig.producer.wait_retired(2, now_ns() + 20 * kSecond), 0);
}

void no_more_commands_are_in_flight_than_allowed() {
  Rig rig(0, 60 * kSecond, 4);
  for (u32 i = 0; i < 20; ++i) rig.push(0);
  CHECK(!rig.proxy->start());
  for (u64 ticket = 0; ticket < 20; ++ticket) {
    rig.until([&] { return rig.proxy->counters().get(kCommands) >= std::min<u64>(ticket + 4, 20); });
    rig.complete(ticket);
  }
  CHECK_EQUAL(rig.producer.wait_retired(19, now_ns() + 20 * kSecond), 0);
  CHECK_EQUAL(rig.proxy->counters().get(kMostOutstanding), 4u);
}

void a_call_that_does_not_come_back_shows_in_the_longest_round() {
  Rig rig(0, 60 * kSecond, 4);
  CHECK(!rig.proxy->start());
  rig.push(0);
  rig.until([&] { return rig.proxy->counters().get(kCommands) == 1; });
  {
    const std::scoped_lock lock(rig.script.mutex);  // the transport waits
    const u64 until_ns = now_ns() + 20 * kMillisecond;
    while (now_ns() < until_ns) sched_yield();
  }
  rig.until([&] { return rig.proxy->counters().get(kLongestRound) >= 10 * kMillisecond; });
  rig.complete(0);
}

void bad_commands_are_named_and_never_reach_the_network() {
  struct Case {
    u32 chunk;
    u64 bytes;
    u32 peer;
    u64 source;
  };
  for (const Case& one : {Case{0, 8, 2, 0}, Case{0, 8, 0, 0}, Case{16, 8, 1, 0}, Case{0, 4096, 1, 0},
                          Case{0, 8, 1, ~u64{0} - 4}, Case{0, ~u64{0}, 1, 64}}) {
    Rig rig;
    rig.push(one.chunk, one.bytes, one.peer, one.source);
    CHECK(!rig.proxy->start());
    const Error error = rig.fault();
    CHECK_EQUAL(error.number, EINVAL);
    CHECK_EQUAL(error.peer, static_cast<i32>(one.peer));
    CHECK_EQUAL(std::string(error.call), "command");
    CHECK(rig.script.batches.empty());
    u64 ticket = 0;
    rig.until([&] { return rig.proxy->stopped(); });
    CHECK_EQUAL(rig.producer.push({}, now_ns() + kSecond, ticket), EPIPE);
  }
}

void failures_of_the_transport_are_kept_and_end_the_proxy() {
  for (const bool in_post : {true, false}) {
    Rig rig;
    Error& planted = in_post ? rig.script.post_error : rig.script.poll_error;
    planted = fail({"ibv_something", "mlx5_7", 1}, ENOMEM, "planted");
    rig.push(0);
    CHECK(!rig.proxy->start());
    const Error error = rig.fault();
    CHECK_EQUAL(error.number, ENOMEM);
    CHECK_EQUAL(error.peer, 1);
    CHECK_EQUAL(std::string(error.device), "mlx5_7");
    CHECK(!rig.proxy->stop(now_ns() + kSecond));
    CHECK(rig.script.closed);
  }
}

void a_peer_that_never_completes_is_named() {
  Rig rig(0, 20 * kMillisecond);
  rig.push(3);
  CHECK(!rig.proxy->start());
  const Error error = rig.fault();
  CHECK_EQUAL(error.number, ETIMEDOUT);
  CHECK_EQUAL(error.peer, 1);
}

void completions_of_nothing_are_a_fault() {
  Rig rig;
  rig.complete(7);
  CHECK(!rig.proxy->start());
  CHECK_EQUAL(rig.fault().number, EPROTO);
}

void flags_are_published_and_seen_in_the_timeline() {
  Rig rig;
  rig.script.publish_slot = 9;
  CHECK(!rig.proxy->start());
  rig.until([&] { return rig.proxy->counters().get(kArrivals) == 1; });
  CHECK_EQUAL(reinterpret_cast<u32*>(rig.memory.data())[9], 77u);
  ProxyEvent event{};
  u64 next = 0;
  CHECK_EQUAL(rig.proxy->timeline().read(0, {&event, 1}, next), 1u);
  CHECK_EQUAL(event.kind_and_lane & 0xff, u32{kArrived});
  CHECK_EQUAL(event.chunk, 9u);
  {
    const std::scoped_lock lock(rig.script.mutex);
    rig.script.publish_slot = 16;
  }
  CHECK_EQUAL(rig.fault().number, EPROTO);
}

void stopping_ends_at_its_deadline_and_says_what_it_dropped() {
  Rig rig;
  rig.push(0);
  CHECK(!rig.proxy->start());
  rig.until([&] { return rig.script.batches.size() == 1; });
  const Error error = rig.proxy->stop(now_ns() + 20 * kMillisecond);
  CHECK_EQUAL(error.number, ETIMEDOUT);
  CHECK(rig.script.closed);
}

}  // namespace

std::vector<Test> proxy_tests() {
  return {
      {"proxy/ready_commands_of_a_connection_go_out_together", ready_commands_of_a_connection_go_out_together},
      {"proxy/a_partial_batch_goes_out_when_its_window_ends", a_partial_batch_goes_out_when_its_window_ends},
      {"proxy/what_the_transport_has_no_room_for_is_offered_again_in_order",
       what_the_transport_has_no_room_for_is_offered_again_in_order},
      {"proxy/source_credits_come_back_in_order", source_credits_come_back_in_order},
      {"proxy/no_more_commands_are_in_flight_than_allowed", no_more_commands_are_in_flight_than_allowed},
      {"proxy/a_call_that_does_not_come_back_shows_in_the_longest_round",
       a_call_that_does_not_come_back_shows_in_the_longest_round},
      {"proxy/bad_commands_are_named_and_never_reach_the_network",
       bad_commands_are_named_and_never_reach_the_network},
      {"proxy/failures_of_the_transport_are_kept_and_end_the_proxy",
       failures_of_the_transport_are_kept_and_end_the_proxy},
      {"proxy/a_peer_that_never_completes_is_named", a_peer_that_never_completes_is_named},
      {"proxy/completions_of_nothing_are_a_fault", completions_of_nothing_are_a_fault},
      {"proxy/flags_are_published_and_seen_in_the_timeline", flags_are_published_and_seen_in_the_timeline},
      {"proxy/stopping_ends_at_its_deadline_and_says_what_it_dropped",
       stopping_ends_at_its_deadline_and_says_what_it_dropped},
  };
}

}  // namespace mk::test
