#pragma once
// A queue pair to one peer, and what ranks tell each other to join two of them.
#include "host/verbs/device.h"

namespace mk::host::verbs {

inline constexpr u32 kMaxLinks = 64;  ///< to one peer
inline constexpr u32 kQueueKey = 0x6d6b7078;

/// What a rank tells one peer through the store.
struct Endpoint {
  u8 gid[16];
  u16 lid;
  u8 mtu;
  u8 counts;  ///< 1: this rank counts pieces and publishes its flags itself; 0: the sender's NIC writes them
  u32 num_links;
  u64 region_base, flags_offset;
  u64 host_base;  ///< HostWords
  u32 region_key, host_key;
  u32 num_flags, receive_depth;
  u64 host_bytes;
  u32 queue_numbers[kMaxLinks];
};

/// Queues of a link, and how deep they are.
struct LinkShape {
  ibv_cq* sent;
  ibv_cq* received;
  u32 send_depth, receive_depth;
};

struct Link {
  Owned<ibv_qp> queue{nullptr, nullptr};
  Owned<ibv_ah> address{nullptr, nullptr};  ///< srd: the peer, given with each request
  ibv_qp_ex* extended = nullptr;
  u32 peer = 0;
  u32 remote_queue = 0;
  u32 room = 0;          ///< requests that the send queue still takes
  u32 immediates = 0;    ///< sent, each of which takes a receive of the peer
  u32 reposted = 0;      ///< receives posted again, of which the peer knows `told`
  u32 told = 0;
  bool is_telling = false;  ///< until the write that tells has completed
  u32 inline_bytes = 0;  ///< largest write whose bytes may lie in the request
  bool is_open = false;  ///< between ibv_wr_start and ibv_wr_complete
};

/// A reliable connection, still without its peer.
Error make_rc_link(Device& device, const LinkShape& shape, Link& link);
/// Joins it to the peer's. The peer must do the same before either side sends.
Error connect_rc_link(Device& device, const Endpoint& endpoint, u32 number, Link& link);
/// Posts `count` receives for writes with an immediate. 0, or an errno.
int post_receives(Link& link, u64 id, u32 count) noexcept;

}  // namespace mk::host::verbs
