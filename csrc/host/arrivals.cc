#include "host/arrivals.h"

#include <cerrno>

namespace mk::host {

int Arrivals::add(u32 peer, u32 bits, Error& error) noexcept {
  const Immediate immediate = decode(bits);
  const Place place{"arrival", "", static_cast<i32>(peer)};
  if (immediate.slot >= pending_.size() || immediate.pieces == 0) {
    error = fail(place, EPROTO, "slot %u of %zu, %u pieces", immediate.slot, pending_.size(), immediate.pieces);
    return -1;
  }
  Pending& pending = pending_[immediate.slot];
  u32& owner = peers_[immediate.slot];
  if (pending.seen == 0) {
    pending.pieces = immediate.pieces;
    owner = peer;
  }
  if (pending.pieces != immediate.pieces || owner != peer) {
    error = fail(place, EPROTO, "slot %u: two messages at once (%u pieces from rank %u, %u here)", immediate.slot,
                 pending.pieces, owner, immediate.pieces);
    return -1;
  }
  if (++pending.seen < pending.pieces) return 0;
  pending.seen = 0;
  return 1;
}

}  // namespace mk::host
