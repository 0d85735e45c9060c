#pragma once
// Sends messages in pieces that carry immediates, in any order, and counts those that arrive.
//
// Each immediate takes a receive of the peer. Who runs out of them kills the connection of whoever writes (srd), so a
// sender never has more on the way than the peer has said that it has posted (credits).
#include <random>

#include "abi/proxy_records.h"
#include "host/arrivals.h"
#include "host/verbs/common.h"

namespace mk::host::verbs {

class Counted : public Common {
 public:
  Counted(const Setup& setup, u32 links_per_peer, EmulatedOrder order);
  int post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept override;
  int poll(std::span<u64> tickets, Error& error) noexcept override;

 protected:
  u32 requests_per_message() const noexcept override { return kUsualPieces + 1; }
  int post_word(u32 link, u64 own_offset, u64 there_offset, u32 id) noexcept override;
  /// Shuffle, with delays? Else pieces are as large as the device takes, and go at once.
  virtual bool shuffles() const noexcept { return false; }

 private:
  static constexpr u32 kUsualPieces = 3;

  /// One write that has still to be posted.
  struct Piece {
    u64 due_ns;
    u64 source, destination;
    u32 source_key, destination_key;
    u32 bytes, immediate, id;
    u32 link;
    bool has_immediate;
  };

  u64 piece_bytes(u64 bytes) const noexcept;
  void cut(const Write& write, u32 link, u32 id, u64 size) noexcept;
  void hold(Piece piece, u64 now) noexcept;
  bool may_go(const Piece& piece, u64 now) const noexcept;
  int submit(Error& error) noexcept;
  int add_request(const Piece& piece) noexcept;
  int post_alone(const Piece& piece) noexcept;
  int complete_requests(Error& error) noexcept;
  int receive(Error& error) noexcept;
  int arrived(const ibv_wc& completion, Error& error) noexcept;
  int tell_credits(Error& error) noexcept;

  const EmulatedOrder order_;
  std::vector<Piece> held_;  ///< as they came; any of them may go next
  std::mt19937_64 random_;
  Arrivals arrivals_;
};

}  // namespace mk::host::verbs
