#pragma once
// One proxy with all that it owns: ring memory, transport, and what its peers told. The C interface is made of it.
#include <memory>
#include <span>

#include "abi/proxy_records.h"
#include "host/proxy.h"

namespace mk::host {

class Session {
 public:
  /// Opens the device and registers the region. Null and `error` where that fails.
  static std::unique_ptr<Session> open(const ProxyOptions& options, Error& error);

  /// What `peer` has to be given: our region's limits, then the transport's part.
  Error endpoint(u32 peer, std::vector<u8>& blob);
  Error connect(u32 peer, std::span<const u8> blob);
  Error finish(u64 deadline_ns) { return proxy_->transport().finish(deadline_ns); }

  Proxy& proxy() noexcept { return *proxy_; }
  HostProducer& producer() noexcept { return *producer_; }
  RingControl* control() noexcept { return control_; }
  Command* slots() noexcept { return slots_; }

  /// Waits until own flag `slot` has reached `value` (by signed difference); `seen` is what it holds.
  /// 0; EPIPE where the proxy has stopped; ETIMEDOUT; EINVAL where there is no such flag.
  int wait_flag(u32 slot, u32 value, u64 deadline_ns, u32& seen) const noexcept;

 private:
  explicit Session(const ProxyOptions& options) : options_(options) {}
  Error make();
  Error check_options() const;
  void place_ring();

  const ProxyOptions options_;
  Region region_;
  std::unique_ptr<std::byte[]> ring_memory_;
  RingControl* control_ = nullptr;
  Command* slots_ = nullptr;
  std::unique_ptr<HostProducer> producer_;
  std::unique_ptr<Proxy> proxy_;
};

}  // namespace mk::host
