#pragma once
// What rc, unordered and srd share: opening, registering, joining, messages in flight, saying goodbye.
#include "host/verbs/link.h"

namespace mk::host::verbs {

/// A message that the network has, or that waits in front of it.
struct InNetwork {
  u64 ticket;
  u32 peer;
  u32 requests;  ///< that have not completed
};

class Common : public Transport {
 public:
  Common(const Setup& setup, u32 links_per_peer);
  ~Common() override { release(); }

  const char* device() const noexcept override { return device_.name(); }
  Registration registration() const noexcept override { return way_; }
  Error register_memory() override;
  Error endpoint(u32 peer, std::vector<u8>& blob) override;
  Error connect(u32 peer, std::span<const u8> blob) override;
  Error finish(u64) override { return {}; }  // links are ready when connect() returns
  void close(u64 deadline_ns) noexcept override;

  Error open();

 protected:
  virtual Error make_link(const LinkShape& shape, Link& link) = 0;
  virtual Error connect_link(const Endpoint& endpoint, u32 number, Link& link) = 0;
  virtual u32 requests_per_message() const noexcept = 0;
  virtual bool counts() const noexcept = 0;  ///< does the receiver need receives posted?
  /// One signalled write of our own goodbye word into the peer's at `remote_address`.
  virtual int post_goodbye(u32 link, u64 remote_address) noexcept = 0;

  u32 link_of(u32 peer, u32 number) const noexcept { return peer * links_per_peer_ + number; }
  /// Takes an id for a message; false where all are in use.
  bool take_id(u32& id) noexcept;
  /// Completions of sends; every ticket whose message has none left. -1: `error`.
  int poll_sent(std::span<u64> tickets, Error& error) noexcept;
  /// True, with `error`, where the peer has said goodbye.
  bool has_left(u32 peer, Error& error) const noexcept;
  Error failed_completion(const ibv_wc& completion, const char* call, u32 peer) const noexcept;
  u64 word_address(u32 word) const noexcept { return reinterpret_cast<u64>(host_words_.data() + word); }
  u32 first_staged() const noexcept { return static_cast<u32>(links_.size()); }
  u32 first_landing() const noexcept { return first_staged() + setup_.max_outstanding; }
  static u64 request_id(u32 id, u32 link) noexcept { return u64{link} << 32 | id; }

  static constexpr u32 kGoodbye = ~0u;  ///< in place of a message id

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
  u64 most_bytes_ = 0;            ///< of one request
  std::vector<u32> host_words_;   ///< goodbyes of links, then a word for each message id, then landing words
  std::vector<InNetwork> messages_;

 private:
  Error make_links();
  u64 send_goodbyes() noexcept;
  void release() noexcept;

  std::vector<u32> free_;
  Registration way_ = Registration::kNone;
  u32 send_depth_ = 0;
  u64 goodbyes_acknowledged_ = 0;
  bool has_failed_ = false;
};

}  // namespace mk::host::verbs
