#pragma once
// What rc, unordered and srd share: opening, registering, joining, messages in flight, saying goodbye.
#include "host/verbs/host_words.h"
#include "host/verbs/link.h"

namespace mk::host::verbs {

/// A message that the network has, or that waits in front of it.
struct InNetwork {
  u64 ticket;
  u32 completions;        ///< that are still to come
  u32 room_each;          ///< requests of its link that each of them gives back
};

class Common : public Transport {
 public:
  Common(const Setup& setup, u32 links_per_peer);
  ~Common() override { release(); }

  const char* device() const noexcept override { return device_.name(); }
  Registration registration() const noexcept override { return way_; }
  bool counts() const noexcept override { return counts_; }
  Error register_memory() override;
  Error endpoint(u32 peer, std::vector<u8>& blob) override;
  Error connect(u32 peer, std::span<const u8> blob) override;
  Error finish(u64) override { return {}; }  // links are ready when connect() returns
  void abandon() noexcept override;
  void close(u64 deadline_ns) noexcept override;

  Error open();

 protected:
  virtual Error make_link(const LinkShape& shape, Link& link) = 0;
  virtual Error connect_link(const Endpoint& endpoint, u32 number, Link& link) = 0;
  virtual u32 requests_per_message() const noexcept = 0;
  /// After the device is open: has this rank to count what comes? Else its flags are written by the senders' NICs.
  virtual bool must_count() const noexcept { return true; }
  /// One signalled write of a word of ours, at `own_offset`, into the peer's at `there_offset`. 0, or an errno.
  virtual int post_word(u32 link, u64 own_offset, u64 there_offset, u32 id) noexcept = 0;

  u32 link_of(u32 peer, u32 number) const noexcept { return peer * links_per_peer_ + number; }
  /// Takes an id for a message; false where all are in use.
  bool take_id(u32& id) noexcept;
  /// Completions of sends; every ticket whose message has none left. -1: `error`.
  int poll_sent(std::span<u64> tickets, Error& error) noexcept;
  /// Has the peer said goodbye? It takes nothing more, and what it leaves behind on our connections is no failure.
  bool has_left(u32 peer) const noexcept;
  /// The same, and the error of sending to it.
  bool has_left(u32 peer, Error& error) const noexcept;
  bool has_lost_one(Error& error) noexcept;
  /// What failed, from the first completion with an error and those that were read with it.
  Error failed_completion(std::span<const ibv_wc> read, const char* call) noexcept;
  static u64 request_id(u32 id, u32 link) noexcept { return u64{link} << 32 | id; }

  static constexpr u32 kGoodbye = ~0u, kCredit = ~0u - 1;  ///< in place of a message id
  static constexpr u32 kReserved = 2;  ///< requests of each link that messages leave to these

  const Setup setup_;
  const u32 links_per_peer_;
  Device device_;
  std::vector<Link> links_;
  std::vector<Endpoint> peers_;
  ibv_mr* region_ = nullptr;
  ibv_mr* host_ = nullptr;
  ibv_cq* sent_ = nullptr;
  ibv_cq* received_ = nullptr;
  u32 receive_depth_ = 0;
  u64 most_bytes_ = 0;  ///< of one request
  HostWords words_;
  std::vector<InNetwork> messages_;

 private:
  Error make_links();
  ibv_wc cause_of(std::span<const ibv_wc> read, const char*& call) noexcept;
  /// Writes the word for goodbyes over each connection; over how many.
  u64 say(u32 what) noexcept;
  void release() noexcept;

  std::vector<u32> free_;
  Registration way_ = Registration::kNone;
  bool counts_ = true;
  u32 send_depth_ = 0, looked_at_ = 0;
  u64 goodbyes_acknowledged_ = 0;
  bool has_failed_ = false;
};

}  // namespace mk::host::verbs
