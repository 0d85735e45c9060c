#include "host/verbs/common.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "host/wait.h"

namespace mk::host::verbs {

namespace {

constexpr u64 kAddressLimitNs = 5'000'000'000, kLongestGoodbyeNs = 500'000'000;
constexpr u32 kDeepest = 1024, kShallowest = 16;
constexpr u64 kMostRequestBytes = 1u << 30;
constexpr u32 kLeft = 1, kFailed = 2;  ///< what a word for goodbyes says

}  // namespace

Common::Common(const Setup& setup, u32 links_per_peer)
    : setup_(setup),
      links_per_peer_(links_per_peer),
      links_(std::size_t{setup.world} * links_per_peer),
      peers_(setup.world),
      words_(static_cast<u32>(links_.size()), setup.max_outstanding, setup.region.num_flags),
      messages_(setup.max_outstanding) {
  for (u32 i = 0; i < setup.max_outstanding; ++i) free_.push_back(setup.max_outstanding - 1 - i);
}

Error Common::open() {
  if (links_per_peer_ > kMaxLinks) return fail({"options"}, EINVAL, "at most %u connections to a peer", kMaxLinks);
  const u64 limit_ns = std::min(setup_.timeout_ns, kAddressLimitNs);
  if (Error error = device_.open(setup_.device, now_ns() + limit_ns)) return error;
  counts_ = must_count();
  if (counts_ && setup_.region.kind == MemoryKind::kCuda && setup_.flag_writer.write == nullptr) {
    return fail({"options", device()}, EINVAL, "flags in device memory, and no function that stores them");
  }
  const u32 wanted = std::clamp(setup_.max_outstanding * requests_per_message(), kShallowest, kDeepest) + kReserved;
  const u32 most = static_cast<u32>(std::min(device_.limits().max_qp_wr, device_.limits().max_cqe));
  const u32 num_links = static_cast<u32>(links_.size());
  send_depth_ = std::min({wanted, most, static_cast<u32>(device_.limits().max_cqe) / num_links});
  receive_depth_ = counts() ? send_depth_ : 1;
  most_bytes_ = std::min<u64>(device_.port().max_msg_sz, kMostRequestBytes);
  if (send_depth_ < requests_per_message() + kReserved || most_bytes_ == 0) {
    return fail({"ibv_query_device", device_.name()}, ENOBUFS, "%u requests a connection, %u connections", send_depth_,
                num_links);
  }
  if (Error error = device_.add_queue(u64{num_links} * send_depth_, sent_)) return error;
  return device_.add_queue(u64{num_links} * receive_depth_, received_);
}

Error Common::register_memory() {
  if (Error error = device_.add_region(setup_.region, way_, region_)) return error;
  if (Error error = device_.add_host(words_.base(), words_.bytes(), host_)) return error;
  return make_links();
}

Error Common::make_links() {
  const LinkShape shape{sent_, received_, send_depth_, receive_depth_};
  for (u32 i = 0; i < links_.size(); ++i) {
    Link& link = links_[i];
    link.peer = i / links_per_peer_;
    if (link.peer == setup_.rank) continue;
    if (Error error = make_link(shape, link)) return error;
    const int status = counts() ? post_receives(link, request_id(0, i), receive_depth_) : 0;
    if (status != 0) return fail({"ibv_post_recv", device(), static_cast<i32>(link.peer)}, status);
  }
  return {};
}

Error Common::endpoint(u32 peer, std::vector<u8>& blob) {
  Endpoint own{};
  std::memcpy(own.gid, device_.gid().raw, sizeof own.gid);
  own.lid = device_.port().lid;
  own.mtu = static_cast<u8>(device_.port().active_mtu);
  own.num_links = links_per_peer_;
  own.region_base = reinterpret_cast<u64>(setup_.region.base);  // not mr->addr: some providers leave it empty
  own.flags_offset = setup_.region.flags_offset;
  own.counts = counts() ? 1 : 0;
  own.host_base = words_.address(0);
  own.host_bytes = words_.bytes();
  own.region_key = region_->rkey;
  own.host_key = host_->rkey;
  own.num_flags = setup_.region.num_flags;
  own.receive_depth = receive_depth_;
  for (u32 i = 0; i < links_per_peer_ && peer != setup_.rank; ++i) {
    own.queue_numbers[i] = links_[link_of(peer, i)].queue->qp_num;
  }
  blob.resize(sizeof own);
  std::memcpy(blob.data(), &own, sizeof own);
  return {};
}

Error Common::connect(u32 peer, std::span<const u8> blob) {
  const Place place{"connect", device(), static_cast<i32>(peer)};
  if (blob.size() != sizeof(Endpoint)) return fail(place, EPROTO, "an endpoint of %zu bytes", blob.size());
  Endpoint& other = peers_[peer];
  std::memcpy(&other, blob.data(), sizeof other);
  if (other.num_links != links_per_peer_ || other.host_bytes != words_.bytes_with(other.num_flags)) {
    return fail(place, EPROTO, "%u connections there, %u here", other.num_links, links_per_peer_);
  }
  for (u32 i = 0; i < links_per_peer_ && peer != setup_.rank; ++i) {
    if (Error error = connect_link(other, i, links_[link_of(peer, i)])) return error;
  }
  return {};
}

bool Common::take_id(u32& id) noexcept {
  if (free_.empty()) return false;
  id = free_.back();
  free_.pop_back();
  return true;
}

/// A connection that breaks flushes all its requests. What broke it may come behind some, or among the receives, or the
/// writes where the receives were looked at first. `call`: of what was read; of the cause afterwards.
ibv_wc Common::cause_of(std::span<const ibv_wc> read, const char*& call) noexcept {
  constexpr u32 kMostLooks = 4096;
  const auto says_something = [](const ibv_wc& one) {
    return one.status != IBV_WC_SUCCESS && one.status != IBV_WC_WR_FLUSH_ERR;
  };
  const auto found = std::find_if(read.begin(), read.end(), says_something);
  if (found != read.end()) return *found;
  ibv_wc other{};
  for (ibv_cq* queue : {sent_, received_}) {
    for (u32 i = 0; i < kMostLooks && ibv_poll_cq(queue, 1, &other) == 1; ++i) {
      if (!says_something(other)) continue;
      call = queue == sent_ ? "rdma write" : "receive";
      return other;
    }
  }
  return read.front();
}

Error Common::failed_completion(std::span<const ibv_wc> read, const char* call) noexcept {
  const ibv_wc cause = cause_of(read, call);
  const Place place{call, device(), static_cast<i32>(links_[cause.wr_id >> 32].peer)};
  const char* status = device_.functions().wc_status_str(cause.status);
  if (device_.is_port_down()) return fail(place, ENETDOWN, "the port is down (%s)", status);
  return fail(place, errno_of(cause.status), "%s (status %u, vendor %u)", status, cause.status, cause.vendor_err);
}

bool Common::has_left(u32 peer) const noexcept {
  return words_.load(HostWords::goodbye_offset(link_of(peer, 0))) == kLeft;
}

bool Common::has_left(u32 peer, Error& error) const noexcept {
  if (!has_left(peer)) return false;
  error = fail({"post", device(), static_cast<i32>(peer)}, ENOTCONN, "the peer has closed its connection");
  return true;
}

int Common::poll_sent(std::span<u64> tickets, Error& error) noexcept {
  constexpr std::size_t kMost = 32;
  ibv_wc completions[kMost];
  const int most = static_cast<int>(std::min(kMost, tickets.size()));
  const int found = ibv_poll_cq(sent_, most, completions);
  int count = 0;
  for (int i = 0; i < found; ++i) {
    const u32 id = static_cast<u32>(completions[i].wr_id);
    Link& link = links_[completions[i].wr_id >> 32];
    const bool is_credit_for_nobody = id == kCredit && has_left(link.peer);
    if (completions[i].status != IBV_WC_SUCCESS && !is_credit_for_nobody) {
      has_failed_ = true;
      error = failed_completion({completions + i, completions + found}, "rdma write");
      return -1;
    }
    if (id == kGoodbye || id == kCredit) {
      ++link.room;
      goodbyes_acknowledged_ += id == kGoodbye ? 1 : 0;
      if (id == kCredit) link.is_telling = false;
      continue;
    }
    InNetwork& message = messages_[id];
    link.room += message.room_each;
    if (--message.completions != 0) continue;
    tickets[static_cast<std::size_t>(count++)] = message.ticket;
    free_.push_back(id);
  }
  if (found >= 0) return count;
  has_failed_ = true;
  error = fail({"ibv_poll_cq", device()}, EIO);
  return -1;
}

/// True, with `error`, where a peer has said that its proxy has failed. Looks at one connection a call.
bool Common::has_lost_one(Error& error) noexcept {
  looked_at_ = looked_at_ + 1 < links_.size() ? looked_at_ + 1 : 0;
  const u32 peer = looked_at_ / links_per_peer_;
  if (peer == setup_.rank || words_.load(HostWords::goodbye_offset(looked_at_)) != kFailed) return false;
  has_failed_ = true;
  error = fail({"poll", device(), static_cast<i32>(peer)}, ECONNRESET,
               "the peer's proxy has failed; its own error says why");
  return true;
}

/// On each connection: one that is broken takes it and drops it, one that breaks by it tells the peer as well.
void Common::abandon() noexcept {
  (void)say(kFailed);
  has_failed_ = true;
}

u64 Common::say(u32 what) noexcept {
  u64 sent = 0;
  for (u32 i = 0; i < links_.size(); ++i) {
    const Link& link = links_[i];
    if (!link.queue || link.remote_queue == 0 || link.room == 0) continue;
    // our own rank's word, which no peer writes, carries the value
    const u64 there = HostWords::goodbye_offset(link_of(setup_.rank, i % links_per_peer_));
    words_.word(there) = what;
    if (post_word(i, there, there, kGoodbye) == 0) ++sent;
  }
  return sent;
}

/// A peer's last message may still wait for our NIC's acknowledgement: both say goodbye, and go when both have heard.
void Common::close(u64 deadline_ns) noexcept {
  if (!device_.context()) return;
  const u64 sent = has_failed_ || !sent_ ? 0 : say(kLeft);
  const auto all_said = [&] {
    u64 unused[1];
    Error error;
    while (goodbyes_acknowledged_ < sent) {
      const u64 before = goodbyes_acknowledged_;
      if (poll_sent(unused, error) < 0) return true;
      if (before == goodbyes_acknowledged_) return false;
    }
    for (u32 i = 0; i < links_.size(); ++i) {
      const bool is_joined = links_[i].queue && links_[i].remote_queue != 0;
      if (is_joined && words_.load(HostWords::goodbye_offset(i)) == 0) return false;
    }
    return true;
  };
  if (sent != 0) {
    (void)wait_bounded(std::min(deadline_ns, now_ns() + kLongestGoodbyeNs), all_said, [] { return false; });
  }
  release();
}

void Common::release() noexcept {
  links_.clear();
  device_.close();
}

}  // namespace mk::host::verbs
