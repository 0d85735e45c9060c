#include "host/records.h"

#include <algorithm>
#include <bit>

namespace mk::host {

void Timeline::add(const ProxyEvent& event) noexcept {
  if (records_.empty()) return;
  const u64 number = written_.load(std::memory_order_relaxed);
  begun_.store(number + 1, std::memory_order_relaxed);
  // released by each of the stores below: whoever reads one new word also sees that the record is being written
  const auto words = std::bit_cast<std::array<u64, kWords>>(event);
  Record& record = records_[number % records_.size()];
  for (u32 i = 0; i < kWords; ++i) record[i].store(words[i], std::memory_order_release);
  written_.store(number + 1, std::memory_order_release);
}

u32 Timeline::read(u64 from, std::span<ProxyEvent> events, u64& next) const noexcept {
  const u64 written = written_.load(std::memory_order_acquire);
  const u64 oldest = written - std::min<u64>(written, records_.size());
  u64 number = std::min(std::max(from, oldest), written);
  u32 count = 0;
  for (; number < written && count < events.size(); ++number) {
    const Record& record = records_[number % records_.size()];
    std::array<u64, kWords> words;
    for (u32 i = 0; i < kWords; ++i) words[i] = record[i].load(std::memory_order_acquire);
    // a record of which one word is newer belongs to an event that had begun
    if (begun_.load(std::memory_order_relaxed) > number + records_.size()) continue;
    events[count++] = std::bit_cast<ProxyEvent>(words);
  }
  next = number;
  return count;
}

}  // namespace mk::host
