#pragma once
// What goes over a socket: a hello each way, then frames. All little-endian.
#include <array>
#include <bit>

#include "abi/types.h"

namespace mk::host::tcp {

static_assert(std::endian::native == std::endian::little, "frames are sent as they lie in memory");

using Token = std::array<u8, 16>;

inline constexpr u32 kHelloMagic = 0x48504b4d;  // "MKPH"
inline constexpr u32 kFrameMagic = 0x46504b4d;  // "MKPF"

/// The first bytes of each side. `token` is the one that the receiving side made for this sender and gave away through
/// the store alone: who shows it was there.
struct Hello {
  u32 magic;
  u32 rank;
  u32 world;
  u32 lane;
  Token token;
};
static_assert(sizeof(Hello) == 32);

enum FrameKind : u32 { kData = 1, kBye = 2 };

/// Announces `bytes` of payload, after which flag `slot` becomes `value`. A bye is the last frame of a connection.
struct Frame {
  u32 magic;
  u32 kind;
  u32 slot;
  u32 value;
  u64 destination_offset;
  u64 bytes;
};
static_assert(sizeof(Frame) == 32);

/// An IP address in network order; an IPv4 address is the first 4 bytes.
struct Address {
  u32 family;
  std::array<u8, 16> bytes;
};

inline constexpr u32 kMaxAddresses = 16;

/// What a rank tells one peer through the store.
struct Endpoint {
  u32 magic;
  u32 port;
  u64 host;  ///< equal where both are in one network namespace of one machine
  Token token;
  u32 num_addresses;
  std::array<Address, kMaxAddresses> addresses;  ///< best first
};

}  // namespace mk::host::tcp
