#include "host/ring.h"

#include <cstring>

#include "host/wait.h"

namespace mk::host {

int HostProducer::push(Command body, u64 deadline_ns, u64& ticket) noexcept {
  ticket = next_.load(std::memory_order_relaxed);
  // A ticket is taken only with its credit in hand: one that was taken and never published would stop the ring.
  const auto take_ticket = [&] {
    const u64 consumed = std::atomic_ref<u64>(control_->consumed).load(std::memory_order_acquire);
    while (ticket < consumed + capacity_) {
      if (next_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) return true;
    }
    ticket = next_.load(std::memory_order_relaxed);
    return false;
  };
  if (stopped()) return EPIPE;
  if (const int status = wait_bounded(deadline_ns, take_ticket, [this] { return stopped(); })) return status;
  Command& slot = slots_[ticket % capacity_];
  // The body is everything before the header; the proxy does not read it until the header says so.
  std::memcpy(static_cast<void*>(&slot), &body, offsetof(Command, header));
  std::atomic_ref<u64>(slot.header).store(ticket + 1, std::memory_order_release);
  return 0;
}

int HostProducer::wait_retired(u64 ticket, u64 deadline_ns) const noexcept {
  const auto retired = [&] {
    return std::atomic_ref<u64>(control_->retired).load(std::memory_order_acquire) > ticket;
  };
  return wait_bounded(deadline_ns, retired, [this] { return stopped(); });
}

}  // namespace mk::host
