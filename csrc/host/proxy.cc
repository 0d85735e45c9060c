#include "host/proxy.h"

#include <array>
#include <cerrno>
#include <system_error>

#include "host/flags.h"
#include "host/wait.h"

namespace mk::host {

namespace {

constexpr u32 kTakenARound = 64;
constexpr u64 kNotAskedFor = ~u64{0};
constexpr u64 kYieldAfterNs = 20'000;
constexpr long kIdleSleepNs = 20'000;

u32 connections(const ProxySettings& settings) noexcept { return settings.world * settings.lanes; }

}  // namespace

Proxy::Proxy(const ProxySettings& settings, const Region& region, const FlagWriter& flag_writer, CommandRing ring)
    : settings_(settings),
      region_(region),
      flag_writer_(flag_writer),
      ring_(ring),
      limits_(settings.world),
      window_(settings.max_outstanding, connections(settings)),
      timeline_(settings.timeline_capacity) {}

Proxy::~Proxy() {
  // A thread that hangs in a callback would go on with this memory: the owner leaks the proxy where stop() says so.
  (void)stop(now_ns());
}

Error Proxy::start() {
  ended_.store(false, std::memory_order_relaxed);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    ended_.store(true, std::memory_order_relaxed);
    return fail({"pthread_create"}, error.code().value());
  }
  return {};
}

Error Proxy::stop(u64 deadline_ns) {
  if (thread_.joinable()) {
    stop_at_ns_.store(deadline_ns, std::memory_order_release);
    constexpr u64 kGraceNs = 2'000'000'000;  // the thread itself ends at the deadline; more is a callback that hangs
    const auto ended = [this] { return stopped(); };
    if (wait_bounded(deadline_ns + kGraceNs, ended, [] { return false; })) {
      return fail({"stop", transport_->device()}, ETIMEDOUT, "the proxy thread does not come back from a callback");
    }
    thread_.join();
  }
  if (transport_) transport_->close(deadline_ns);
  const u64 left = window_.outstanding();
  if (left != 0 && !faulted_.load(std::memory_order_acquire)) {
    return fail({"stop", transport_->device()}, ETIMEDOUT, "%llu commands were dropped",
                static_cast<unsigned long long>(left));
  }
  return {};
}

bool Proxy::fault(Error& error) const noexcept {
  if (!faulted_.load(std::memory_order_acquire)) return false;
  error = error_;
  return true;
}

void Proxy::run() noexcept {
  now_ = progressed_ns_ = now_ns();
  const auto sound = [this] { return !faulted_.load(std::memory_order_relaxed); };
  while (sound() && !is_done()) {
    const u64 before_ns = now_;
    now_ = now_ns();
    counters_.add(kRounds);
    counters_.raise(kLongestRound, now_ - before_ns);
    bool is_busy = take();
    if (sound()) is_busy |= submit();
    if (sound()) is_busy |= progress();
    if (sound()) look_at_clock(is_busy);
  }
  ring_.stop_producers();
  if (!sound()) transport_->abandon();
  ended_.store(true, std::memory_order_release);
}

bool Proxy::take() noexcept {
  u32 taken = 0;
  for (; taken < kTakenARound && ring_.ready(); ++taken) {
    if (window_.full()) {
      counters_.add(kStalls);
      break;
    }
    const u64 ticket = ring_.next();
    const Command command = ring_.take();
    if (!check(command)) return true;
    const Write write{ticket,        command.source_offset, command.destination_offset,
                      command.bytes, command.chunk,         command.epoch};
    const InFlight entry{write, command.peer, command.chunk % settings_.lanes, 0, false, false};
    window_.enter(entry.peer * settings_.lanes + entry.lane, entry, now_);
    record(kTaken, ticket, entry);
  }
  if (taken == 0) return false;
  ring_.free_taken();
  counters_.add(kCommands, taken);
  counters_.raise(kMostOutstanding, window_.outstanding());
  return true;
}

bool Proxy::check(const Command& command) noexcept {
  const Place place{"command", transport_->device(), static_cast<i32>(command.peer)};
  const auto inside = [](u64 offset, u64 bytes, u64 limit) { return bytes <= limit && offset <= limit - bytes; };
  if (command.peer >= settings_.world || !limits_[command.peer].known) {
    break_down(fail(place, EINVAL, "no peer %u in a group of %u", command.peer, settings_.world));
    return false;
  }
  const PeerLimits& limits = limits_[command.peer];
  if (!inside(command.source_offset, command.bytes, region_.bytes) ||
      !inside(command.destination_offset, command.bytes, limits.region_bytes)) {
    break_down(fail(place, EINVAL, "%llu bytes at %llu of %llu to %llu of %llu",
                    static_cast<unsigned long long>(command.bytes),
                    static_cast<unsigned long long>(command.source_offset),
                    static_cast<unsigned long long>(region_.bytes),
                    static_cast<unsigned long long>(command.destination_offset),
                    static_cast<unsigned long long>(limits.region_bytes)));
    return false;
  }
  if (command.chunk >= limits.num_flags) {
    break_down(fail(place, EINVAL, "chunk %u of %u flags", command.chunk, limits.num_flags));
    return false;
  }
  return true;
}

