#pragma once
// A network inside one host: copies into the peer's region as this process sees it, at the pace of a virtual link.
//
// Each rank has one link. A message holds it for bytes / bandwidth and arrives a latency later; its flag is stored when
// that time has come and the copy is done, whichever is later, so a clock and not the copy sets the pace. Copies start
// at once where a CopyEngine is given (their source is stable until completion), else they are made when they are due.
#include "abi/proxy_records.h"
#include "host/transport.h"

namespace mk::host {

struct EmulatedLink {
  u64 bandwidth_bytes_per_s = 0;  ///< 0: no limit
  u64 latency_ns = 0;
  u64 shuffle_ns = 0;  ///< a piece arrives up to this much later; with kInOrder messages never overtake each other
  EmulatedOrder order = kInOrder;
};

/// `peer_bases` are the regions of all ranks as mapped here; empty where every rank lives in this process.
Made make_emulated(const Setup& setup, const EmulatedLink& link, std::vector<std::byte*> peer_bases);

}  // namespace mk::host
