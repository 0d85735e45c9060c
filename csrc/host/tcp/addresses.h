#pragma once
// Which addresses of this machine a peer can try, and the machine's name for itself.
#include <string>
#include <vector>

#include "host/error.h"
#include "host/tcp/wire.h"

namespace mk::host::tcp {

/// Addresses of interfaces that are up, the fastest first, IPv4 before IPv6; loopback and link-local ones are left out.
/// With `interface` only its own, of any kind. Error where that has none.
Error local_addresses(const std::string& interface, std::vector<Address>& addresses);

/// A number for this machine, since its boot, and this network namespace.
u64 host_number();

/// Name of the interface that has this address; empty where none has.
std::string interface_of(const Address& address);

}  // namespace mk::host::tcp
