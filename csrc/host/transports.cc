#include "host/transports.h"

#include <cerrno>

#include "host/emulated/emulated.h"
#include "host/tcp/tcp.h"
#if MK_WITH_VERBS
#include "host/verbs/verbs.h"
#endif

namespace mk::host {

namespace {

Made emulated(const ProxyOptions& options, const Setup& setup) {
  const EmulatedLink link{options.bandwidth_bytes_per_s, options.latency_ns, options.shuffle_ns,
                          static_cast<EmulatedOrder>(options.order)};
  std::vector<std::byte*> bases;
  if (options.peer_bases != 0) {
    const auto* first = reinterpret_cast<std::byte* const*>(options.peer_bases);
    bases.assign(first, first + options.world);
  }
  return make_emulated(setup, link, std::move(bases));
}

}  // namespace

Made make_transport(const ProxyOptions& options, const Setup& setup) {
  const auto kind = static_cast<TransportKind>(options.transport);
  if (kind == kEmulated) return emulated(options, setup);
  if (kind == kTcp) return make_tcp(setup);
#if MK_WITH_VERBS
  if (kind < kNumTransports) return make_verbs(kind, setup, static_cast<EmulatedOrder>(options.order));
#endif
  const std::string missing = missing_for(kind);
  return {nullptr, fail({"transport"}, ENOTSUP, "%s", missing.c_str())};
}

std::string missing_for(TransportKind kind) {
  if (kind == kEmulated || kind == kTcp) return {};
  if (kind >= kNumTransports) return "no such transport";
#if MK_WITH_VERBS
  return missing_for_verbs(kind);
#else
  return "built without infiniband/verbs.h or verbs transports (apt-get install libibverbs-dev, reinstall mkcompile)";
#endif
}

}  // namespace mk::host
