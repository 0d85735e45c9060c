#include "messages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mk::test {

namespace {

constexpr int kPoison = 0xee;
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
  u64 state = message.key;
  for (u64 i = 0; i < message.bytes; i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(to + i, &state, std::min<u64>(8, message.bytes - i));
  }
}

void poison(std::byte* at, u64 bytes) { std::memset(at, kPoison, bytes); }

/// A slot as it is without a message.
Reader::Reader(const Plan& plan) : expected_(Layout(plan).slot_bytes, static_cast<std::byte>(kPoison)) {}

/// Compared with a copy of what the whole slot has to be: memcmp is fast where instructions are emulated, too.
bool Reader::take(std::byte* slot, const Message& message) {
  fill(expected_.data() + message.destination, message);
  const bool is_right = std::memcmp(slot, expected_.data(), expected_.size()) == 0;
  poison(expected_.data() + message.destination, message.bytes);
  if (is_right) {
    poison(slot + message.destination, message.bytes);
  } else {
    poison(slot, expected_.size());
  }
  return is_right;
}

}  // namespace mk::test
