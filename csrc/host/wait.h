#pragma once
// Bounded waits of host threads on words that another thread writes.
#include <cerrno>
#include <ctime>
#include <sched.h>

#include "host/transport.h"

namespace mk::host {

/// How a waiting thread spends its time: some looks at full speed, then yielding, then short sleeps.
class Backoff {
 public:
  /// Once more without success. `now` is what now_ns() said.
  void idle(u64 now) noexcept {
    if (since_ == 0) since_ = now;
    const u64 waited = now - since_;
    if (waited < kSpinNs) return;
    if (waited < kYieldNs) {
      sched_yield();
      return;
    }
    const timespec pause{0, kSleepNs};
    nanosleep(&pause, nullptr);
  }
  void busy() noexcept { since_ = 0; }

 private:
  static constexpr u64 kSpinNs = 5'000, kYieldNs = 200'000;
  static constexpr long kSleepNs = 20'000;
  u64 since_ = 0;
};

/// Returns 0 once `done()`, EPIPE once `stopped()`, ETIMEDOUT at the deadline; `done` is asked last of all once more.
template <class Done, class Stopped>
int wait_bounded(u64 deadline_ns, Done done, Stopped stopped) noexcept {
  Backoff backoff;
  while (!done()) {
    const bool ended = stopped();
    const u64 now = now_ns();
    if (ended || now >= deadline_ns) return done() ? 0 : ended ? EPIPE : ETIMEDOUT;
    backoff.idle(now);
  }
  return 0;
}

}  // namespace mk::host
