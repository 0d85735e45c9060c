#include "host/verbs/verbs.h"

#include <cerrno>

#include "host/verbs/counted.h"
#include "host/verbs/library.h"
#include "host/verbs/rc.h"

namespace mk::host {

Made make_verbs(TransportKind kind, const Setup& setup, EmulatedOrder order) {
  if (kind == kRc) return verbs::make_rc(setup);
  if (kind == kUnordered) return verbs::make_unordered(setup, order);
#if MK_WITH_EFA
  return verbs::make_srd(setup);
#else
  return {nullptr, fail({"transport"}, ENOTSUP, "%s", missing_for_verbs(kind).c_str())};
#endif
}

std::string missing_for_verbs(TransportKind kind) {
  Error error;
  const verbs::Library* library = verbs::library(error);
  if (library == nullptr) return error.detail;
  int count = 0;
  ibv_device** list = library->get_device_list(&count);
  if (list != nullptr) library->free_device_list(list);
  if (list == nullptr || count == 0) return "this machine has no RDMA device";
  if (kind != kSrd) return {};
#if MK_WITH_EFA
  return verbs::missing_for_srd();
#else
  return "built without infiniband/efadv.h";
#endif
}

}  // namespace mk::host
