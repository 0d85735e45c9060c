#include "cuda_driver.h"

#include <atomic>
#include <cstring>
#include <deque>

namespace mk::test {

using namespace mk::host;
using cuda::Driver;
using cuda::WriteOperation;

namespace {

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

}  // namespace

Driver cuda_driver() {
  Driver driver{};
  driver.init = [](unsigned) { return 0; };
  driver.retain = [](void** context, int) {
    static int primary;
    *context = &primary;
    return 0;
  };
  driver.release = [](int) { return 0; };
  driver.set_current = [](void*) { return 0; };
  driver.create_stream = [](void** stream, unsigned, int) {
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
      if (operations[i].operation == cuda::kFlushRemoteWrites) continue;
      auto* flag = reinterpret_cast<u32*>(operations[i].address);
      std::atomic_ref<u32>(*flag).store(static_cast<u32>(operations[i].value), std::memory_order_release);
    }
    return 0;
  };
  driver.flush = [](int, int) { return 0; };
  driver.attribute = [](int* value, int attribute, int) {
    *value = attribute == kFlushOptions ? 1 : attribute == kExportsDmaBuf ? 1 : 0;
    return 0;
  };
  driver.push = [](void*) { return 0; };
  driver.pop = [](void**) { return 0; };
  driver.pin = [](void*, std::size_t, unsigned) { return 0; };
  driver.unpin = [](void*) { return 0; };
  driver.range = [](u64* base, std::size_t* bytes, u64 address) {
    *base = address / kAllocation * kAllocation;
    *bytes = kAllocation;
    return 0;
  };
  driver.handle = [](void* handle, u64, std::size_t, int, unsigned long long) {
    *static_cast<int*>(handle) = 77;
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
  options.copy_pin = reinterpret_cast<u64>(copies.pin);
  options.copy_unpin = reinterpret_cast<u64>(copies.unpin);
  options.flag_context = reinterpret_cast<u64>(flags.context);
  options.flag_write = reinterpret_cast<u64>(flags.write);
  options.flag_commit = reinterpret_cast<u64>(flags.commit);
}

}  // namespace mk::test
