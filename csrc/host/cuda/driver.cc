#include "host/cuda/driver.h"

#include <dlfcn.h>

#include <cerrno>

namespace mk::host::cuda {

namespace {

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

Error load_driver(Driver& driver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);  // stays loaded: torch has it too
  if (library == nullptr) return fail({"dlopen"}, ENODEV, "%s", dlerror());
  const bool all = find(library, "cuInit", driver.init) && find(library, "cuDevicePrimaryCtxRetain", driver.retain) &&
                   find(library, "cuDevicePrimaryCtxRelease_v2", driver.release) &&
                   find(library, "cuCtxSetCurrent", driver.set_current) &&
                   find(library, "cuCtxPushCurrent_v2", driver.push) &&
                   find(library, "cuCtxPopCurrent_v2", driver.pop) &&
                   find(library, "cuStreamCreateWithPriority", driver.create_stream) &&
                   find(library, "cuStreamDestroy_v2", driver.destroy_stream) &&
                   find(library, "cuEventCreate", driver.create_event) &&
                   find(library, "cuEventDestroy_v2", driver.destroy_event) &&
                   find(library, "cuEventRecord", driver.record) && find(library, "cuEventQuery", driver.query) &&
                   find(library, "cuMemcpyAsync", driver.copy) &&
                   find(library, "cuStreamBatchMemOp_v2", driver.batch) &&
                   find(library, "cuFlushGPUDirectRDMAWrites", driver.flush) &&
                   find(library, "cuDeviceGetAttribute", driver.attribute) &&
                   find(library, "cuMemHostRegister_v2", driver.pin) &&
                   find(library, "cuMemHostUnregister", driver.unpin) &&
                   find(library, "cuMemGetAddressRange_v2", driver.range);
  find(library, "cuMemGetHandleForAddressRange", driver.handle);
  if (!all) return fail({"dlsym", "libcuda.so.1"}, ENOSYS, "the driver is too old");
  if (const Result result = driver.init(0)) return fail({"cuInit"}, ENODEV, "CUDA error %d", result);
  return {};
}

}  // namespace mk::host::cuda
