#pragma once
// libibverbs, loaded at run time: the same build works on machines that have none. Only public, versioned symbols.
#include <infiniband/verbs.h>

#include "host/error.h"

namespace mk::host::verbs {

/// Functions of libibverbs under the names that it gives them, without "ibv_". What verbs.h defines inline (post, poll,
/// ibv_wr_*) goes through the device's own table and needs no symbol.
struct Library {
  decltype(&ibv_get_device_list) get_device_list;
  decltype(&ibv_free_device_list) free_device_list;
  decltype(&ibv_get_device_name) get_device_name;
  decltype(&ibv_open_device) open_device;
  decltype(&ibv_close_device) close_device;
  decltype(&ibv_query_device) query_device;
  int (*query_port)(ibv_context*, u8, ibv_port_attr*);
  decltype(&_ibv_query_gid_ex) query_gid_ex;
  decltype(&ibv_alloc_pd) alloc_pd;
  decltype(&ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  decltype(&ibv_reg_dmabuf_mr) reg_dmabuf_mr;  ///< null before rdma-core 34
  decltype(&ibv_dereg_mr) dereg_mr;
  decltype(&ibv_create_cq) create_cq;
  decltype(&ibv_destroy_cq) destroy_cq;
  decltype(&ibv_create_qp) create_qp;
  decltype(&ibv_qp_to_qp_ex) qp_to_qp_ex;
  decltype(&ibv_modify_qp) modify_qp;
  decltype(&ibv_destroy_qp) destroy_qp;
  decltype(&ibv_create_ah) create_ah;
  decltype(&ibv_destroy_ah) destroy_ah;
  decltype(&ibv_wc_status_str) wc_status_str;
};

/// The library, loaded once and kept. Null and `error` where it is missing or too old.
const Library* library(Error& error);

}  // namespace mk::host::verbs
