// The functions of libibverbs that the transports ask for.
#include <cerrno>
#include <cstring>

#include "objects.h"

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

namespace mk::standin {

int post_send(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** refused);
int post_recv(ibv_qp* qp, ibv_recv_wr* first, ibv_recv_wr** refused);
int poll_cq(ibv_cq* cq, int room, ibv_wc* completions);

namespace {

ibv_qp* create_extended(ibv_context* context, ibv_qp_init_attr_ex* attributes) {
  Fabric& fabric = Fabric::get();
  if (attributes->qp_type != IBV_QPT_RC || fabric.devices[context_of(context).device].is_efa) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  return make_queue(attributes->pd, attributes->send_cq, attributes->recv_cq, attributes->cap, false);
}

ibv_mr* add_memory(ibv_pd* domain, u64 base, u64 bytes, int access, const char* kind) {
  Fabric& fabric = Fabric::get();
  auto memory = std::make_unique<Memory>();
  memory->base = base;
  memory->device = context_of(domain->context).device;
  memory->access = access;
  memory->mr.context = domain->context;
  memory->mr.pd = domain;
  memory->mr.length = bytes;  // mr.addr stays null: some providers leave it so
  memory->mr.lkey = memory->mr.rkey = fabric.next_key;
  fabric.next_key += 3;
  fabric.seen.access.push_back(access);
  fabric.seen.registered.emplace_back(kind);
  ++fabric.num_open;
  ibv_mr* mr = &memory->mr;
  fabric.memory.emplace(mr->lkey, std::move(memory));
  return mr;
}

template <class Object>
int drop(Object* object) {
  {
    const std::scoped_lock lock(Fabric::get().mutex);
    --Fabric::get().num_open;
  }
  delete object;
  return 0;
}

}  // namespace

void set_devices(std::vector<Device> devices) {
  const std::scoped_lock lock(Fabric::get().mutex);
  Fabric::get().devices = std::move(devices);
  Fabric::get().refused = nullptr;
  Fabric::get().refused_bytes = 0;
  Fabric::get().seen = {};
}

void change(const std::string& name, const std::function<void(Device&)>& change) {
  const std::scoped_lock lock(Fabric::get().mutex);
  for (Device& device : Fabric::get().devices) {
    if (device.name == name) change(device);
  }
}

void refuse(const void* base, u64 bytes) {
  const std::scoped_lock lock(Fabric::get().mutex);
  Fabric::get().refused = base;
  Fabric::get().refused_bytes = bytes;
}

Seen seen() {
  const std::scoped_lock lock(Fabric::get().mutex);
  return Fabric::get().seen;
}

u64 num_open() {
  const std::scoped_lock lock(Fabric::get().mutex);
  return Fabric::get().num_open;
}

}  // namespace mk::standin

using namespace mk::standin;
using mk::u32;
using mk::u64;

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  const std::size_t size = Fabric::get().devices.size();
  auto** list = new ibv_device*[size + 1]();
  for (std::size_t i = 0; i < size; ++i) {
    list[i] = new ibv_device();
    std::snprintf(list[i]->name, sizeof list[i]->name, "%s", Fabric::get().devices[i].name.c_str());
  }
  if (count != nullptr) *count = static_cast<int>(size);
  return list;
}

void ibv_free_device_list(ibv_device** list) {
  for (ibv_device** one = list; *one != nullptr; ++one) delete *one;
  delete[] list;
}

const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  auto* context = new Context();
  while (fabric.devices[context->device].name != device->name) ++context->device;
  context->verbs.sz = sizeof context->verbs;
  if (fabric.devices[context->device].has_wr_calls) context->verbs.create_qp_ex = create_extended;
  ibv_context& plain = context->verbs.context;
  plain.abi_compat = __VERBS_ABI_IS_EXTENDED;
  plain.ops.post_send = post_send;
  plain.ops.post_recv = post_recv;
  plain.ops.poll_cq = poll_cq;
  fabric.start_wire();
  return &plain;
}

int ibv_close_device(ibv_context* context) {
  Fabric::get().stop_wire();
  delete &context_of(context);
  return 0;
}

int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  const Device& device = Fabric::get().devices[context_of(context).device];
  *attributes = {};
  attributes->vendor_id = device.vendor;
  attributes->max_qp_wr = 4096;
  attributes->max_cqe = 32767;
  attributes->phys_port_cnt = static_cast<uint8_t>(device.ports.size());
  return 0;
}

int ibv_query_port(ibv_context* context, uint8_t number, _compat_ibv_port_attr* given) {
  const Device& device = Fabric::get().devices[context_of(context).device];
  if (number == 0 || number > device.ports.size()) return EINVAL;
  const Port& port = device.ports[number - 1];
  auto* attributes = reinterpret_cast<ibv_port_attr*>(given);
  attributes->state = port.is_active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  attributes->active_mtu = IBV_MTU_4096;
  attributes->gid_tbl_len = static_cast<int>(port.gids.size());
  attributes->max_msg_sz = device.is_efa ? 8192 : device.max_message;
  attributes->link_layer = device.is_efa      ? IBV_LINK_LAYER_UNSPECIFIED
                           : port.is_ethernet ? IBV_LINK_LAYER_ETHERNET
                                              : IBV_LINK_LAYER_INFINIBAND;
  return 0;
}

