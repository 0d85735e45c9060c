#include "messages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mk::test {

namespace {

constexpr int kPoison = 0xee;
constexpr u64 kAllBytes = 64 << 10;
constexpr u64 kGuard = 64;  ///< bytes on each side of a message that must stay as they were

/// A few numbers from a seed; a generator with a large state would cost more than the message.
struct Draws {
  u64 state;
  u64 next() {
    state += 0x9e3779b97f4a7c15u;
    u64 mixed = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
  }
};

/// What all messages are parts of: made once, since making bytes up would cost more than sending them.
const std::vector<u64>& all_bytes() {
  static const std::vector<u64> words = [] {
    std::vector<u64> made(kAllBytes / sizeof(u64));
    Draws draws{0};
    for (u64& word : made) word = draws.next();
    return made;
  }();
  return words;
}

/// Calls `take(offset in the message, bytes, how many)`. Where all_bytes() ends a message goes on at its beginning.
template <class Take>
void each_part(const Message& message, Take take) {
  const auto* all = reinterpret_cast<const std::byte*>(all_bytes().data());
  u64 at = message.key % kAllBytes;
  for (u64 done = 0; done < message.bytes; at = 0) {
    const u64 bytes = std::min(message.bytes - done, kAllBytes - at);
    take(done, all + at, bytes);
    done += bytes;
  }
}

/// By words: the library's memcmp uses vector instructions that are slow where instructions are emulated.
bool is_same(const std::byte* a, const std::byte* b, u64 bytes) {
  constexpr u64 kWords = 4;
  u64 difference = 0, i = 0;
  for (; i + kWords * sizeof(u64) <= bytes; i += kWords * sizeof(u64)) {
    u64 left[kWords], right[kWords];
    std::memcpy(left, a + i, sizeof left);
    std::memcpy(right, b + i, sizeof right);
    for (u64 word = 0; word < kWords; ++word) difference |= left[word] ^ right[word];
  }
  for (; i < bytes; ++i) difference |= static_cast<u64>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

Layout::Layout(const Plan& plan)
    : slot_bytes(plan.max_bytes + 4 * kGuard),
      receive((8 * u64{plan.slots} + 255) / 256 * 256),
      send(receive + plan.slots * slot_bytes),
      end(send + plan.slots * slot_bytes) {}

Message message_of(const Plan& plan, u32 rank, u64 number) {
  Draws draws{plan.seed * 1'000'003 + number * 2 + rank};
  const double exponent = static_cast<double>(draws.next() >> 11) * 0x1p-53;  // 0 to 1
  const double bytes = std::exp2(std::log2(static_cast<double>(plan.max_bytes)) * exponent);
  const u64 size = std::min<u64>(static_cast<u64>(bytes + 0.5), plan.max_bytes);
  const u64 room = plan.max_bytes + 2 * kGuard - size;
  return {size, kGuard + draws.next() % room, kGuard + draws.next() % room, draws.next()};
}

u32 epoch_of(const Plan& plan, u64 number) { return static_cast<u32>((number / plan.slots + 1) * 1000 + number % 7); }

void fill(std::byte* to, const Message& message) {
  each_part(message, [&](u64 begin, const std::byte* part, u64 bytes) { std::memcpy(to + begin, part, bytes); });
}

void poison(std::byte* at, u64 bytes) { std::memset(at, kPoison, bytes); }

Reader::Reader(const Plan& plan) : empty_(Layout(plan).slot_bytes, static_cast<std::byte>(kPoison)) {}

bool Reader::take(std::byte* slot, const Message& message) {
  constexpr u64 kWhole = 13;  // has no divisor in common with the number of slots: each has its turn
  const bool looks_at_all = ++taken_ % kWhole == 0;
  const u64 end = message.destination + message.bytes;
  const u64 first = looks_at_all ? 0 : message.destination - kGuard;
  const u64 last = looks_at_all ? empty_.size() : end + kGuard;
  bool is_right = is_same(slot + first, empty_.data(), message.destination - first) &&
                  is_same(slot + end, empty_.data(), last - end);
  each_part(message, [&](u64 begin, const std::byte* part, u64 bytes) {
    is_right = is_right && is_same(slot + message.destination + begin, part, bytes);
  });
  if (is_right) {
    poison(slot + message.destination, message.bytes);
  } else {
    poison(slot, empty_.size());
  }
  return is_right;
}

}  // namespace mk::test
