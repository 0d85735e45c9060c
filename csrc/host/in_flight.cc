#include "host/in_flight.h"

namespace mk::host {

void Window::enter(u32 connection, const InFlight& entry, u64 now) noexcept {
  const u64 ticket = entered_++;
  (*this)[ticket] = entry;
  Queue& queue = queues_[connection];
  if (queue.count++ == 0) {
    queue.first = ticket;
    queue.since = now;
  } else {
    (*this)[queue.last].next = ticket;
  }
  queue.last = ticket;
  ++waiting_;
}

u32 Window::head(u32 connection, std::span<Write> writes) noexcept {
  const Queue& queue = queues_[connection];
  u64 ticket = queue.first;
  u32 count = 0;
  for (; count < queue.count && count < writes.size(); ++count) {
    writes[count] = (*this)[ticket].write;
    ticket = (*this)[ticket].next;
  }
  return count;
}

void Window::pop(u32 connection, u32 count, u64 now) noexcept {
  Queue& queue = queues_[connection];
  for (u32 i = 0; i < count; ++i) {
    InFlight& entry = (*this)[queue.first];
    entry.posted = true;
    queue.first = entry.next;
  }
  queue.count -= count;
  queue.since = now;
  waiting_ -= count;
}

void Window::complete(u64 ticket) noexcept {
  (*this)[ticket].done = true;
  while (retired_ < entered_ && (*this)[retired_].done) ++retired_;
}

}  // namespace mk::host
