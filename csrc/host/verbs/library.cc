#include "host/verbs/library.h"

#include <dlfcn.h>

#include <cerrno>

namespace mk::host::verbs {

namespace {

struct Loaded {
  Library functions{};
  Error error;
};

Loaded load() {
  Loaded loaded;
  void* handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL);  // never closed: providers keep pointers into it
  if (handle == nullptr) {
    loaded.error = fail({"dlopen"}, ENODEV, "no libibverbs.so.1 (apt-get install ibverbs-providers)");
    return loaded;
  }
  const auto bind = [&](auto& function, const char* name, bool is_needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr && is_needed) loaded.error = fail({"dlsym"}, ENOTSUP, "libibverbs has no %s", name);
  };
  Library& f = loaded.functions;
  bind(f.get_device_list, "ibv_get_device_list");
  bind(f.free_device_list, "ibv_free_device_list");
  bind(f.get_device_name, "ibv_get_device_name");
  bind(f.open_device, "ibv_open_device");
  bind(f.close_device, "ibv_close_device");
  bind(f.query_device, "ibv_query_device");
  bind(f.query_port, "ibv_query_port");
  bind(f.query_gid_ex, "_ibv_query_gid_ex");
  bind(f.alloc_pd, "ibv_alloc_pd");
  bind(f.dealloc_pd, "ibv_dealloc_pd");
  bind(f.reg_mr, "ibv_reg_mr");
  bind(f.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", false);
  bind(f.dereg_mr, "ibv_dereg_mr");
  bind(f.create_cq, "ibv_create_cq");
  bind(f.destroy_cq, "ibv_destroy_cq");
  bind(f.create_qp, "ibv_create_qp");
  bind(f.qp_to_qp_ex, "ibv_qp_to_qp_ex");
  bind(f.modify_qp, "ibv_modify_qp");
  bind(f.destroy_qp, "ibv_destroy_qp");
  bind(f.create_ah, "ibv_create_ah");
  bind(f.destroy_ah, "ibv_destroy_ah");
  bind(f.wc_status_str, "ibv_wc_status_str");
  return loaded;
}

}  // namespace

const Library* library(Error& error) {
  static const Loaded loaded = load();
  error = loaded.error;
  return error ? nullptr : &loaded.functions;
}

}  // namespace mk::host::verbs
