#pragma once
// Sends messages in pieces that carry immediates, in any order, and counts those that arrive.
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
  bool counts() const noexcept override { return true; }
  int post_goodbye(u32 link, u64 remote_address) noexcept override;
  /// Shuffle, with delays? Else pieces are as large as the device takes, and go at once.
  virtual bool shuffles() const noexcept = 0;

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
  void cut(const Write& write, u32 peer, u32 id, u64 size) noexcept;
  void hold(Piece piece, u32 peer, u64 now) noexcept;
  int submit(Error& error) noexcept;
  void add_request(const Piece& piece) noexcept;
  int complete_requests(Error& error) noexcept;
  int receive(Error& error) noexcept;
  int arrived(const ibv_wc& completion, Error& error) noexcept;

  const EmulatedOrder order_;
  std::vector<Piece> held_;  ///< as they came; any of them may go next
  std::mt19937_64 random_;
  Arrivals arrivals_;
};

}  // namespace mk::host::verbs
