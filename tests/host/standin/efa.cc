// The functions of libefa, for devices of the stand-in that are EFA's.
#include <infiniband/efadv.h>

#include <cerrno>

#include "objects.h"

using namespace mk::standin;

extern "C" {

int efadv_query_device(ibv_context* context, efadv_device_attr* attributes, uint32_t) {
  const Device& device = Fabric::get().devices[context_of(context).device];
  if (!device.is_efa) return EOPNOTSUPP;
  attributes->max_sq_wr = attributes->max_rq_wr = 4096;
  attributes->device_caps = device.efa_caps;
  attributes->max_rdma_size = device.max_rdma_size;
  return 0;
}

ibv_qp* efadv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* attributes, efadv_qp_init_attr* efa, uint32_t) {
  const Device& device = Fabric::get().devices[context_of(context).device];
  const bool writes = (device.efa_caps & 1u << 3) != 0;
  errno = EOPNOTSUPP;
  if (!device.is_efa || !writes || efa->driver_qp_type != EFADV_QP_DRIVER_TYPE_SRD) return nullptr;
  errno = EINVAL;
  if (attributes->qp_type != IBV_QPT_DRIVER || attributes->cap.max_inline_data != 0) return nullptr;
  return make_queue(attributes->pd, attributes->send_cq, attributes->recv_cq, attributes->cap, true);
}

}
