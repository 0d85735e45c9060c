#pragma once
// A rank that is told a key of its peer's memory that there is not.
#include <cstddef>

#include "host/verbs/link.h"
#include "two_ranks.h"

namespace mk::test {

/// Joins and starts both; it is rank 0 that has the wrong key.
inline void join_with_a_wrong_key(Sides& sides) {
  using host::verbs::Endpoint;
  for (u32 from = 0; from < 2; ++from) {
    std::vector<u8> blob;
    CHECK(!sides[from].session->endpoint(1 - from, blob));
    if (from == 1) blob[blob.size() - sizeof(Endpoint) + offsetof(Endpoint, region_key) + 1] ^= 0x55;
    CHECK_EQUAL(text_of(sides[1 - from].session->connect(from, blob)), std::string());
  }
  for (u32 rank = 0; rank < 2; ++rank) CHECK(!sides[rank].session->proxy().start());
}

}  // namespace mk::test
