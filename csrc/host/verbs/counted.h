#pragma once
// Networks without order: writes with an immediate, which the receiver's proxy counts (arrivals.h).
#include "abi/proxy_records.h"
#include "host/transport.h"

namespace mk::host::verbs {

/// SRD's behaviour on any NIC: four reliable connections to each peer, pieces of messages on random ones, after random
/// delays. With kUncounted flags are plain writes among the pieces, which is wrong on purpose.
Made make_unordered(const Setup& setup, EmulatedOrder order);

/// EFA's scalable reliable datagrams: one queue pair for each peer, so that a completion says whose it is.
Made make_srd(const Setup& setup);
/// What this machine lacks for srd; empty where nothing is known to be missing. Opens no device.
std::string missing_for_srd();

}  // namespace mk::host::verbs
