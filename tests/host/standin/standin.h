#pragma once
// A stand-in for libibverbs and libefa: devices that exist in this process alone, and a thread that is the wire.
//
// It is loaded under the names of the real libraries (the test program links it, dlopen finds it by its name), so the
// transports run as they are. Its devices are strict where real ones are: keys and bounds of registrations, addresses,
// handles of peers both ways, receives for immediates, sizes of requests; and they lose all order where they may.
#include <functional>
#include <string>
#include <vector>

#include "abi/types.h"

namespace mk::standin {

/// A row of a port's table of addresses.
struct Gid {
  u32 type;              ///< ibv_gid_type
  bool is_ipv4;          ///< ::ffff:10.x.y.z, else link-local IPv6
  bool is_empty = false; ///< a hole in the table
};

struct Port {
  bool is_active = true;
  bool is_ethernet = true;
  std::vector<Gid> gids = {{2, true}};  // IBV_GID_TYPE_ROCE_V2 is 2
};

/// What a device is and refuses. Changed by tests before a device is opened, or while it runs.
struct Device {
  std::string name;
  std::vector<Port> ports = {Port{}};
  u32 vendor = 0x02c9;
  bool is_efa = false;
  u32 efa_caps = 1u << 3;        ///< RDMA write
  u32 max_rdma_size = 1u << 20;  ///< EFA
  u32 max_message = 1u << 30;
  bool keeps_order = true;       ///< else writes of a connection take effect in any order
  bool has_wr_calls = true;      ///< ibv_create_qp_ex
  u32 max_inline = 64;
  int refuses_memory = 0;        ///< errno of ibv_reg_mr for memory in `refused`
  int refuses_dmabuf = 95;       ///< errno of ibv_reg_dmabuf_mr
  int refuses_queues = 0;        ///< errno of every call that makes a queue pair
  bool loses_receives = false;   ///< receives are taken and not kept
  bool is_dead = false;          ///< nobody answers at its address
  u32 fails_after = ~0u;         ///< writes that still work before one completes with an error
  bool is_held = false;          ///< its requests stay on the wire
  bool flushes_first = false;    ///< what a failure flushes completes before the failure itself
};

/// What has been seen, over all devices.
struct Seen {
  u64 writes = 0, immediates = 0, bytes = 0, largest = 0;
  u64 overtaken = 0;            ///< writes that took effect before an older one of their queue pair
  u64 doorbells = 0;
  u64 refused = 0;              ///< requests that completed with an error of their own
  u64 not_ready = 0;            ///< immediates that found no receive
  std::vector<int> access;      ///< flags of every registration
  std::vector<std::string> registered;  ///< "host" or "dma-buf", as they came
};

/// Devices of this machine from now on; those before must be closed.
void set_devices(std::vector<Device> devices);
/// Changes a device that is in use.
void change(const std::string& name, const std::function<void(Device&)>& change);
/// Memory that `refuses_memory` speaks of.
void refuse(const void* base, u64 bytes);
Seen seen();
/// Objects that nobody has given back: contexts, domains, registrations, queues, handles.
u64 num_open();

}  // namespace mk::standin
