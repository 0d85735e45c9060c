#include "host/verbs/link.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mk::host::verbs {

namespace {

constexpr u32 kWantedInlineBytes = 16;
constexpr u8 kHopLimit = 64;
// 4.096 us * 2^16 = 268 ms a try, which NICs may make four of: two to eight seconds until a lost peer is a lost peer.
// A switch that fails over, or a starved machine, is back by then. Not 7 tries: Soft-RoCE takes 7 for "without end"
constexpr u8 kTimeout = 16, kTries = 6;
constexpr u8 kTriesNotReady = 7;  // without end: a receiver that is behind is no failure; the proxy's limit bounds it
constexpr u8 kNotReadyTimer = 1;  // 10 us

ibv_qp* create(Device& device, const LinkShape& shape, Link& link, u32 inline_bytes) {
  ibv_qp_init_attr_ex attributes{};
  attributes.send_cq = shape.sent;
  attributes.recv_cq = shape.received;
  attributes.qp_type = IBV_QPT_RC;
  attributes.pd = device.domain();
  attributes.cap = {shape.send_depth, shape.receive_depth, 1, 1, inline_bytes};
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attributes.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  verbs_context* extended = verbs_get_ctx_op(device.context(), create_qp_ex);
  errno = ENOTSUP;
  ibv_qp* queue = extended == nullptr ? nullptr : extended->create_qp_ex(device.context(), &attributes);
  if (queue != nullptr) link.inline_bytes = attributes.cap.max_inline_data;
  return queue;
}

/// For providers that know no ibv_wr_*.
ibv_qp* create_plain(Device& device, const LinkShape& shape, Link& link, u32 inline_bytes) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = shape.sent;
  attributes.recv_cq = shape.received;
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {shape.send_depth, shape.receive_depth, 1, 1, inline_bytes};
  ibv_qp* queue = device.functions().create_qp(device.domain(), &attributes);
  if (queue != nullptr) link.inline_bytes = attributes.cap.max_inline_data;
  return queue;
}

Error modify(Device& device, Link& link, ibv_qp_attr attributes, int mask, const char* step) {
  const int status = device.functions().modify_qp(link.queue.get(), &attributes, mask);
  if (status == 0) return {};
  return fail({"ibv_modify_qp", device.name(), static_cast<i32>(link.peer)}, status, "%s", step);
}

ibv_qp_attr ready_to_receive(Device& device, const Endpoint& endpoint, const Link& link) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min<u32>(endpoint.mtu, device.port().active_mtu));
  attributes.dest_qp_num = link.remote_queue;
  attributes.max_dest_rd_atomic = 1;  // the region may be read, as far as its registration goes
  attributes.min_rnr_timer = kNotReadyTimer;
  ibv_ah_attr& path = attributes.ah_attr;
  path.is_global = 1;
  std::memcpy(path.grh.dgid.raw, endpoint.gid, sizeof endpoint.gid);
  path.grh.sgid_index = device.gid_index();
  path.grh.hop_limit = kHopLimit;
  path.dlid = endpoint.lid;
  path.port_num = device.port_number();
  return attributes;
}

}  // namespace

Error make_rc_link(Device& device, const LinkShape& shape, Link& link) {
  ibv_qp* queue = create(device, shape, link, kWantedInlineBytes);
  if (queue == nullptr) queue = create(device, shape, link, 0);  // a provider without inline writes
  const bool is_extended = queue != nullptr;
  if (queue == nullptr) queue = create_plain(device, shape, link, kWantedInlineBytes);
  if (queue == nullptr) queue = create_plain(device, shape, link, 0);
  if (queue == nullptr) {
    return fail({"ibv_create_qp", device.name(), static_cast<i32>(link.peer)}, errno, "%u requests deep",
                shape.send_depth);
  }
  link.queue = {queue, device.functions().destroy_qp};
  link.extended = is_extended ? device.functions().qp_to_qp_ex(queue) : nullptr;
  link.room = shape.send_depth;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device.port_number();
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  return modify(device, link, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
                "to INIT");
}

Error connect_rc_link(Device& device, const Endpoint& endpoint, u32 number, Link& link) {
  link.remote_queue = endpoint.queue_numbers[number];
  ibv_qp_attr attributes = ready_to_receive(device, endpoint, link);
  constexpr int kReceiveMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  if (Error error = modify(device, link, attributes, kReceiveMask, "to RTR")) return error;
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = kTimeout;
  attributes.retry_cnt = kTries;
  attributes.rnr_retry = kTriesNotReady;
  constexpr int kSendMask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                            IBV_QP_MAX_QP_RD_ATOMIC;
  return modify(device, link, attributes, kSendMask, "to RTS");
}

int post_receives(Link& link, u64 id, u32 count) noexcept {
  ibv_recv_wr request{};
  ibv_recv_wr* refused = nullptr;
  request.wr_id = id;
  for (u32 i = 0; i < count; ++i) {
    if (const int status = ibv_post_recv(link.queue.get(), &request, &refused)) return status;
  }
  return 0;
}

}  // namespace mk::host::verbs
