#pragma once
// Counters and timeline of a running proxy: one writer, any reader, no lock.
#include <array>
#include <atomic>
#include <span>
#include <vector>

#include "abi/proxy_records.h"

namespace mk::host {

class Counters {
 public:
  // Relaxed: single words that order nothing; only the proxy thread writes them.
  void add(ProxyCounter counter, u64 amount = 1) noexcept {
    auto& word = words_[counter];
    word.store(word.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  void raise(ProxyCounter counter, u64 value) noexcept {
    auto& word = words_[counter];
    if (word.load(std::memory_order_relaxed) < value) word.store(value, std::memory_order_relaxed);
  }
  u64 get(ProxyCounter counter) const noexcept { return words_[counter].load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<u64>, kNumCounters> words_{};
};

/// The last events; older ones are overwritten. Capacity 0 keeps nothing.
class Timeline {
 public:
  explicit Timeline(u32 capacity) : records_(capacity) {}

  bool enabled() const noexcept { return !records_.empty(); }
  void add(const ProxyEvent& event) noexcept;

  /// Copies events from number `from` on, or from the oldest that is still there. Returns how many; `next` is the
  /// number to ask for the next time. Events that were overwritten while they were copied are left out.
  u32 read(u64 from, std::span<ProxyEvent> events, u64& next) const noexcept;

 private:
  static constexpr u32 kWords = sizeof(ProxyEvent) / sizeof(u64);
  using Record = std::array<std::atomic<u64>, kWords>;

  std::vector<Record> records_;
  std::atomic<u64> begun_{0};    ///< events whose record is, or may be, half written
  std::atomic<u64> written_{0};  ///< events that can be read
};

}  // namespace mk::host
