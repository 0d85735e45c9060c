#pragma once
// One port of one NIC: opened, with its protection domain, its address, and its limits; memory and queues made on it.
#include <memory>
#include <string>

#include "host/transport.h"
#include "host/verbs/library.h"

namespace mk::host::verbs {

/// Gives a verbs object back through the library's function for it.
template <class Object>
using Owned = std::unique_ptr<Object, int (*)(Object*)>;

class Device {
 public:
  /// The NIC called `wanted` ("mlx5_0", or "mlx5_0/2" for its second port), or the first with an active port where it
  /// is empty. Waits until `deadline_ns` for the port's address: the kernel enters it a moment after the link is up.
  Error open(const std::string& wanted, u64 deadline_ns);

  const Library& functions() const noexcept { return *functions_; }
  ibv_context* context() const noexcept { return context_.get(); }
  ibv_pd* domain() const noexcept { return domain_.get(); }
  const char* name() const noexcept { return name_; }
  const ibv_device_attr& limits() const noexcept { return limits_; }
  const ibv_port_attr& port() const noexcept { return port_; }
  u8 port_number() const noexcept { return port_number_; }
  /// Do writes of one reliable connection get into memory in their order? The specification promises it for completions
  /// alone; these are the makers whose devices are known for it.
  bool keeps_write_order() const noexcept;
  /// Asks the device again.
  bool is_port_down() const noexcept;
  u8 gid_index() const noexcept { return gid_index_; }
  const ibv_gid& gid() const noexcept { return gid_; }

  /// How the chain ended is in `way`. Access never includes relaxed ordering: flags follow their data.
  Error add_region(const Region& region, Registration& way, ibv_mr*& memory);
  /// Plain host memory that peers may write.
  Error add_host(void* base, u64 bytes, ibv_mr*& memory);
  Error add_queue(u64 entries, ibv_cq*& queue);

  /// Releases everything, in reverse. Queue pairs must be gone.
  void close() noexcept;

 private:
  Error choose(const std::string& wanted, u64 deadline_ns);
  Error open_one(ibv_device* device, u32 wanted_port);
  Error find_port(u32 wanted, const char* name);
  Error find_address(u64 deadline_ns);
  bool look_for_address() noexcept;

  const Library* functions_ = nullptr;
  Owned<ibv_context> context_{nullptr, nullptr};
  Owned<ibv_pd> domain_{nullptr, nullptr};
  std::vector<Owned<ibv_mr>> memory_;
  std::vector<Owned<ibv_cq>> queues_;
  ibv_device_attr limits_{};
  ibv_port_attr port_{};
  ibv_gid gid_{};
  u8 gid_index_ = 0, port_number_ = 1;
  char name_[40] = "verbs";
};

/// What a completion with an error means, as an errno value.
i32 errno_of(ibv_wc_status status) noexcept;

}  // namespace mk::host::verbs
