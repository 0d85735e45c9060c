#pragma once
// Ordered: data writes, then the flag write, on one reliable connection. The receiver's proxy does nothing.
#include "host/transport.h"

namespace mk::host::verbs {

/// `setup.lanes` reliable connections to each peer.
Made make_rc(const Setup& setup);

}  // namespace mk::host::verbs
