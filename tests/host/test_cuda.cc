// Copies and flags through a CUDA driver that is not there.
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "cuda_driver.h"
#include "exchange.h"

namespace mk::test {

namespace {

using namespace mk::host;
using cuda::Driver;
using cuda::WriteOperation;

constexpr u64 kSecond = 1'000'000'000;

void bytes_arrive_before_their_flags(EmulatedOrder order, u32 lanes) {
  Plan plan;
  plan.messages = 300;
  std::vector<std::unique_ptr<cuda::Engine>> engines;
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    Error error;
    engines.push_back(cuda::Engine::open(cuda_driver(), static_cast<int>(rank), error));
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

/// Sockets, with slices of pinned memory that are smaller than most messages.
void copies_through_slices_end_before_their_flags() {
  constexpr u64 kSlices = 64 << 10;
  Plan plan;
  plan.messages = 300;
  std::vector<std::unique_ptr<cuda::Engine>> engines;
  std::vector<std::vector<std::byte>> slices(2, std::vector<std::byte>(kSlices));
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) {
    Error error;
    engines.push_back(cuda::Engine::open(cuda_driver(), static_cast<int>(rank), error));
    ProxyOptions options = options_for(plan);
    options.transport = kTcp;
    options.rank = rank;
    options.lanes = 2;
    options.bounce_base = reinterpret_cast<u64>(slices[rank].data());
    options.bounce_bytes = kSlices;
    std::snprintf(options.device, sizeof options.device, "lo");
    use_engine(*engines[rank], options);
    CHECK(!open_side(plan, options, sides[rank]));
  }
  CHECK(!connect_all(sides, 5 * kSecond));
  const PairOutcome outcome = run_pair(plan, sides);
  for (const Outcome* one : {&outcome.first, &outcome.second}) {
    CHECK_EQUAL(one->failure, std::string());
    CHECK_EQUAL(one->received, plan.messages);
    CHECK_EQUAL(one->wrong, 0u);
  }
  CHECK(!close_all(sides, 5 * kSecond));
}

/// What the driver was asked for by this thread.
struct Asked {
  u64 copies = 0, events = 0, calls = 0, flags = 0;
};
thread_local Asked asked;

Driver counting_driver() {
  static const Driver plain = cuda_driver();
  Driver driver = plain;
  driver.copy = [](u64 to, u64 from, std::size_t bytes, void* stream) {
    ++asked.copies;
    return plain.copy(to, from, bytes, stream);
  };
  driver.record = [](void* event, void* stream) {
    ++asked.events;
    return plain.record(event, stream);
  };
  driver.batch = [](void* stream, unsigned count, WriteOperation* operations, unsigned flags) {
    ++asked.calls;
    asked.flags += count;
    // cuStreamBatchMemOp_v2 refuses CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
    for (unsigned i = 0; i < count; ++i) CHECK_EQUAL(operations[i].flags, 0u);
    return plain.batch(stream, count, operations, flags);
  };
  return driver;
}

/// Starts `count` copies, `stride` bytes apart in the destination, and waits for them from the last to the first.
Asked copy_all(u64 count, u64 bytes, u64 stride) {
  Error error;
  const auto engine = cuda::Engine::open(counting_driver(), 0, error);
  const CopyEngine copies = engine->copies();
  const FlagWriter flags = engine->flags();
  std::vector<u8> from(count * bytes), to(count * stride);
  for (u64 i = 0; i < from.size(); ++i) from[i] = static_cast<u8>(i * 2654435761u >> 24);
  asked = {};
  for (u64 i = 0; i < count; ++i) {
    CHECK_EQUAL(copies.start(copies.context, &to[i * stride], &from[i * bytes], bytes, i), 0);
    if (i % 64 == 63) CHECK_EQUAL(flags.commit(flags.context), 0);
  }
  CHECK_EQUAL(flags.commit(flags.context), 0);
  for (u64 i = count; i-- > 0;) {
    int looks = 0;
    while (copies.finished(copies.context, i) == 0) CHECK(++looks < 10'000);
    CHECK(std::memcmp(&to[i * stride], &from[i * bytes], bytes) == 0);
  }
  return asked;
}

void copies_that_adjoin_become_one_of_a_megabyte() {
  const Asked all = copy_all(128, 64 << 10, 64 << 10);
  CHECK_EQUAL(all.copies, 8u);
  CHECK_EQUAL(all.events, 8u);
}
void copies_apart_share_an_event() {
  const Asked all = copy_all(128, 64 << 10, 65 << 10);
  CHECK_EQUAL(all.copies, 128u);
  CHECK_EQUAL(all.events, 16u);
}
void large_copies_stay_as_they_are() {
  const Asked all = copy_all(8, 2 << 20, 2 << 20);
  CHECK_EQUAL(all.copies, 8u);
  CHECK_EQUAL(all.events, 8u);
}

void a_copy_that_is_held_back_goes_out_when_it_is_asked_for() {
  Error error;
  const auto engine = cuda::Engine::open(counting_driver(), 0, error);
  const CopyEngine copies = engine->copies();
  u64 from = 7, to = 0;
  CHECK_EQUAL(copies.start(copies.context, &to, &from, sizeof to, 1), 0);
  int looks = 0;
  while (copies.finished(copies.context, 1) == 0) CHECK(++looks < 10);
  CHECK_EQUAL(to, 7u);
}

void flags_of_a_round_go_out_together() {
  Error error;
  const auto engine = cuda::Engine::open(counting_driver(), 0, error);
  const FlagWriter flags = engine->flags();
  std::vector<u32> words(200);
  asked = {};
  for (u32& word : words) CHECK_EQUAL(flags.write(flags.context, &word, 3), 0);
  CHECK_EQUAL(flags.commit(flags.context), 0);
  CHECK_EQUAL(asked.flags, 200u);
  CHECK_EQUAL(asked.calls, 2u);  // one takes 128
  for (const u32 word : words) CHECK_EQUAL(word, 3u);
}

void copies_and_flags_can_share_one_stream() {
  static thread_local u32 made;
  made = 0;
  Driver driver = cuda_driver();
  driver.create_stream = [](void** stream, unsigned flags, int priority) {
    ++made;
    return cuda_driver().create_stream(stream, flags, priority);
  };
  Error error;
  const auto engine = cuda::Engine::open(driver, 0, error, 1);
  CHECK_EQUAL(made, 1u);
  const CopyEngine copies = engine->copies();
  const FlagWriter flags = engine->flags();
  for (u64 i = 0; i < 10; ++i) {
    u64 from = i + 7, to = 0;
    u32 word = 0;
    CHECK_EQUAL(copies.start(copies.context, &to, &from, sizeof to, i), 0);
    int looks = 0;
    while (copies.finished(copies.context, i) == 0) CHECK(++looks < 10'000);
    CHECK_EQUAL(to, i + 7);
    CHECK_EQUAL(flags.write(flags.context, &word, 3), 0);
    CHECK_EQUAL(flags.commit(flags.context), 0);
    CHECK_EQUAL(word, 3u);
  }
  CHECK(cuda::Engine::open(driver, 0, error, 5) == nullptr);
  CHECK_EQUAL(error.number, EINVAL);
}

void more_copies_than_events_still_finish() {
  Error error;
  const auto engine = cuda::Engine::open(cuda_driver(), 0, error);
  const CopyEngine copies = engine->copies();
  constexpr u64 kCopies = 1000;
  const FlagWriter flags = engine->flags();
  std::vector<u64> from(kCopies), to(kCopies);
  for (u64 i = 0; i < kCopies; ++i) from[i] = i + 1;
  for (u64 i = 0; i < kCopies; ++i) {
    CHECK_EQUAL(copies.start(copies.context, &to[i], &from[i], 8, i), 0);
    CHECK_EQUAL(flags.commit(flags.context), 0);  // a round of its own for each
  }
  for (u64 i = kCopies; i-- > 0;) {
    int looks = 0;
    while (copies.finished(copies.context, i) == 0) CHECK(++looks < 10'000);
    CHECK_EQUAL(to[i], i + 1);
  }
}

/// What a device says of itself, and what is done for it before flags go out.
void flags_wait_for_the_flush_that_the_device_needs() {
  struct Case {
    int ordering, options;
    WriteOrder expected;
    u32 host_flushes, stream_flushes;
  };
  for (const Case& one : {Case{0, 1, kWritesFlushed, 1, 0}, Case{0, 3, kWritesFlushed, 1, 0},
                          Case{0, 2, kWritesFlushed, 0, 1}, Case{0, 0, kWritesUnordered, 0, 0},
                          Case{100, 1, kWritesInOrder, 0, 0}, Case{200, 0, kWritesInOrder, 0, 0}}) {
    static thread_local Case current;
    static thread_local std::vector<char> events;
    current = one;
    events.clear();
    Driver driver = cuda_driver();
    driver.attribute = [](int* value, int attribute, int) {
      *value = attribute == kWritesOrdering ? current.ordering : attribute == kFlushOptions ? current.options : 0;
      return 0;
    };
    driver.flush = [](int, int) { return events.push_back('h'), 0; };
    driver.batch = [](void*, unsigned count, WriteOperation* operations, unsigned) {
      for (unsigned i = 0; i < count; ++i) {
        events.push_back(operations[i].operation == cuda::kFlushRemoteWrites ? 's' : 'f');
      }
      return 0;
    };
    Error error;
    const auto engine = cuda::Engine::open(driver, 0, error);
    CHECK_EQUAL(engine->write_order(), one.expected);
    const FlagWriter flags = engine->flags();
    u32 words[2] = {};
    for (u32& word : words) CHECK_EQUAL(flags.write(flags.context, &word, 3), 0);
    CHECK_EQUAL(flags.commit(flags.context), 0);
    const std::string expected = std::string(one.host_flushes, 'h') + std::string(one.stream_flushes, 's') + "ff";
    CHECK_EQUAL(std::string(events.begin(), events.end()), expected);
  }
}

void memory_is_exported_with_its_whole_allocation() {
  static thread_local u64 asked_base, asked_bytes;
  Driver driver = cuda_driver();
  driver.handle = [](void* handle, u64 base, std::size_t bytes, int type, unsigned long long) {
    asked_base = base;
    asked_bytes = bytes;
    *static_cast<int*>(handle) = 77;
    return type == 1 ? 0 : 1;
  };
  Error error;
  int descriptor = 0;
  u64 offset = 0;
  auto engine = cuda::Engine::open(driver, 0, error);
  CHECK(!engine->export_memory(3 * kAllocation + 512, 4096, descriptor, offset));
  CHECK_EQUAL(descriptor, 77);
  CHECK_EQUAL(offset, 512u);
  CHECK_EQUAL(asked_base, 3 * kAllocation);
  CHECK_EQUAL(asked_bytes, kAllocation);
  CHECK_EQUAL(engine->export_memory(4096, kAllocation, descriptor, offset).number, ENODEV);  // beyond its end
  CHECK_EQUAL(descriptor, -1);
  driver.attribute = [](int* value, int, int) { return *value = 0; };
  engine = cuda::Engine::open(driver, 0, error);
  CHECK(engine->export_memory(4096, 64, descriptor, offset));
  driver = cuda_driver();
  driver.handle = nullptr;  // an old driver
  engine = cuda::Engine::open(driver, 0, error);
  CHECK(engine->export_memory(4096, 64, descriptor, offset));
}

thread_local void* current = nullptr;

/// The driver's calls need a context, which each thread has of its own.
Driver strict_driver() {
  static const Driver plain = cuda_driver();
  constexpr int kInvalidContext = 201;
  Driver driver = plain;
  driver.set_current = [](void* context) {
    current = context;
    return 0;
  };
  driver.push = driver.set_current;  // the threads here have none before
  driver.pop = [](void** context) {
    *context = std::exchange(current, nullptr);
    return 0;
  };
  driver.copy = [](u64 to, u64 from, std::size_t bytes, void* stream) {
    return current == nullptr ? kInvalidContext : plain.copy(to, from, bytes, stream);
  };
  driver.record = [](void* event, void* stream) {
    return current == nullptr ? kInvalidContext : plain.record(event, stream);
  };
  driver.query = [](void* event) { return current == nullptr ? kInvalidContext : plain.query(event); };
  driver.batch = [](void* stream, unsigned count, WriteOperation* operations, unsigned flags) {
    return current == nullptr ? kInvalidContext : plain.batch(stream, count, operations, flags);
  };
  return driver;
}

/// One after the other, as the threads of proxies that share an engine.
void every_thread_has_the_devices_context() {
  Error error;
  const auto engine = cuda::Engine::open(strict_driver(), 0, error);
  const CopyEngine copies = engine->copies();
  const FlagWriter flags = engine->flags();
  u64 from = 5, to = 0;
  u32 flag = 0;
  std::vector<i32> seen;
  const auto on_a_thread = [&](const std::function<void()>& body) { std::thread(body).join(); };
  const auto finish = [&] {
    i32 status = 0;
    for (int looks = 0; status == 0 && looks < 100; ++looks) status = copies.finished(copies.context, 0);
    seen.push_back(status);
    CHECK(current == nullptr);  // who only asks keeps what it had
  };
  for (int round = 0; round < 2; ++round) {
    on_a_thread([&] { seen.push_back(copies.start(copies.context, &to, &from, sizeof to, 0)); });
    on_a_thread([&] { seen.push_back(flags.commit(flags.context)); });
    on_a_thread(finish);
    on_a_thread([&] {
      seen.push_back(flags.write(flags.context, &flag, 7));
      seen.push_back(flags.commit(flags.context));
    });
  }
  const std::vector<i32> wanted{0, 0, 1, 0, 0, 0, 0, 1, 0, 0};
  CHECK(seen == wanted);
}

void what_the_driver_refuses_is_an_error() {
  Error error;
  Driver driver = cuda_driver();
  driver.create_event = [](void**, unsigned) { return 2; };
  CHECK(cuda::Engine::open(driver, 3, error) == nullptr);
  CHECK_EQUAL(std::string(error.call), std::string("cuEventCreate"));
  CHECK_EQUAL(std::string(error.device), std::string("cuda:3"));
  driver = cuda_driver();
  driver.copy = [](u64, u64, std::size_t, void*) { return 700; };
  const auto engine = cuda::Engine::open(driver, 0, error);
  const CopyEngine copies = engine->copies();
  CHECK_EQUAL(copies.start(copies.context, nullptr, nullptr, 8, 0), 0);  // held back
  CHECK_EQUAL(engine->flags().commit(copies.context), -EFAULT);
}

}  // namespace

std::vector<Test> cuda_tests() {
  return {{"cuda/copies_end_before_their_flags", copies_end_before_their_flags},
          {"cuda/copies_end_before_their_flags_out_of_order", copies_end_before_their_flags_out_of_order},
          {"cuda/copies_through_slices_end_before_their_flags", copies_through_slices_end_before_their_flags},
          {"cuda/copies_that_adjoin_become_one_of_a_megabyte", copies_that_adjoin_become_one_of_a_megabyte},
          {"cuda/copies_apart_share_an_event", copies_apart_share_an_event},
          {"cuda/large_copies_stay_as_they_are", large_copies_stay_as_they_are},
          {"cuda/a_copy_that_is_held_back_goes_out_when_it_is_asked_for",
           a_copy_that_is_held_back_goes_out_when_it_is_asked_for},
          {"cuda/flags_of_a_round_go_out_together", flags_of_a_round_go_out_together},
          {"cuda/copies_and_flags_can_share_one_stream", copies_and_flags_can_share_one_stream},
          {"cuda/more_copies_than_events_still_finish", more_copies_than_events_still_finish},
          {"cuda/flags_wait_for_the_flush_that_the_device_needs", flags_wait_for_the_flush_that_the_device_needs},
          {"cuda/memory_is_exported_with_its_whole_allocation", memory_is_exported_with_its_whole_allocation},
          {"cuda/every_thread_has_the_devices_context", every_thread_has_the_devices_context},
          {"cuda/what_the_driver_refuses_is_an_error", what_the_driver_refuses_is_an_error}};
}

}  // namespace mk::test
