#pragma once
// The proxy's end of the command ring (abi/command_ring.h says how the other end publishes).
#include <atomic>
#include <cstddef>
#include <cstring>

#include "abi/command_ring.h"

namespace mk::host {

/// Reads commands in ticket order. The memory belongs to the caller: pinned, zero at the start, one reader.
class CommandRing {
 public:
  CommandRing() = default;
  CommandRing(RingControl* control, Command* slots, u32 capacity) noexcept
      : control_(control), slots_(slots), capacity_(capacity) {}

  /// Ticket of the command that comes next.
  u64 next() const noexcept { return next_; }

  /// Has the next command been published?
  bool ready() const noexcept {
    // pairs-with: command acquire (signal_role -> proxy), scope sys
    return std::atomic_ref<u64>(slot().header).load(std::memory_order_acquire) == next_ + 1;
  }

  /// The next command, which must be ready. Its slot is free for the producer after free_taken().
  Command take() noexcept {
    Command command{};
    std::memcpy(static_cast<void*>(&command), &slot(), offsetof(Command, header));
    ++next_;
    return command;
  }

  /// Give the slots of all taken commands back.
  void free_taken() noexcept {
    // pairs-with: ring_credit release (proxy -> signal_role), scope sys
    publish(control_->consumed, next_);
  }

  /// All tickets below `ticket` are complete.
  void retire_below(u64 ticket) noexcept { publish(control_->retired, ticket); }

  /// Every wait of a kernel on this ring gives up from now on.
  void stop_producers() noexcept {
    // pairs-with: ring_fault release (proxy -> signal_role), scope sys
    std::atomic_ref<u32>(control_->fault).store(1, std::memory_order_release);
  }

 private:
  Command& slot() const noexcept { return slots_[next_ % capacity_]; }
  static void publish(u64& word, u64 value) noexcept {
    std::atomic_ref<u64>(word).store(value, std::memory_order_release);
  }

  RingControl* control_ = nullptr;
  Command* slots_ = nullptr;
  u32 capacity_ = 0;
  u64 next_ = 0;
};

/// A producer on the host, for reference operators and tests. Any number of threads; not on a ring that kernels use.
class HostProducer {
 public:
  HostProducer(RingControl* control, Command* slots, u32 capacity) noexcept
      : control_(control), slots_(slots), capacity_(capacity) {}

  /// Publishes `body` (its header is ignored) under the next ticket, once a slot is free.
  /// 0; EPIPE where the proxy has stopped; ETIMEDOUT where no slot came free before `deadline_ns`.
  int push(Command body, u64 deadline_ns, u64& ticket) noexcept;

  /// Waits until all tickets up to this one are retired. Returns as push() does.
  int wait_retired(u64 ticket, u64 deadline_ns) const noexcept;

 private:
  bool stopped() const noexcept { return std::atomic_ref<u32>(control_->fault).load(std::memory_order_acquire) != 0; }

  RingControl* control_;
  Command* slots_;
  u32 capacity_;
  std::atomic<u64> next_{0};
};

}  // namespace mk::host
