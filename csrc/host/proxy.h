#pragma once
// The proxy: one thread between a command ring and a transport.
#include <atomic>
#include <memory>
#include <thread>

#include "host/in_flight.h"
#include "host/records.h"
#include "host/ring.h"
#include "host/transport.h"

namespace mk::host {

/// What a peer's region allows; from its endpoint.
struct PeerLimits {
  u64 region_bytes = 0;
  u32 num_flags = 0;
  bool known = false;
};

struct ProxySettings {
  u32 rank, world, lanes, max_outstanding, timeline_capacity;
  u64 window_ns, timeout_ns, idle_spin_ns;
};

/// Made and connected by the control thread, which then calls start(). Counters, timeline and fault can be read from
/// any thread at any time.
class Proxy final : public Publisher {
 public:
  Proxy(const ProxySettings& settings, const Region& region, const FlagWriter& flag_writer, CommandRing ring);
  ~Proxy() override;  ///< stops at once what still runs
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  /// Before start(); the transport was made with this proxy as its publisher.
  void use(std::unique_ptr<Transport> transport) noexcept { transport_ = std::move(transport); }
  Transport& transport() noexcept { return *transport_; }
  void set_limits(u32 peer, const PeerLimits& limits) noexcept { limits_[peer] = limits; }

  [[nodiscard]] Error start();
  /// Lets what is in flight end, then ends the thread and closes the transport. Idempotent. An error means that the
  /// deadline came first: with the thread at an end work was dropped, else a callback hangs and everything is leaked.
  [[nodiscard]] Error stop(u64 deadline_ns);

  /// Has it failed? The first failure is in `error`.
  bool fault(Error& error) const noexcept;
  bool stopped() const noexcept { return ended_.load(std::memory_order_acquire); }
  const Counters& counters() const noexcept { return counters_; }
  const Timeline& timeline() const noexcept { return timeline_; }

  int publish(const Arrival& arrival, Error& error) noexcept override;

 private:
  void run() noexcept;
  bool take() noexcept;
  bool submit() noexcept;
  bool submit_queue(u32 connection) noexcept;
  bool progress() noexcept;
  bool check(const Command& command) noexcept;
  void look_at_clock(bool is_busy) noexcept;
  bool is_done() noexcept;
  void break_down(const Error& error) noexcept;
  void record(ProxyEventKind kind, u64 ticket, const InFlight& entry) noexcept;

  const ProxySettings settings_;
  const Region region_;
  const FlagWriter flag_writer_;
  CommandRing ring_;
  std::unique_ptr<Transport> transport_;
  std::vector<PeerLimits> limits_;
  Window window_;
  Counters counters_;
  Timeline timeline_;

  // proxy thread
  u64 now_ = 0;            ///< read once a round
  u64 progressed_ns_ = 0;  ///< last completion, or last moment with nothing in flight
  u64 idle_since_ns_ = 0;
  Error error_;            ///< scratch of this round; error_ of the fault after it

  std::atomic<bool> faulted_{false};
  std::atomic<u64> stop_at_ns_{~u64{0}};  ///< deadline of stop(); all ones: not asked for
  std::atomic<bool> ended_{true};
  std::thread thread_;
};

}  // namespace mk::host
