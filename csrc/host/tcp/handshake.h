#pragma once
// From endpoints to connected sockets: the higher rank dials, the lower one answers, both show tokens.
#include <string>
#include <vector>

#include "host/error.h"
#include "host/tcp/socket.h"
#include "host/tcp/wire.h"

namespace mk::host::tcp {

/// Who is to be connected.
struct Party {
  u32 rank;
  u32 world;
  u32 lanes;
  u64 host;                          ///< host_number()
  std::vector<Token> tokens;         ///< [peer] what that peer has to show
  std::vector<Endpoint> endpoints;   ///< [peer] what it told us
  std::vector<u8> connected;         ///< [peer] 1 where the peer takes part; not ourselves
};

/// A listening socket on all addresses and a port that the kernel chose.
Error listen_anywhere(Socket& listener, u32& port);

/// Connects every lane of every peer, both directions at once. Connections that show no good token are dropped, however
/// many come; `strangers` counts them. `sockets` is [peer * lanes + lane], non-blocking.
Error shake_hands(const Party& party, const Socket& listener, u64 deadline_ns, std::vector<Socket>& sockets,
                  u32& strangers);

}  // namespace mk::host::tcp
