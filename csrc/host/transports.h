#pragma once
// Every transport by its kind.
#include <string>

#include "abi/proxy_records.h"
#include "host/transport.h"

namespace mk::host {

/// Error ENOTSUP where this build has no such transport.
Made make_transport(const ProxyOptions& options, const Setup& setup);

/// Why this build or machine can't make one; empty where nothing is known to be missing. Opens no device.
std::string missing_for(TransportKind kind);

}  // namespace mk::host
