// The transport srd. Compiled against any rdma-core from 34 on: what younger headers add is declared here, and asked
// of the device. It has run on no EFA device, but on a stand-in of one (tests/host/standin).
#if MK_WITH_EFA
#include <dlfcn.h>
#include <infiniband/efadv.h>

#include <cerrno>
#include <cstring>

#include "host/verbs/counted.h"
#include "host/verbs/counted_transport.h"

namespace mk::host::verbs {

namespace {

constexpr u32 kCapsRdmaWrite = 1u << 3;  // EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE, from rdma-core 46

struct EfaLibrary {
  decltype(&efadv_query_device) query_device = nullptr;
  decltype(&efadv_create_qp_ex) create_qp_ex = nullptr;
  explicit operator bool() const noexcept { return query_device != nullptr && create_qp_ex != nullptr; }
};

const EfaLibrary& efa_library() {
  static const EfaLibrary loaded = [] {
    EfaLibrary functions;
    void* handle = dlopen("libefa.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) return functions;
    functions.query_device = reinterpret_cast<decltype(&efadv_query_device)>(dlsym(handle, "efadv_query_device"));
    functions.create_qp_ex = reinterpret_cast<decltype(&efadv_create_qp_ex)>(dlsym(handle, "efadv_create_qp_ex"));
    return functions;
  }();
  return loaded;
}

class Srd final : public Counted {
 public:
  explicit Srd(const Setup& setup) : Counted(setup, 1, kInOrder) {}
  /// After open(): is it an EFA device that can write?
  Error look();

 private:
  Error make_link(const LinkShape& shape, Link& link) override;
  Error connect_link(const Endpoint& endpoint, u32 number, Link& link) override;
  Error to_ready(Link& link);
};

Error Srd::look() {
  efadv_device_attr attributes{};
  if (const int status = efa_library().query_device(device_.context(), &attributes, sizeof attributes)) {
    return fail({"efadv_query_device", device()}, ENODEV, "not an EFA device: %s", strerrordesc_np(status));
  }
  if ((attributes.device_caps & kCapsRdmaWrite) == 0) {
    return fail({"efadv_query_device", device()}, ENOTSUP, "no RDMA write (needs rdma-core 46 and a device that can)");
  }
  most_bytes_ = attributes.max_rdma_size;  // the port's max_msg_sz is that of sends, a packet
  if (most_bytes_ == 0) return fail({"efadv_query_device", device()}, ENOTSUP, "max_rdma_size is 0");
  return {};
}

Error Srd::make_link(const LinkShape& shape, Link& link) {
  ibv_qp_init_attr_ex attributes{};
  attributes.send_cq = shape.sent;
  attributes.recv_cq = shape.received;
  attributes.pd = device_.domain();
  attributes.qp_type = IBV_QPT_DRIVER;
  attributes.cap = {shape.send_depth, shape.receive_depth, 1, 1, 0};
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attributes.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  efadv_qp_init_attr efa{};
  efa.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
  ibv_qp* queue = efa_library().create_qp_ex(device_.context(), &attributes, &efa, sizeof efa);
  if (queue == nullptr) {
    return fail({"efadv_create_qp_ex", device(), static_cast<i32>(link.peer)}, errno, "SRD with RDMA write");
  }
  link.queue = {queue, device_.functions().destroy_qp};
  link.extended = device_.functions().qp_to_qp_ex(queue);
  link.room = shape.send_depth;
  return to_ready(link);
}

/// No peer in any state: each request names its own.
Error Srd::to_ready(Link& link) {
  const auto modify = device_.functions().modify_qp;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_.port_number();
  attributes.qkey = kQueueKey;
  int status = modify(link.queue.get(), &attributes,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  attributes = {};
  attributes.qp_state = IBV_QPS_RTR;
  if (status == 0) status = modify(link.queue.get(), &attributes, IBV_QP_STATE);
  attributes.qp_state = IBV_QPS_RTS;
  if (status == 0) status = modify(link.queue.get(), &attributes, IBV_QP_STATE | IBV_QP_SQ_PSN);
  if (status == 0) return {};
  return fail({"ibv_modify_qp", device(), static_cast<i32>(link.peer)}, status, "SRD");
}

/// The receiver needs an address handle of the sender too; both ranks connect, so both have one.
Error Srd::connect_link(const Endpoint& endpoint, u32 number, Link& link) {
  ibv_ah_attr attributes{};
  attributes.is_global = 1;
  attributes.port_num = device_.port_number();
  attributes.grh.sgid_index = device_.gid_index();
  std::memcpy(attributes.grh.dgid.raw, endpoint.gid, sizeof endpoint.gid);
  link.remote_queue = endpoint.queue_numbers[number];
  link.address = {device_.functions().create_ah(device_.domain(), &attributes), device_.functions().destroy_ah};
  if (link.address) return {};
  return fail({"ibv_create_ah", device(), static_cast<i32>(link.peer)}, errno);
}

}  // namespace

Made make_srd(const Setup& setup) {
  const std::string missing = missing_for_srd();
  if (!missing.empty()) return {nullptr, fail({"dlopen", "efa"}, ENOTSUP, "%s", missing.c_str())};
  auto transport = std::make_unique<Srd>(setup);
  if (Error error = transport->open()) return {nullptr, error};
  if (Error error = transport->look()) return {nullptr, error};
  return {std::move(transport), {}};
}

std::string missing_for_srd() {
  return efa_library() ? std::string() : "no libefa.so.1 with efadv_create_qp_ex (apt-get install ibverbs-providers)";
}

}  // namespace mk::host::verbs
#endif