bool Proxy::submit() noexcept {
  if (window_.waiting() == 0) return false;
  bool is_busy = false;
  for (u32 connection = 0; connection < connections(settings_); ++connection) {
    const u32 queued = window_.queued(connection);
    if (queued == 0) continue;
    // a full batch goes at once, a partial one when its first command has waited for company long enough
    if (queued < kMaxBatch && now_ - window_.head_since(connection) < settings_.window_ns) continue;
    is_busy |= submit_queue(connection);
    if (faulted_.load(std::memory_order_relaxed)) return true;
  }
  return is_busy;
}

bool Proxy::submit_queue(u32 connection) noexcept {
  std::array<Write, kMaxBatch> writes;
  const u32 peer = connection / settings_.lanes, lane = connection % settings_.lanes;
  bool is_busy = false;
  while (window_.queued(connection) != 0) {
    const u32 offered = window_.head(connection, writes);
    const int taken = transport_->post(peer, lane, {writes.data(), offered}, error_);
    if (taken < 0) {
      break_down(error_);
      return true;
    }
    if (taken > 0) {
      is_busy = true;
      window_.pop(connection, static_cast<u32>(taken), now_);
      counters_.add(kBatches);
      if (static_cast<u32>(taken) < kMaxBatch) counters_.add(kPartialBatches);
      for (int i = 0; i < taken; ++i) record(kPosted, writes[i].ticket, window_[writes[i].ticket]);
    }
    if (static_cast<u32>(taken) < offered) {
      counters_.add(kRefusals);
      break;
    }
    if (offered < kMaxBatch || window_.queued(connection) < kMaxBatch) break;
  }
  return is_busy;
}

bool Proxy::progress() noexcept {
  std::array<u64, kTakenARound> tickets;
  const u64 arrivals = counters_.get(kArrivals);
  const int count = transport_->poll(tickets, error_);
  if (count < 0) {
    break_down(error_);
    return true;
  }
  if (flag_writer_.commit != nullptr) {
    if (const i32 status = flag_writer_.commit(flag_writer_.context)) {
      break_down(fail({"flag", transport_->device()}, -status));
      return true;
    }
  }
  for (int i = 0; i < count; ++i) {
    if (!window_.in_flight(tickets[i])) {
      break_down(fail({"poll", transport_->device()}, EPROTO, "a completion of %llu, which is not in flight",
                      static_cast<unsigned long long>(tickets[i])));
      return true;
    }
    const InFlight& entry = window_[tickets[i]];
    counters_.add(kBytesSent, entry.write.bytes);
    record(kCompleted, tickets[i], entry);
    window_.complete(tickets[i]);
  }
  if (count > 0) {
    counters_.add(kCompletions, static_cast<u64>(count));
    ring_.retire_below(window_.retired());
  }
  if (count > 0 || window_.outstanding() == 0) progressed_ns_ = now_;
  return count > 0 || counters_.get(kArrivals) != arrivals;
}

int Proxy::publish(const Arrival& arrival, Error& error) noexcept {
  const u32 slot = arrival.slot;
  const Place place{"publish", transport_->device(), static_cast<i32>(arrival.peer)};
  if (slot >= region_.num_flags) {
    error = fail(place, EPROTO, "flag %u of %u", slot, region_.num_flags);
    return -1;
  }
  std::byte* flag = flag_address(region_.base, region_.flags_offset, slot);
  if (const i32 status = store_flag(flag_writer_, flag, arrival.value)) {
    error = fail(place, status, "flag %u", slot);
    return -1;
  }
  counters_.add(kArrivals);
  if (timeline_.enabled()) timeline_.add({now_ns(), 0, 0, arrival.peer, slot, arrival.value, kArrived});
  return 0;
}

void Proxy::look_at_clock(bool is_busy) noexcept {
  if (window_.outstanding() != 0 && now_ - progressed_ns_ > settings_.timeout_ns) {
    const InFlight& oldest = window_[window_.retired()];
    break_down(fail({"poll", transport_->device(), static_cast<i32>(oldest.peer)}, ETIMEDOUT,
                    "no completion for %.1f s, %llu commands in flight, chunk %u is the oldest",
                    static_cast<double>(settings_.timeout_ns) / 1e9,
                    static_cast<unsigned long long>(window_.outstanding()), oldest.write.slot));
    return;
  }
  if (is_busy) {
    idle_since_ns_ = now_;
    return;
  }
  const u64 idle_ns = now_ - idle_since_ns_;
  if (window_.waiting() == 0 && idle_ns > settings_.idle_spin_ns) {
    const timespec pause{0, kIdleSleepNs};
    nanosleep(&pause, nullptr);
  } else if (idle_ns > kYieldAfterNs) {
    sched_yield();  // where cores are few, whoever has work for us gets one
  }
}

bool Proxy::is_done() noexcept {
  const u64 stop_at_ns = stop_at_ns_.load(std::memory_order_acquire);
  if (stop_at_ns == kNotAskedFor) return false;
  return (window_.outstanding() == 0 && !ring_.ready()) || now_ >= stop_at_ns;
}

void Proxy::break_down(const Error& error) noexcept {
  error_ = error;
  const InFlight nothing{{0, 0, 0, 0, 0, 0}, static_cast<u32>(error.peer), 0, 0, false, false};
  record(kFaulted, 0, nothing);
  faulted_.store(true, std::memory_order_release);
}

void Proxy::record(ProxyEventKind kind, u64 ticket, const InFlight& entry) noexcept {
  if (!timeline_.enabled()) return;
  timeline_.add({now_ns(), ticket, entry.write.bytes, entry.peer, entry.write.slot, entry.write.value,
                 static_cast<u32>(kind) | entry.lane << 8});
}

}  // namespace mk::host
