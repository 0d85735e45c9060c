// Copies and flags through a CUDA driver that is not there: a stand-in which is as late as a device can be.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>

#include "exchange.h"
#include "host/cuda/engine.h"

namespace mk::test {

namespace {

using namespace mk::host;
using cuda::Driver;
using cuda::Result;
using cuda::WriteOperation;

constexpr u64 kSecond = 1'000'000'000;

/// Copies are made only when somebody asks for an event behind them, and not at the first question.
struct Stream {
  struct Copy {
    void* to;
    const void* from;
    u64 bytes;
  };
  std::deque<Copy> waiting;
  u64 enqueued = 0, executed = 0, questions = 0;

  void run_until(u64 number) {
    for (; executed < number; ++executed) {
      std::memcpy(waiting.front().to, waiting.front().from, waiting.front().bytes);
      waiting.pop_front();
    }
  }
};

struct Event {
  Stream* stream = nullptr;
  u64 behind = 0;
};

Driver stand_in() {
  Driver driver{};
  driver.init = [](unsigned) { return 0; };
  driver.retain = [](void** context, int) {
    static int primary;
    *context = &primary;
    return 0;
  };
  driver.release = [](int) { return 0; };
  driver.set_current = [](void*) { return 0; };
  driver.create_stream = [](void** stream, unsigned) {
    *stream = new Stream;
    return 0;
  };
  driver.destroy_stream = [](void* stream) {
    delete static_cast<Stream*>(stream);
    return 0;
  };
  driver.create_event = [](void** event, unsigned) {
    *event = new Event;
    return 0;
  };
  driver.destroy_event = [](void* event) {
    delete static_cast<Event*>(event);
    return 0;
  };
  driver.copy = [](u64 to, u64 from, std::size_t bytes, void* stream) {
    auto* queue = static_cast<Stream*>(stream);
    queue->waiting.push_back({reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes});
    ++queue->enqueued;
    return 0;
  };
  driver.record = [](void* event, void* stream) {
    *static_cast<Event*>(event) = {static_cast<Stream*>(stream), static_cast<Stream*>(stream)->enqueued};
    return 0;
  };
  driver.query = [](void* event) {
    auto* asked = static_cast<Event*>(event);
    if (asked->stream->executed >= asked->behind) return cuda::kSuccess;
    if (++asked->stream->questions % 3 != 0) return cuda::kNotReady;
    asked->stream->run_until(asked->behind);
    return cuda::kSuccess;
  };
  driver.batch = [](void*, unsigned count, WriteOperation* operations, unsigned) {
    for (unsigned i = 0; i < count; ++i) {
      auto* flag = reinterpret_cast<u32*>(operations[i].address);
      std::atomic_ref<u32>(*flag).store(static_cast<u32>(operations[i].value), std::memory_order_release);
    }
    return 0;
  };
  driver.flush = [](int, int) { return 0; };
  driver.attribute = [](int* value, int, int) {
    *value = 0;
    return 0;
  };
  return driver;
}

void use_engine(cuda::Engine& engine, ProxyOptions& options) {
  const CopyEngine copies = engine.copies();
  const FlagWriter flags = engine.flags();
  options.copy_context = reinterpret_cast<u64>(copies.context);
  options.copy_start = reinterpret_cast<u64>(copies.start);
  options.copy_finished = reinterpret_cast<u64>(copies.finished);
  options.flag_context = reinterpret_cast<u64>(flags.context);
  options.flag_write = reinterpret_cast<u64>(flags.write);
  options.flag_commit = reinterpret_cast<u64>(flags.commit);
}

void bytes_arrive_before_their_flags(EmulatedOrder order, u32 lanes) {
  Plan plan;
  plan.messages = 300;
  std::vector<std::unique_ptr<cuda::Engine>> engines;
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    Error error;
    engines.push_back(cuda::Engine::open(stand_in(), static_cast<int>(rank), error));
    CHECK(!error);
    ProxyOptions options = options_for(plan);
    options.transport = kEmulated;
    options.rank = rank;
    options.lanes = lanes;
    options.order = order;
    options.shuffle_ns = 20'000;
    use_engine(*engines[rank], options);
    CHECK(!open_side(plan, options, sides[rank]));
  }
  CHECK(!connect_all(sides, kSecond));
  const PairOutcome outcome = run_pair(plan, sides);
  for (const Outcome* one : {&outcome.first, &outcome.second}) {
    CHECK_EQUAL(one->failure, std::string());
    CHECK_EQUAL(one->received, plan.messages);
    CHECK_EQUAL(one->wrong, 0u);
  }
  CHECK(!close_all(sides, 5 * kSecond));
}

void copies_end_before_their_flags() { bytes_arrive_before_their_flags(kInOrder, 1); }
void copies_end_before_their_flags_out_of_order() { bytes_arrive_before_their_flags(kShuffled, 2); }

void more_copies_than_events_still_finish() {
  Error error;
  const auto engine = cuda::Engine::open(stand_in(), 0, error);
  const CopyEngine copies = engine->copies();
  constexpr u64 kCopies = 1000;
  std::vector<u64> from(kCopies), to(kCopies);
  for (u64 i = 0; i < kCopies; ++i) from[i] = i + 1;
  for (u64 i = 0; i < kCopies; ++i) CHECK_EQUAL(copies.start(copies.context, &to[i], &from[i], 8, i), 0);
  for (u64 i = kCopies; i-- > 0;) {
    int looks = 0;
    while (copies.finished(copies.context, i) == 0) CHECK(++looks < 10'000);
    CHECK_EQUAL(to[i], i + 1);
  }
}

void what_the_driver_refuses_is_an_error() {
  Error error;
  Driver driver = stand_in();
  driver.create_event = [](void**, unsigned) { return 2; };
  CHECK(cuda::Engine::open(driver, 3, error) == nullptr);
  CHECK_EQUAL(std::string(error.call), std::string("cuEventCreate"));
  CHECK_EQUAL(std::string(error.device), std::string("cuda:3"));
  driver = stand_in();
  driver.copy = [](u64, u64, std::size_t, void*) { return 700; };
  const auto engine = cuda::Engine::open(driver, 0, error);
  CHECK_EQUAL(engine->copies().start(engine.get(), nullptr, nullptr, 8, 0), -EIO);
}

}  // namespace

std::vector<Test> cuda_tests() {
  return {{"cuda/copies_end_before_their_flags", copies_end_before_their_flags},
          {"cuda/copies_end_before_their_flags_out_of_order", copies_end_before_their_flags_out_of_order},
          {"cuda/more_copies_than_events_still_finish", more_copies_than_events_still_finish},
          {"cuda/what_the_driver_refuses_is_an_error", what_the_driver_refuses_is_an_error}};
}

}  // namespace mk::test
