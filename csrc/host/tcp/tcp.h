#pragma once
// Sockets: works on any network, through host memory. The receiver's proxy writes the payload, then the flag.
#include "host/transport.h"

namespace mk::host {

/// `setup.device` is an interface, or empty: every address is offered and the peer takes the first that answers with
/// the right token. With `setup.bounce` all data goes through it, copied by `setup.copy`; device memory needs that.
Made make_tcp(const Setup& setup);

}  // namespace mk::host
