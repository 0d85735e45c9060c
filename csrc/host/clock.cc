#include <ctime>

#include "host/transport.h"

namespace mk::host {

u64 now_ns() noexcept {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<u64>(time.tv_sec) * 1'000'000'000u + static_cast<u64>(time.tv_nsec);
}

}  // namespace mk::host
