#include "host/verbs/counted.h"

#include <endian.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "host/verbs/counted_transport.h"

namespace mk::host::verbs {

namespace {

constexpr u32 kUnorderedLinks = 4;
constexpr u64 kPieceAlignment = 16, kLongestDelayNs = 200'000;

class Unordered final : public Counted {
 public:
  Unordered(const Setup& setup, EmulatedOrder order) : Counted(setup, kUnorderedLinks, order) {}

 private:
  bool shuffles() const noexcept override { return true; }
  Error make_link(const LinkShape& shape, Link& link) override { return make_rc_link(device_, shape, link); }
  Error connect_link(const Endpoint& endpoint, u32 number, Link& link) override {
    return connect_rc_link(device_, endpoint, number, link);
  }
};

}  // namespace

Counted::Counted(const Setup& setup, u32 links_per_peer, EmulatedOrder order)
    : Common(setup, links_per_peer), order_(order), random_(setup.seed), arrivals_(setup.region.num_flags) {
  held_.reserve(std::max<std::size_t>(std::size_t{setup.max_outstanding} * (kUsualPieces + 1), kMaxPieces + 1));
}

/// Shuffled messages have a few pieces each, so that there is something to lose the order of.
u64 Counted::piece_bytes(u64 bytes) const noexcept {
  const u64 third = (bytes / kUsualPieces + kPieceAlignment) / kPieceAlignment * kPieceAlignment;
  return shuffles() ? std::min(third, most_bytes_) : most_bytes_;
}

void Counted::hold(Piece piece, u32 peer, u64 now) noexcept {
  const u64 drawn = random_();
  piece.link = link_of(peer, static_cast<u32>(drawn % links_per_peer_));
  piece.due_ns = shuffles() && (drawn >> 32) % 4 == 0 ? now + (drawn >> 34) % kLongestDelayNs : now;
  held_.push_back(piece);  // reserved; post() has looked
}

void Counted::cut(const Write& write, u32 peer, u32 id, u64 size) noexcept {
  const Endpoint& there = peers_[peer];
  const u32 pieces = static_cast<u32>((write.bytes + size - 1) / size) + 1;
  const u32 immediate = encode({write.slot, pieces});
  const bool counted = order_ != kUncounted;
  const u64 now = now_ns();
  for (u64 done = 0; done < write.bytes; done += size) {
    const u64 source = reinterpret_cast<u64>(setup_.region.base) + write.source_offset + done;
    const u32 bytes = static_cast<u32>(std::min(size, write.bytes - done));
    hold({0, source, there.region_base + write.destination_offset + done, region_->lkey, there.region_key, bytes,
          immediate, id, 0, counted}, peer, now);
  }
  host_words_[first_staged() + id] = write.value;
  const u64 value = word_address(first_staged() + id);
  const u64 landing = there.host_base + u64{first_landing() + write.slot} * sizeof(u32);
  const u64 flag = there.region_base + there.flags_offset + u64{write.slot} * sizeof(u32);
  hold({0, value, counted ? landing : flag, host_->lkey, counted ? there.host_key : there.region_key, sizeof(u32),
        immediate, id, 0, counted}, peer, now);
  messages_[id].requests = pieces;
}

int Counted::post(u32 peer, u32, std::span<const Write> writes, Error& error) noexcept {
  if (has_left(peer, error)) return -1;
  int taken = 0;
  for (const Write& write : writes) {
    const u64 size = piece_bytes(write.bytes);
    const u64 pieces = (write.bytes + size - 1) / size + 1;
    if (pieces > kMaxPieces || write.slot >= kMaxSlots) {
      error = fail({"post", device(), static_cast<i32>(peer)}, EMSGSIZE, "flag %u, %llu bytes in pieces of %llu",
                   write.slot, static_cast<unsigned long long>(write.bytes), static_cast<unsigned long long>(size));
      return -1;
    }
    u32 id = 0;
    if (held_.size() + pieces > held_.capacity() || !take_id(id)) break;
    messages_[id] = {write.ticket, peer, 0};
    cut(write, peer, id, size);
    ++taken;
  }
  return submit(error) < 0 ? -1 : taken;
}

void Counted::add_request(const Piece& piece) noexcept {
  Link& link = links_[piece.link];
  if (!link.is_open) ibv_wr_start(link.extended);
  link.is_open = true;
  --link.room;
  link.extended->wr_id = request_id(piece.id, piece.link);
  link.extended->wr_flags = IBV_SEND_SIGNALED;
  if (piece.has_immediate) {
    ibv_wr_rdma_write_imm(link.extended, piece.destination_key, piece.destination, htobe32(piece.immediate));
  } else {
    ibv_wr_rdma_write(link.extended, piece.destination_key, piece.destination);
  }
  ibv_wr_set_sge(link.extended, piece.source_key, piece.source, piece.bytes);
  if (link.address) ibv_wr_set_ud_addr(link.extended, link.address.get(), link.remote_queue, kQueueKey);
}

/// One doorbell for each link that has got something.
int Counted::complete_requests(Error& error) noexcept {
  int status = 0;
  for (Link& link : links_) {
    if (!link.is_open) continue;
    link.is_open = false;
    const int one = ibv_wr_complete(link.extended);
    if (one == 0 || status != 0) continue;
    status = one;
    error = fail({"ibv_wr_complete", device(), static_cast<i32>(link.peer)}, one);
  }
  return status == 0 ? 0 : -1;
}

int Counted::submit(Error& error) noexcept {
  if (held_.empty()) return 0;
  const u64 now = now_ns();
  for (std::size_t i = 0; i < held_.size();) {
    if (held_[i].due_ns > now || links_[held_[i].link].room == 0) {
      ++i;
      continue;
    }
    add_request(held_[i]);
    held_[i] = held_.back();
    held_.pop_back();
  }
  return complete_requests(error);
}

/// The completion of each piece has been read before its bytes, and the landing word, are.
int Counted::arrived(const ibv_wc& completion, Error& error) noexcept {
  const u32 number = static_cast<u32>(completion.wr_id >> 32);
  Link& link = links_[number];
  if (completion.status != IBV_WC_SUCCESS || completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
    error = failed_completion(completion, "receive", link.peer);
    return -1;
  }
  if (const int status = post_receives(link, completion.wr_id, 1)) {
    error = fail({"ibv_post_recv", device(), static_cast<i32>(link.peer)}, status);
    return -1;
  }
  const u32 bits = be32toh(completion.imm_data);
  const int state = arrivals_.add(link.peer, bits, error);
  if (state <= 0) return state;
  const u32 slot = decode(bits).slot;
  const u32 value = std::atomic_ref<u32>(host_words_[first_landing() + slot]).load(std::memory_order_acquire);
  return setup_.publisher->publish(link.peer, slot, value, error);
}

int Counted::receive(Error& error) noexcept {
  constexpr int kMost = 32;
  ibv_wc completions[kMost];
  const int found = ibv_poll_cq(received_, kMost, completions);
  if (found < 0) {
    error = fail({"ibv_poll_cq", device()}, EIO);
    return -1;
  }
  for (int i = 0; i < found; ++i) {
    if (arrived(completions[i], error) < 0) return -1;
  }
  return 0;
}

int Counted::poll(std::span<u64> tickets, Error& error) noexcept {
  const int count = poll_sent(tickets, error);  // first: a failed send explains the receives that it flushes
  if (count < 0 || receive(error) < 0 || submit(error) < 0) return -1;
  return count;
}

int Counted::post_goodbye(u32 link, u64 remote_address) noexcept {
  const u32 own = link_of(setup_.rank, link % links_per_peer_);
  add_request({0, word_address(own), remote_address, host_->lkey, peers_[links_[link].peer].host_key, sizeof(u32), 0,
               kGoodbye, link, false});
  links_[link].is_open = false;
  return ibv_wr_complete(links_[link].extended);
}

Made make_unordered(const Setup& setup, EmulatedOrder order) {
  auto transport = std::make_unique<Unordered>(setup, order);
  if (Error error = transport->open()) return {nullptr, error};
  return {std::move(transport), {}};
}

}  // namespace mk::host::verbs
