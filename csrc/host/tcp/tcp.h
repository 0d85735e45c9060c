#pragma once
// Sockets: works on any network, through host memory. The receiver's proxy writes the payload, then the flag.
#include "host/transport.h"

namespace mk::host {

/// `setup.device` is an interface, or empty: every address is offered and the peer takes the first that answers with
/// the right token. A region in device memory needs `setup.bounce` and `setup.copy`.
Made make_tcp(const Setup& setup);

}  // namespace mk::host