int _ibv_query_gid_ex(ibv_context* context, u32 port, u32 index, ibv_gid_entry* entry, u32, size_t) {
  const u32 device = context_of(context).device;
  const auto& gids = Fabric::get().devices[device].ports[port - 1].gids;
  if (index >= gids.size() || gids[index].is_empty) return ENODATA;
  *entry = {};
  entry->gid = Fabric::get().gid_of(device, port, index);
  entry->gid_index = index;
  entry->port_num = port;
  entry->gid_type = gids[index].type;
  return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  const std::scoped_lock lock(Fabric::get().mutex);
  ++Fabric::get().num_open;
  return new ibv_pd{context, 0};
}
int ibv_dealloc_pd(ibv_pd* domain) { return drop(domain); }

ibv_mr* ibv_reg_mr(ibv_pd* domain, void* base, size_t bytes, int access) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  const auto first = reinterpret_cast<u64>(base), from = reinterpret_cast<u64>(fabric.refused);
  const int refusal = fabric.devices[context_of(domain->context).device].refuses_memory;
  if (refusal != 0 && first < from + fabric.refused_bytes && from < first + bytes) {
    errno = refusal;
    return nullptr;
  }
  return add_memory(domain, first, bytes, access, "host");
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t, size_t bytes, uint64_t address, int, int access) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  errno = fabric.devices[context_of(domain->context).device].refuses_dmabuf;
  return errno != 0 ? nullptr : add_memory(domain, address, bytes, access, "dma-buf");
}

int ibv_dereg_mr(ibv_mr* mr) {
  const std::scoped_lock lock(Fabric::get().mutex);
  --Fabric::get().num_open;
  Fabric::get().memory.erase(mr->lkey);
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int, void*, ibv_comp_channel*, int) {
  const std::scoped_lock lock(Fabric::get().mutex);
  ++Fabric::get().num_open;
  auto* completions = new Completions();
  completions->cq.context = context;
  return &completions->cq;
}
int ibv_destroy_cq(ibv_cq* cq) { return drop(reinterpret_cast<Completions*>(cq)); }

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  return make_queue(domain, attributes->send_cq, attributes->recv_cq, attributes->cap, false);
}
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* queue) { return &queue_of(queue).extended; }

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  Queue& queue = queue_of(qp);
  const ibv_qp_state next = attributes->qp_state;
  const bool is_next = (queue.state == IBV_QPS_RESET && next == IBV_QPS_INIT) ||
                       (queue.state == IBV_QPS_INIT && next == IBV_QPS_RTR) ||
                       (queue.state == IBV_QPS_RTR && next == IBV_QPS_RTS);
  if ((mask & IBV_QP_STATE) == 0 || !is_next) return EINVAL;
  queue.state = next;
  if (mask & IBV_QP_AV) {
    queue.peer = attributes->ah_attr.grh.dgid;
    const Gid& own = fabric.devices[queue.device].ports[attributes->ah_attr.port_num - 1]
                         .gids.at(attributes->ah_attr.grh.sgid_index);
    if (fabric.devices[queue.device].ports[0].is_ethernet && (own.type != IBV_GID_TYPE_ROCE_V2 || !own.is_ipv4)) {
      return EINVAL;  // the cable of these tests carries RoCE v2 over IPv4
    }
  }
  if (mask & IBV_QP_DEST_QPN) queue.remote_queue = attributes->dest_qp_num;
  if (mask & IBV_QP_RNR_RETRY) queue.not_ready_tries = attributes->rnr_retry;
  if (mask & IBV_QP_QKEY) queue.queue_key = attributes->qkey;
  return 0;
}

int ibv_destroy_qp(ibv_qp* qp) {
  const std::scoped_lock lock(Fabric::get().mutex);
  --Fabric::get().num_open;
  Fabric::get().queues.erase(qp->qp_num);
  return 0;
}

ibv_ah* ibv_create_ah(ibv_pd* domain, ibv_ah_attr* attributes) {
  const std::scoped_lock lock(Fabric::get().mutex);
  ++Fabric::get().num_open;
  auto* handle = new Handle();
  handle->device = context_of(domain->context).device;
  handle->peer = attributes->grh.dgid;
  Fabric::get().handles.push_back(handle);
  return &handle->ah;
}
int ibv_destroy_ah(ibv_ah* ah) {
  auto* handle = reinterpret_cast<Handle*>(ah);
  {
    const std::scoped_lock lock(Fabric::get().mutex);
    std::erase(Fabric::get().handles, handle);
  }
  return drop(handle);
}

const char* ibv_wc_status_str(ibv_wc_status status) {
  return status == IBV_WC_RNR_RETRY_EXC_ERR ? "receiver not ready" : "an error of the stand-in";
}

}
