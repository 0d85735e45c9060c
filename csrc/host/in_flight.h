#pragma once
// Commands that were taken from the ring and are not retired yet, queued by connection.
#include <span>
#include <vector>

#include "host/transport.h"

namespace mk::host {

/// One taken command.
struct InFlight {
  Write write;
  u32 peer;
  u32 lane;
  u64 next;     ///< ticket behind it in its connection's queue
  bool posted;  ///< the transport has it
  bool done;    ///< the transport has finished with it
};

/// A window of consecutive tickets. Tickets enter and leave in order, and complete in any order.
class Window {
 public:
  /// At most `capacity` tickets at once, over `connections` queues.
  Window(u32 capacity, u32 connections) : entries_(capacity), queues_(connections) {}

  bool full() const noexcept { return entered_ - retired_ == entries_.size(); }
  u64 outstanding() const noexcept { return entered_ - retired_; }
  u64 retired() const noexcept { return retired_; }
  u64 waiting() const noexcept { return waiting_; }
  InFlight& operator[](u64 ticket) noexcept { return entries_[ticket % entries_.size()]; }

  /// Is this ticket posted and not complete? Anything else can't be completed.
  bool in_flight(u64 ticket) noexcept {
    return ticket >= retired_ && ticket < entered_ && (*this)[ticket].posted && !(*this)[ticket].done;
  }

  /// The next ticket joins the queue of its connection; the window must not be full.
  void enter(u32 connection, const InFlight& entry, u64 now) noexcept;

  u32 queued(u32 connection) const noexcept { return queues_[connection].count; }
  /// When the command at the head came; meaningless for an empty queue.
  u64 head_since(u32 connection) const noexcept { return queues_[connection].since; }
  /// The first commands of the queue, as many as `writes` has room for. Returns how many.
  u32 head(u32 connection, std::span<Write> writes) noexcept;
  /// The transport has taken the first `count` commands.
  void pop(u32 connection, u32 count, u64 now) noexcept;

  /// `ticket`, which is in flight, is complete; the retired prefix may move.
  void complete(u64 ticket) noexcept;

 private:
  struct Queue {
    u64 first = 0, last = 0, since = 0;
    u32 count = 0;
  };

  std::vector<InFlight> entries_;
  std::vector<Queue> queues_;
  u64 entered_ = 0, retired_ = 0, waiting_ = 0;
};

}  // namespace mk::host
