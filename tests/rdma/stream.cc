#include "stream.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "host/flags.h"

namespace mk::test {

namespace {

using namespace mk::host;

constexpr u64 kLongestPauseNs = 300'000;
constexpr u64 kLongestRetriesNs = 20'000'000'000;  ///< before the proxy's own limit: the network's report says more
constexpr u32 kAtOnce = 32;  ///< messages of one direction before the other has its turn
/// Not sched_yield(): a thread that yields and yields again takes its share of the only processor from those that work.
constexpr std::chrono::milliseconds kNap{1};
constexpr u64 kIdleSpinNs = 2'000'000;
constexpr u32 kGroup = 8;   ///< messages that one credit stands for: packets are what costs in a virtual machine

/// One side, and how far it is.
class Runner {
 public:
  Runner(const Plan& plan, const Party& party, u64 until_received)
      : plan_(plan), layout_(plan), party_(party), until_received_(std::min(until_received, plan.messages)),
        reader_(plan), random_(plan.seed + 17 * party.rank) {}

  /// True where something moved.
  bool step(u64 now) {
    const bool sends = now >= sending_from_ns_ && send_some();
    const bool receives = now >= receiving_from_ns_ && receive_some();
    if (sends) rest(now, sending_from_ns_);
    if (receives) rest(now, receiving_from_ns_);
    const bool moved = sends || receives;
    if (moved) moved_ns_ = now;
    if (!moved && outcome_.failure.empty()) look_for_failure(now);
    return moved;
  }
  bool is_done() const {
    const bool all_out = sent_ == plan_.messages || until_received_ != plan_.messages;
    return !outcome_.failure.empty() || (all_out && outcome_.received == until_received_);
  }
  void start(u64 now) { moved_ns_ = now; }
  const Outcome& outcome() const { return outcome_; }

 private:
  u32 flag(u32 slot) const {
    std::byte* word = flag_address(party_.side->memory.data(), 0, slot);
    return std::atomic_ref<u32>(*reinterpret_cast<u32*>(word)).load(std::memory_order_acquire);
  }
  bool has_reached(u32 slot, u32 epoch) const { return static_cast<i32>(flag(slot) - epoch) >= 0; }
  /// Has the peer read all up to this message, the last of its group?
  bool has_credit(u64 number) const {
    const u32 slot = static_cast<u32>(number % plan_.slots);
    return has_reached(plan_.slots + slot / kGroup, epoch_of(plan_, number));
  }
  void push(const Command& command) {
    u64 ticket = 0;
    const int status = party_.side->session->producer().push(command, now_ns() + plan_.limit_ns, ticket);
    if (status != 0) fail("push", status);
  }
  /// Sometimes a direction that has moved rests.
  void rest(u64 now, u64& from_ns) {
    if (plan_.delays && random_() % 4 == 0) from_ns = now + random_() % kLongestPauseNs;
  }
  bool send_some();
  bool receive_some();
  void look_for_failure(u64 now);
  void fail(const char* what, int status);

  const Plan plan_;
  const Layout layout_;
  const Party party_;
  const u64 until_received_;
  Reader reader_;
  std::mt19937_64 random_;
  Outcome outcome_;
  u64 sent_ = 0, moved_ns_ = 0, sending_from_ns_ = 0, receiving_from_ns_ = 0;
};

bool Runner::send_some() {
  u32 count = 0;
  for (; count < kAtOnce && sent_ < plan_.messages && outcome_.failure.empty(); ++count, ++sent_) {
    const u32 slot = static_cast<u32>(sent_ % plan_.slots);
    if (sent_ >= plan_.slots && sent_ % kGroup == 0 && !has_credit(sent_ - plan_.slots + kGroup - 1)) break;
    const Message message = message_of(plan_, party_.rank, sent_);
    const u64 source = layout_.send + slot * layout_.slot_bytes + message.source;
    fill(party_.side->memory.data() + source, message);
    push({source, layout_.receive + slot * layout_.slot_bytes + message.destination, message.bytes, party_.peer, slot,
          epoch_of(plan_, sent_), 0, 0});
  }
  return count != 0;
}

bool Runner::receive_some() {
  u32 count = 0;
  for (; count < kAtOnce && outcome_.received < until_received_ && outcome_.failure.empty(); ++count) {
    const u64 number = outcome_.received;
    const u32 slot = static_cast<u32>(number % plan_.slots), epoch = epoch_of(plan_, number);
    if (!has_reached(slot, epoch)) break;
    std::byte* at = party_.side->memory.data() + layout_.receive + slot * layout_.slot_bytes;
    const bool is_right = reader_.take(at, message_of(plan_, party_.peer, number));
    outcome_.wrong += is_right && flag(slot) == epoch ? 0 : 1;
    ++outcome_.received;
    const u32 group = plan_.slots + slot / kGroup;
    if ((number + 1) % kGroup == 0) push({0, 0, 0, party_.peer, group, epoch_of(plan_, number), 0, 0});
  }
  return count != 0;
}

void Runner::look_for_failure(u64 now) {
  Error error;
  if (party_.side->session->proxy().fault(error)) return fail("proxy", error.number);
  if (now > moved_ns_ + plan_.limit_ns) fail("wait", ETIMEDOUT);
}

void Runner::fail(const char* what, int status) {
  if (!outcome_.failure.empty()) return;
  Error error;
  outcome_.failure = std::string(what) + ": " + std::strerror(status) + ", " + std::to_string(sent_) + " sent, " +
                     std::to_string(outcome_.received) + " received";
  if (!party_.side->session->proxy().fault(error)) return;
  outcome_.failure += std::string("; ") + error.call + " " + error.device + " peer " + std::to_string(error.peer) +
                      ": " + std::strerror(error.number) + " " + error.detail;
}

}  // namespace

std::vector<Outcome> drive(const Plan& plan, std::span<const Party> parties, u64 until_received) {
  std::vector<Runner> runners;
  runners.reserve(parties.size());
  for (const Party& party : parties) runners.emplace_back(plan, party, until_received).start(now_ns());
  while (true) {
    bool moved = false, all_done = true;
    const u64 now = now_ns();
    for (Runner& runner : runners) {
      if (runner.is_done()) continue;
      all_done = false;
      moved |= runner.step(now);
    }
    if (all_done) break;
    if (!moved) std::this_thread::sleep_for(kNap);
  }
  std::vector<Outcome> outcomes;
  for (const Runner& runner : runners) outcomes.push_back(runner.outcome());
  return outcomes;
}

ProxyOptions options_to_drive(const Plan& plan) {
  ProxyOptions options = options_for(plan);
  options.ring_capacity = 4 * plan.slots;
  options.max_outstanding = 4 * plan.slots;
  options.idle_spin_ns = kIdleSpinNs;
  options.timeout_ns = std::max(plan.limit_ns, kLongestRetriesNs);
  options.timeline_capacity = 0;
  return options;
}

}  // namespace mk::test
