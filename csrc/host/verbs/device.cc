#include "host/verbs/device.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iterator>

#include "host/wait.h"

namespace mk::host::verbs {

namespace {

// OUIs of NVIDIA (Mellanox) and of Soft-RoCE, which copies packet by packet.
constexpr u32 kOrderlyVendors[] = {0x02c9, 0xffffff};

// Never IBV_ACCESS_RELAXED_ORDERING: flags follow their data.
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

i32 last_errno() noexcept { return errno != 0 ? errno : EIO; }

/// An IPv4 address as a GID: ::ffff:a.b.c.d.
bool is_mapped_ipv4(const ibv_gid& gid) noexcept {
  static constexpr u8 kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

/// The port in "mlx5_0/2", 0 where none is named; false where what is named is no port's number.
bool read_port(const std::string& wanted, u32& port) noexcept {
  const std::size_t slash = wanted.find('/');
  port = 0;
  if (slash == std::string::npos) return true;
  const char *first = wanted.data() + slash + 1, *last = wanted.data() + wanted.size();
  const auto [end, failure] = std::from_chars(first, last, port);
  return failure == std::errc{} && end == last && port != 0;
}

}  // namespace

Error Device::open(const std::string& wanted, u64 deadline_ns) {
  Error error;
  functions_ = library(error);
  if (error) return error;
  if (Error failed = choose(wanted, deadline_ns)) return failed;
  domain_ = {functions_->alloc_pd(context()), functions_->dealloc_pd};
  if (!domain_) return fail({"ibv_alloc_pd", name_}, last_errno());
  return {};
}

bool Device::keeps_write_order() const noexcept {
  return std::find(std::begin(kOrderlyVendors), std::end(kOrderlyVendors), limits_.vendor_id) !=
         std::end(kOrderlyVendors);
}

bool Device::is_port_down() const noexcept {
  ibv_port_attr port{};
  return functions_->query_port(context(), port_number(), &port) == 0 && port.state != IBV_PORT_ACTIVE;
}

Error Device::choose(const std::string& wanted, u64 deadline_ns) {
  const std::string nic = wanted.substr(0, wanted.find('/'));
  u32 port = 0;
  const bool is_name = read_port(wanted, port);
  int count = 0;
  ibv_device** list = functions_->get_device_list(&count);  // null with ENOSYS: no RDMA in this kernel
  const auto release = [this](ibv_device** all) { functions_->free_device_list(all); };
  const std::unique_ptr<ibv_device*, decltype(release)> owner(list, release);
  std::string present;
  for (int i = 0; list != nullptr && i < count; ++i) {
    present += (present.empty() ? "; there are " : ", ") + std::string(functions_->get_device_name(list[i]));
  }
  const char* why = !is_name ? "what follows the / is no port's number" : "no RDMA device of this name";
  if (present.empty()) why = "this machine has no RDMA device";
  Error error = fail({"ibv_get_device_list", wanted.c_str()}, ENODEV, "%s%s", why, present.c_str());
  for (int i = 0; is_name && list != nullptr && i < count; ++i) {
    if (!wanted.empty() && nic != functions_->get_device_name(list[i])) continue;
    error = open_one(list[i], port);
    if (!error) error = find_address(deadline_ns);
    if (!error) return {};
  }
  context_.reset();
  return error;
}

Error Device::open_one(ibv_device* device, u32 wanted_port) {
  std::snprintf(name_, sizeof name_, "%.30s", functions_->get_device_name(device));
  context_ = {functions_->open_device(device), functions_->close_device};
  if (!context_) return fail({"ibv_open_device", name_}, last_errno());
  if (const int status = functions_->query_device(context(), &limits_)) {
    return fail({"ibv_query_device", name_}, status);
  }
  return find_port(wanted_port, functions_->get_device_name(device));
}

/// The first port that is active, or the wanted one.
Error Device::find_port(u32 wanted, const char* name) {
  Error error = fail({"ibv_query_port", name_}, ENODEV, "it has %u ports", limits_.phys_port_cnt);
  for (u32 number = 1; number <= limits_.phys_port_cnt; ++number) {
    if (wanted != 0 && wanted != number) continue;
    std::snprintf(name_, sizeof name_, "%.30s/%u", name, number);
    port_ = {};
    port_number_ = static_cast<u8>(number);
    if (const int status = functions_->query_port(context(), port_number_, &port_)) {
      return fail({"ibv_query_port", name_}, status);
    }
    if (port_.state == IBV_PORT_ACTIVE) return {};
    error = fail({"ibv_query_port", name_}, ENODEV, "the port is not active");
  }
  return error;
}

/// RoCE: version 2 with an IPv4 address, whatever its index. Other links have one kind only.
bool Device::look_for_address() noexcept {
  const bool is_roce = port_.link_layer == IBV_LINK_LAYER_ETHERNET;
  for (u32 index = 0; index < static_cast<u32>(port_.gid_tbl_len); ++index) {
    ibv_gid_entry entry{};
    if (functions_->query_gid_ex(context(), port_number(), index, &entry, 0, sizeof entry) != 0) continue;
    const bool fits = !is_roce || (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && is_mapped_ipv4(entry.gid));
    if (!fits) continue;
    gid_ = entry.gid;
    gid_index_ = static_cast<u8>(index);
    return true;
  }
  return false;
}

Error Device::find_address(u64 deadline_ns) {
  if (wait_bounded(deadline_ns, [this] { return look_for_address(); }, [] { return false; }) != 0) {
    return fail({"ibv_query_gid_ex", name_}, ENODEV, "no RoCE v2 address with IPv4: has the interface one?");
  }
  const std::size_t used = std::strlen(name_);
  std::snprintf(name_ + used, sizeof name_ - used, " gid %u", gid_index_);
  return {};
}

Error Device::add_host(void* base, u64 bytes, ibv_mr*& memory) {
  memory = functions_->reg_mr(domain(), base, bytes, kAccess);
  if (memory == nullptr) {
    return fail({"ibv_reg_mr", name_}, last_errno(), "%llu bytes", static_cast<unsigned long long>(bytes));
  }
  memory_.emplace_back(memory, functions_->dereg_mr);
  return {};
}

/// dma-buf, then whatever lets ibv_reg_mr take the pointer (host memory always; device memory with nvidia-peermem).
Error Device::add_region(const Region& region, Registration& way, ibv_mr*& memory) {
  const char* dmabuf = "not exported";
  if (region.dmabuf >= 0 && functions_->reg_dmabuf_mr == nullptr) dmabuf = "libibverbs is too old";
  if (region.dmabuf >= 0 && functions_->reg_dmabuf_mr != nullptr) {
    const u64 address = reinterpret_cast<u64>(region.base);
    memory = functions_->reg_dmabuf_mr(domain(), region.dmabuf_offset, region.bytes, address, region.dmabuf, kAccess);
    if (memory != nullptr) {
      memory_.emplace_back(memory, functions_->dereg_mr);
      way = Registration::kDmaBuf;
      return {};
    }
    dmabuf = strerrordesc_np(last_errno());
  }
  Error error = add_host(region.base, region.bytes, memory);
  way = region.kind == MemoryKind::kHost ? Registration::kHost : Registration::kPeerMem;
  if (!error) return {};
  way = Registration::kRefused;
  if (region.kind == MemoryKind::kHost) return error;
  return fail({"ibv_reg_mr", name_}, error.number, "dma-buf: %s; nvidia-peermem: %s", dmabuf,
              strerrordesc_np(error.number));
}

Error Device::add_queue(u64 entries, ibv_cq*& queue) {
  const u64 size = std::min<u64>(entries, static_cast<u64>(limits_.max_cqe));
  queue = functions_->create_cq(context(), static_cast<int>(size), nullptr, nullptr, 0);
  if (queue == nullptr) return fail({"ibv_create_cq", name_}, last_errno());
  queues_.emplace_back(queue, functions_->destroy_cq);
  return {};
}

void Device::close() noexcept {
  queues_.clear();
  memory_.clear();
  domain_.reset();
  context_.reset();
}

i32 errno_of(ibv_wc_status status) noexcept {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR: return ETIMEDOUT;  // nobody answers: process, machine or link is gone
    case IBV_WC_RNR_RETRY_EXC_ERR: return ENOBUFS;
    case IBV_WC_REM_ACCESS_ERR: return EACCES;
    case IBV_WC_REM_INV_REQ_ERR: return EINVAL;
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_ABORT_ERR: return ECONNABORTED;
    case IBV_WC_WR_FLUSH_ERR: return ECONNRESET;
    case IBV_WC_LOC_PROT_ERR: return EFAULT;
    case IBV_WC_LOC_LEN_ERR: return EMSGSIZE;
    default: return EIO;
  }
}

}  // namespace mk::host::verbs
