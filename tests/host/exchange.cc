#include "exchange.h"

#include <cerrno>
#include <cstring>
#include <random>
#include <thread>

namespace mk::test {

namespace {

using namespace mk::host;

void maybe_pause(const Plan& plan, std::mt19937_64& random) {
  if (!plan.delays) return;
  const u64 choice = random() % 64;
  if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  if (choice < 8) std::this_thread::yield();
}

std::string describe(const char* what, u64 number, int status, Session& session) {
  Error error;
  std::string text = std::string(what) + " of message " + std::to_string(number) + ": " + std::strerror(status);
  if (session.proxy().fault(error)) {
    text += std::string("; ") + error.call + " " + error.device + " peer " + std::to_string(error.peer) + ": " +
            std::strerror(error.number) + " " + error.detail;
  }
  return text;
}

/// Messages out: each waits for the credit of the one before it in its slot.
std::string send_all(const Plan& plan, Side& side, u32 rank, u32 peer) {
  const Layout layout(plan);
  std::mt19937_64 random(plan.seed + 17 * rank);
  Session& session = *side.session;
  for (u64 number = 0; number < plan.messages; ++number) {
    const u32 slot = static_cast<u32>(number % plan.slots);
    u32 seen = 0;
    if (number >= plan.slots) {
      const u32 credit = epoch_of(plan, number - plan.slots);
      const int status = session.wait_flag(plan.slots + slot, credit, now_ns() + plan.limit_ns, seen);
      if (status != 0) return describe("credit", number, status, session);
    }
    const Message message = message_of(plan, rank, number);
    const u64 source = layout.send + slot * layout.slot_bytes + message.source;
    fill(side.memory.data() + source, message);
    maybe_pause(plan, random);
    const u64 destination = layout.receive + slot * layout.slot_bytes + message.destination;
    const Command command{source, destination, message.bytes, peer, slot, epoch_of(plan, number), 0, 0};
    u64 ticket = 0;
    const int status = session.producer().push(command, now_ns() + plan.limit_ns, ticket);
    if (status != 0) return describe("push", number, status, session);
  }
  return {};
}

/// Messages in: each is checked, its slot poisoned, and its credit sent.
Outcome receive_all(const Plan& plan, Side& side, u32 rank, u32 peer) {
  const Layout layout(plan);
  std::mt19937_64 random(plan.seed + 31 * rank);
  Reader reader(plan);
  Session& session = *side.session;
  Outcome outcome;
  for (u64 number = 0; number < plan.messages; ++number) {
    const u32 slot = static_cast<u32>(number % plan.slots), epoch = epoch_of(plan, number);
    u32 seen = 0;
    int status = session.wait_flag(slot, epoch, now_ns() + plan.limit_ns, seen);
    if (status == 0) {
      std::byte* at = side.memory.data() + layout.receive + slot * layout.slot_bytes;
      const Message message = message_of(plan, peer, number);
      const bool is_right = reader.take(at, message);
      outcome.wrong += seen == epoch && is_right ? 0 : 1;
      ++outcome.received;
      maybe_pause(plan, random);
      u64 ticket = 0;
      status = session.producer().push({0, 0, 0, peer, plan.slots + slot, epoch, 0, 0}, now_ns() + plan.limit_ns,
                                       ticket);
    }
    if (status != 0) {
      outcome.failure = describe("arrival", number, status, session);
      break;
    }
  }
  return outcome;
}

}  // namespace

Sides::~Sides() {
  for (Side& side : sides_) {
    if (side.session) (void)side.session->proxy().stop(0);
  }
}

ProxyOptions options_for(const Plan& plan) {
  ProxyOptions options{};
  options.region_bytes = region_bytes(plan);
  options.num_flags = 2 * plan.slots;
  options.window_ns = 2'000;
  options.timeout_ns = plan.limit_ns;
  options.idle_spin_ns = 50'000;
  options.dmabuf = -1;
  options.world = 2;
  options.lanes = 1;
  options.max_outstanding = 256;
  options.ring_capacity = 64;
  options.timeline_capacity = 1024;
  options.seed = plan.seed;
  return options;
}

u64 region_bytes(const Plan& plan) { return Layout(plan).end; }

Error open_side(const Plan& plan, ProxyOptions options, Side& side) {
  const Layout layout(plan);
  if (options.region_base == 0) {
    side.memory.assign(layout.end, std::byte{0});
    options.region_base = reinterpret_cast<u64>(side.memory.data());
  }
  poison(side.memory.data() + layout.receive, layout.send - layout.receive);
  Error error;
  side.session = Session::open(options, error);
  return error;
}

Error meet_all(Sides& sides, u64 limit_ns) {
  for (u32 from = 0; from < sides.size(); ++from) {
    for (u32 to = 0; to < sides.size(); ++to) {
      std::vector<u8> blob;
      if (from == to) continue;
      if (Error error = sides[from].session->endpoint(to, blob)) return error;
      if (Error error = sides[to].session->connect(from, blob)) return error;
    }
  }
  std::vector<Error> errors(sides.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    threads.emplace_back([&, i] { errors[i] = sides[i].session->finish(now_ns() + limit_ns); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Error& error : errors) {
    if (error) return error;
  }
  return {};
}

Error connect_all(Sides& sides, u64 limit_ns) {
  if (Error error = meet_all(sides, limit_ns)) return error;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    if (Error error = sides[i].session->proxy().start()) return error;
  }
  return {};
}

Outcome run_side(const Plan& plan, Side& side, u32 rank, u32 peer) {
  std::string failure;
  std::thread sender([&] { failure = send_all(plan, side, rank, peer); });
  Outcome outcome = receive_all(plan, side, rank, peer);
  sender.join();
  if (outcome.failure.empty()) outcome.failure = failure;
  return outcome;
}

PairOutcome run_pair(const Plan& plan, Sides& sides) {
  PairOutcome outcome;
  std::thread other([&] { outcome.second = run_side(plan, sides[1], 1, 0); });
  outcome.first = run_side(plan, sides[0], 0, 1);
  other.join();
  return outcome;
}

Error close_all(Sides& sides, u64 limit_ns) {
  std::vector<Error> errors(sides.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    threads.emplace_back([&, i] { errors[i] = sides[i].session->proxy().stop(now_ns() + limit_ns); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Error& error : errors) {
    if (error) return error;
  }
  return {};
}

}  // namespace mk::test
