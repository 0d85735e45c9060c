#include "host/cuda/engine.h"

#include <atomic>
#include <cerrno>

namespace mk::host::cuda {

namespace {

constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr int kPriority = -3;           // no kernel is launched at it
constexpr unsigned kNoTiming = 2;       // CU_EVENT_DISABLE_TIMING
constexpr int kFlushOptions = 117;      // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
constexpr int kHostFlushes = 1, kStreamFlushes = 2;  // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST, _MEMOPS
constexpr int kWritesOrdering = 118;    // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
constexpr int kExportsDmaBuf = 124;     // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
constexpr int kDmaBuf = 1;              // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
constexpr int kOrderedForOwner = 100;   // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
constexpr int kCurrentContext = 0;      // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kIllegalAddress = 700, kNotSupported = 801;
constexpr int kToOwner = 100;           // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER

/// The engine, by number, whose context this thread has taken for good.
thread_local u64 entered = 0;

/// The device's context on a thread that has another one, and gets it back.
class Inside {
 public:
  Inside(const Driver& driver, void* context) : driver_(driver), result_(driver.push(context)) {}
  ~Inside() {
    void* context = nullptr;
    if (result_ == kSuccess) driver_.pop(&context);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  Result result() const noexcept { return result_; }

 private:
  const Driver& driver_;
  const Result result_;
};

u64 next_number() noexcept {
  static std::atomic<u64> made{0};
  return ++made;
}

}  // namespace

Engine::Engine(const Driver& driver, int device, u32 streams)
    : number_(next_number()), driver_(driver), device_(device), num_streams_(streams), numbers_(kTokens),
      marks_(kEvents), pending_(kFlagsARound) {}

std::unique_ptr<Engine> Engine::open(const Driver& driver, int device, Error& error, u32 streams) {
  if (streams == 0 || streams > kStreams) {
    error = fail({"streams"}, EINVAL, "%u streams, 1 to %u", streams, kStreams);
    return nullptr;
  }
  std::unique_ptr<Engine> engine(new Engine(driver, device, streams));
  error = engine->make();
  return error ? nullptr : std::move(engine);
}

Error Engine::refuse(const char* call, Result result) const noexcept {
  char name[40];
  std::snprintf(name, sizeof name, "cuda:%d", device_);
  return fail({call, name}, ENODEV, "CUDA error %d", result);
}

Error Engine::make() {
  if (const Result result = driver_.retain(&context_, device_)) return refuse("cuDevicePrimaryCtxRetain", result);
  const Inside inside(driver_, context_);
  if (inside.result() != kSuccess) return refuse("cuCtxPushCurrent", inside.result());
  if (Error error = look_at_order()) return error;
  if (Error error = make_streams()) return error;
  for (Mark& mark : marks_) {
    if (const Result result = driver_.create_event(&mark.event, kNoTiming)) return refuse("cuEventCreate", result);
  }
  return {};
}

Error Engine::make_streams() {
  for (auto* streams : {&copies_, &flags_}) {
    for (u32 i = 0; i < kStreams; ++i) {
      void*& stream = (*streams)[i];
      if (i >= num_streams_) {
        stream = (*streams)[i % num_streams_];
      } else if (streams == &flags_ && num_streams_ == 1) {
        stream = copies_[0];
      } else if (const Result result = driver_.create_stream(&stream, kNonBlocking, kPriority)) {
        return refuse("cuStreamCreateWithPriority", result);
      }
    }
  }
  return {};
}

/// What the device says of writes of NICs to its memory. One that orders them needs nothing; one that does not has to
/// be flushed before a flag says that they are there.
Error Engine::look_at_order() noexcept {
  int ordering = 0, options = 0;
  if (const Result result = driver_.attribute(&ordering, kWritesOrdering, device_)) {
    return refuse("cuDeviceGetAttribute", result);
  }
  if (const Result result = driver_.attribute(&options, kFlushOptions, device_)) {
    return refuse("cuDeviceGetAttribute", result);
  }
  if (ordering >= kOrderedForOwner) return {};
  const bool can_flush = (options & (kHostFlushes | kStreamFlushes)) != 0;
  write_order_ = can_flush ? kWritesFlushed : kWritesUnordered;
  flushes_on_stream_ = can_flush && (options & kHostFlushes) == 0;
  return {};
}

Error Engine::export_memory(u64 address, u64 bytes, int& descriptor, u64& offset) noexcept {
  int exports = 0;
  u64 base = 0;
  std::size_t size = 0;
  descriptor = -1;
  if (const Result result = driver_.attribute(&exports, kExportsDmaBuf, device_)) {
    return refuse("cuDeviceGetAttribute", result);
  }
  if (exports == 0 || driver_.handle == nullptr) return refuse("cuMemGetHandleForAddressRange", kNotSupported);
  const Inside inside(driver_, context_);
  if (inside.result() != kSuccess) return refuse("cuCtxPushCurrent", inside.result());
  if (const Result result = driver_.range(&base, &size, address)) return refuse("cuMemGetAddressRange", result);
  if (address - base > size || bytes > size - (address - base)) return refuse("cuMemGetAddressRange", kInvalidValue);
  // whole allocations begin and end with pages, which a dma-buf has to
  if (const Result result = driver_.handle(&descriptor, base, size, kDmaBuf, 0)) {
    return refuse("cuMemGetHandleForAddressRange", result);
  }
  offset = address - base;
  return {};
}

Engine::~Engine() {
  if (context_ == nullptr) return;
  destroy();
  driver_.release(device_);
}

void Engine::destroy() noexcept {
  const Inside inside(driver_, context_);
  for (const Mark& mark : marks_) {
    if (mark.event != nullptr) driver_.destroy_event(mark.event);
  }
  for (const auto& streams : {copies_, flags_}) {
    for (u32 i = 0; i < num_streams_; ++i) {
      if (streams[i] != nullptr) driver_.destroy_stream(streams[i]);
    }
    if (num_streams_ == 1) break;  // one for both
  }
}

i32 Engine::failed(Result result) noexcept {
  switch (result) {
    case kSuccess: return 0;
    case kInvalidValue: return -EINVAL;
    case kOutOfMemory: return -ENOMEM;
    case kIllegalAddress: return -EFAULT;
    case kNotSupported: return -ENOTSUP;
    default: return -EIO;
  }
}

/// Each proxy's thread takes the device's context once: a proxy that comes after another has a thread of its own. (Not
/// told apart by their ids, which are used again.)
i32 Engine::enter() noexcept {
  if (entered == number_) return 0;
  const i32 status = failed(driver_.set_current(context_));
  if (status == 0) entered = number_;
  return status;
}

/// Gives what is held back to the driver.
i32 Engine::issue() noexcept {
  if (held_.bytes == 0) return 0;
  const Result result = driver_.copy(held_.destination, held_.source, held_.bytes, copies_[stream_]);
  if (result != kSuccess) return failed(result);
  ++started_;
  unmarked_bytes_ += held_.bytes;
  held_ = {};
  return unmarked_bytes_ >= kMarkedBytes ? mark() : 0;
}

/// An event behind all copies so far; the next ones go to another stream.
i32 Engine::mark() noexcept {
  if (marked_ == started_ || num_marks_ == kEvents) return 0;  // a later one will do
  Mark& mark = marks_[(first_mark_ + num_marks_) % kEvents];
  if (const i32 status = failed(driver_.record(mark.event, copies_[stream_]))) return status;
  mark.behind = marked_ = started_;
  unmarked_bytes_ = 0;
  ++num_marks_;
  stream_ = (stream_ + 1) % kStreams;
  return 0;
}

/// No copy waits for the next round.
i32 Engine::end_round() noexcept {
  if (const i32 status = issue()) return status;
  return mark();
}

i32 Engine::start(void* destination, const void* source, u64 bytes, u64 token) noexcept {
  if (const i32 status = enter()) return status;
  const u64 to = reinterpret_cast<u64>(destination), from = reinterpret_cast<u64>(source);
  const bool adjoins = held_.bytes != 0 && to == held_.destination + held_.bytes &&
                       from == held_.source + held_.bytes && held_.bytes + bytes <= kMergedBytes;
  if (!adjoins) {
    if (const i32 status = issue()) return status;
    held_ = {to, from, 0};
  }
  held_.bytes += bytes;
  numbers_[token % kTokens] = started_ + 1;
  return held_.bytes >= kMergedBytes ? issue() : 0;
}

/// Asked by whoever closes a proxy, too: that thread is the user's and keeps the device that it has.
i32 Engine::finished(u64 token) noexcept {
  if (entered == number_) return look_for(token);
  const Inside inside(driver_, context_);
  return inside.result() == kSuccess ? look_for(token) : failed(inside.result());
}

i32 Engine::look_for(u64 token) noexcept {
  const u64 number = numbers_[token % kTokens];
  if (number <= done_) return 1;
  while (num_marks_ != 0 && number > done_) {
    const Mark& oldest = marks_[first_mark_];
    const Result result = driver_.query(oldest.event);
    if (result == kNotReady) return 0;
    if (result != kSuccess) return failed(result);
    done_ = oldest.behind;
    first_mark_ = (first_mark_ + 1) % kEvents;
    --num_marks_;
  }
  if (number <= done_) return 1;
  return number > marked_ ? end_round() : 0;
}

i32 Engine::write(void* flag, u32 value) noexcept {
  if (const i32 status = enter()) return status;
  if (num_pending_ == kFlagsARound) {
    if (const i32 status = commit()) return status;
  }
  if (num_pending_ == 0 && flushes_on_stream_) {
    pending_[num_pending_] = {};
    pending_[num_pending_++].operation = kFlushRemoteWrites;
  }
  pending_[num_pending_] = {};
  pending_[num_pending_].address = reinterpret_cast<u64>(flag);
  pending_[num_pending_++].value = value;
  return 0;
}

i32 Engine::commit() noexcept {
  if (const i32 status = enter()) return status;
  if (const i32 status = end_round()) return status;
  if (num_pending_ == 0) return 0;
  if (write_order_ == kWritesFlushed && !flushes_on_stream_) {
    if (const i32 status = failed(driver_.flush(kCurrentContext, kToOwner))) return status;
  }
  const Result result = driver_.batch(flags_[flag_stream_], num_pending_, pending_.data(), 0);
  flag_stream_ = (flag_stream_ + 1) % kStreams;
  num_pending_ = 0;
  return failed(result);
}

i32 Engine::pin(void* address, u64 bytes) noexcept {
  const Inside inside(driver_, context_);
  return inside.result() == kSuccess ? failed(driver_.pin(address, bytes, 0)) : failed(inside.result());
}

void Engine::unpin(void* address) noexcept {
  const Inside inside(driver_, context_);
  if (inside.result() == kSuccess) driver_.unpin(address);
}

CopyEngine Engine::copies() noexcept {
  CopyEngine engine;
  engine.context = this;
  engine.start = [](void* self, void* destination, const void* source, u64 bytes, u64 token) {
    return static_cast<Engine*>(self)->start(destination, source, bytes, token);
  };
  engine.finished = [](void* self, u64 token) { return static_cast<Engine*>(self)->finished(token); };
  engine.pin = [](void* self, void* address, u64 bytes) { return static_cast<Engine*>(self)->pin(address, bytes); };
  engine.unpin = [](void* self, void* address) { static_cast<Engine*>(self)->unpin(address); };
  return engine;
}

FlagWriter Engine::flags() noexcept {
  FlagWriter writer;
  writer.context = this;
  writer.write = [](void* self, void* flag, u32 value) { return static_cast<Engine*>(self)->write(flag, value); };
  writer.commit = [](void* self) { return static_cast<Engine*>(self)->commit(); };
  return writer;
}

}  // namespace mk::host::cuda
