#include "host/bounce.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "host/wait.h"

namespace mk::host {

namespace {

// Engines know the copies of the last 65536 tokens (cuda/engine.h).
constexpr u64 kMostCopies = 32768;
constexpr u64 kGraceNs = 1'000'000'000;

}  // namespace

Bounce::Bounce(const Setup& setup)
    : setup_(setup), outgoing_(setup.max_outstanding), incoming_(setup.region.num_flags) {}

Error Bounce::allocate() {
  const Place place{"bounce buffer", setup_.device.c_str()};
  const auto bytes = static_cast<unsigned long long>(setup_.region.bytes);
  void* memory = mmap(nullptr, setup_.region.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail(place, errno, "%llu bytes", bytes);
  double_ = static_cast<std::byte*>(memory);
  if (setup_.copy.pin == nullptr) return {};
  if (const i32 status = setup_.copy.pin(setup_.copy.context, double_, setup_.region.bytes)) {
    return fail(place, -status, "%llu bytes can't be locked", bytes);
  }
  is_pinned_ = true;
  return {};
}

Setup Bounce::inner_setup() {
  Setup inner = setup_;
  inner.region.base = double_;
  inner.region.kind = MemoryKind::kHost;
  inner.region.write_order = kWritesFlushed;
  inner.region.dmabuf = -1;
  inner.publisher = this;
  inner.copy = {};
  inner.bounce = {};
  inner.flag_writer = {};
  return inner;
}

/// Tokens of copies in flight have to be near each other.
bool Bounce::may_copy() const noexcept {
  u64 oldest = next_token_;
  for (std::size_t i = 0; i < outgoing_.size(); ++i) {
    if (outgoing_[i].token == kNoCopy) continue;
    oldest = std::min(oldest, outgoing_[i].token);
    break;
  }
  if (num_started_ != 0 && incoming_[0].token != kNoCopy) oldest = std::min(oldest, incoming_[0].token);
  return next_token_ - oldest < kMostCopies;
}

int Bounce::copy(std::byte* to, const std::byte* from, u64 bytes, u64& token, Error& error) noexcept {
  token = kNoCopy;
  if (bytes == 0) return 0;
  if (setup_.copy.start == nullptr) {
    std::memcpy(to, from, bytes);
    return 0;
  }
  token = next_token_++;
  const i32 status = setup_.copy.start(setup_.copy.context, to, from, bytes, token);
  if (status >= 0) return 0;
  error = fail({"copy", device()}, -status, "%llu bytes", static_cast<unsigned long long>(bytes));
  return -1;
}

int Bounce::is_done(u64 token, Error& error) noexcept {
  if (token == kNoCopy) return 1;
  const i32 state = setup_.copy.finished(setup_.copy.context, token);
  if (state < 0) error = fail({"copy", device()}, -state);
  return state < 0 ? -1 : state;
}

int Bounce::post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept {
  int taken = 0;
  for (const Write& write : writes) {
    if (outgoing_.full() || !may_copy()) break;
    const u64 at = write.source_offset;
    Outgoing entry{write, peer, lane, kNoCopy};
    if (copy(double_ + at, setup_.region.base + at, write.bytes, entry.token, error) < 0) return -1;
    outgoing_.push(entry);
    ++taken;
  }
  return forward(error) < 0 ? -1 : taken;
}

/// Copied messages at the head that go to one place. `state` is -1 where a copy has failed.
u32 Bounce::ready_to_forward(std::span<Write> writes, Error& error, int& state) noexcept {
  u32 count = 0;
  for (; count < writes.size() && count < outgoing_.size(); ++count) {
    const Outgoing& entry = outgoing_[count];
    if (entry.peer != outgoing_[0].peer || entry.lane != outgoing_[0].lane) break;
    state = is_done(entry.token, error);
    if (state <= 0) break;
    writes[count] = entry.write;
  }
  return count;
}

int Bounce::forward(Error& error) noexcept {
  std::array<Write, kMaxBatch> writes;
  while (outgoing_.size() != 0) {
    int state = 0;
    const u32 ready = ready_to_forward(writes, error, state);
    if (state < 0) return -1;
    if (ready == 0) return 0;
    const int taken = inner_->post(outgoing_[0].peer, outgoing_[0].lane, {writes.data(), ready}, error);
    if (taken < 0) return -1;
    outgoing_.pop(static_cast<std::size_t>(taken));
    if (static_cast<u32>(taken) < ready) return 0;
  }
  return 0;
}

/// The transport behind has seen a whole message in the double.
int Bounce::publish(const Arrival& arrival, Error& error) noexcept {
  const u64 limit = setup_.region.bytes;
  const bool is_inside = arrival.bytes <= limit && arrival.offset <= limit - arrival.bytes;
  if (arrival.slot >= setup_.region.num_flags || !is_inside || incoming_.full()) {
    error = fail({"arrival", device(), static_cast<i32>(arrival.peer)}, EPROTO, "flag %u, %llu bytes at %llu of %llu",
                 arrival.slot, static_cast<unsigned long long>(arrival.bytes),
                 static_cast<unsigned long long>(arrival.offset), static_cast<unsigned long long>(limit));
    return -1;
  }
  incoming_.push({arrival, kNoCopy, false});
  return 0;
}

int Bounce::start_incoming(Error& error) noexcept {
  for (; num_started_ < incoming_.size() && may_copy(); ++num_started_) {
    Incoming& entry = incoming_[num_started_];
    const u64 at = entry.arrival.offset;
    if (copy(setup_.region.base + at, double_ + at, entry.arrival.bytes, entry.token, error) < 0) return -1;
  }
  return 0;
}

int Bounce::publish_copied(Error& error) noexcept {
  while (num_started_ != 0) {
    const int state = is_done(incoming_[0].token, error);
    if (state <= 0) return state;
    if (setup_.publisher->publish(incoming_[0].arrival, error) < 0) return -1;
    incoming_.pop(1);
    --num_started_;
  }
  return 0;
}

int Bounce::poll(std::span<u64> tickets, Error& error) noexcept {
  const int count = inner_->poll(tickets, error);
  if (count < 0) return -1;
  if (start_incoming(error) < 0 || publish_copied(error) < 0 || forward(error) < 0) return -1;
  return count;
}

/// A copy that is still on its way reads or writes the double, which therefore stays where one does not end.
void Bounce::close(u64 deadline_ns) noexcept {
  if (inner_) inner_->close(deadline_ns);
  if (double_ == nullptr) return;
  Error error;
  const auto all_settled = [&] {
    for (; num_started_ != 0 && is_done(incoming_[0].token, error) == 1; --num_started_) incoming_.pop(1);
    while (outgoing_.size() != 0 && is_done(outgoing_[0].token, error) == 1) outgoing_.pop(1);
    return num_started_ == 0 && outgoing_.size() == 0;
  };
  const u64 until_ns = std::max(deadline_ns, now_ns() + kGraceNs);
  if (wait_bounded(until_ns, all_settled, [&] { return static_cast<bool>(error); }) == 0) {
    if (is_pinned_) setup_.copy.unpin(setup_.copy.context, double_);
    munmap(double_, setup_.region.bytes);
  }
  double_ = nullptr;
}

}  // namespace mk::host
