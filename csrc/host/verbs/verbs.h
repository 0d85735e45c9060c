#pragma once
// The transports over libibverbs: rc, unordered and srd. Compiled where infiniband/verbs.h was found.
#include <string>

#include "abi/proxy_records.h"
#include "host/transport.h"

namespace mk::host {

/// `kind` is kRc, kUnordered or kSrd. libibverbs and libefa are loaded here, at run time. `order` kUncounted makes
/// `unordered` a negative control.
Made make_verbs(TransportKind kind, const Setup& setup, EmulatedOrder order);

/// What this machine lacks (libraries, a device, a capability); empty where nothing is known to be missing.
std::string missing_for_verbs(TransportKind kind);

}  // namespace mk::host
