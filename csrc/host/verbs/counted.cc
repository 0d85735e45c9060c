#include "host/verbs/counted.h"

#include <endian.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

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

void Counted::hold(Piece piece, u64 now) noexcept {
  if (shuffles()) {
    const u64 drawn = random_();
    piece.link = link_of(links_[piece.link].peer, static_cast<u32>(drawn % links_per_peer_));
    piece.due_ns = (drawn >> 32) % 4 == 0 ? now + (drawn >> 34) % kLongestDelayNs : now;
  }
  held_.push_back(piece);  // reserved; post() has looked
}

void Counted::cut(const Write& write, u32 link, u32 id, u64 size) noexcept {
  const Endpoint& there = peers_[links_[link].peer];
  const u32 pieces = static_cast<u32>((write.bytes + size - 1) / size) + 1;
  const u32 immediate = encode({write.slot, pieces});
  const bool counted = order_ != kUncounted;
  const u64 now = now_ns();
  for (u64 done = 0; done < write.bytes; done += size) {
    const u64 source = reinterpret_cast<u64>(setup_.region.base) + write.source_offset + done;
    const u32 bytes = static_cast<u32>(std::min(size, write.bytes - done));
    hold({0, source, there.region_base + write.destination_offset + done, region_->lkey, there.region_key, bytes,
          immediate, id, link, counted}, now);
  }
  const u64 staged = words_.staged_offset(id);
  words_.note(staged) = {write.destination_offset, write.bytes, write.value, 0};
  Piece last{0, words_.address(staged), there.host_base + words_.landing_offset(write.slot), host_->lkey,
             there.host_key, sizeof(Note), immediate, id, link, counted};
  if (!counted) {
    last.source += offsetof(Note, value);
    last.destination = there.region_base + there.flags_offset + u64{write.slot} * sizeof(u32);
    last.destination_key = there.region_key;
    last.bytes = sizeof(u32);
  }
  hold(last, now);
  messages_[id].completions = pieces;
}

int Counted::post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept {
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
    messages_[id] = {write.ticket, 0, 1};
    cut(write, link_of(peer, lane % links_per_peer_), id, size);
    ++taken;
  }
  return submit(error) < 0 ? -1 : taken;
}

/// Is it time, has the send queue room, and the peer a receive?
bool Counted::may_go(const Piece& piece, u64 now) const noexcept {
  const Link& link = links_[piece.link];
  if (piece.due_ns > now || link.room <= kReserved) return false;
  if (!piece.has_immediate) return true;
  return link.immediates - words_.load(HostWords::credit_offset(piece.link)) < peers_[link.peer].receive_depth;
}

int Counted::add_request(const Piece& piece) noexcept {
  Link& link = links_[piece.link];
  --link.room;
  link.immediates += piece.has_immediate ? 1 : 0;
  if (link.extended == nullptr) return post_alone(piece);
  if (!link.is_open) ibv_wr_start(link.extended);
  link.is_open = true;
  link.extended->wr_id = request_id(piece.id, piece.link);
  link.extended->wr_flags = IBV_SEND_SIGNALED;
  if (piece.has_immediate) {
    ibv_wr_rdma_write_imm(link.extended, piece.destination_key, piece.destination, htobe32(piece.immediate));
  } else {
    ibv_wr_rdma_write(link.extended, piece.destination_key, piece.destination);
  }
  ibv_wr_set_sge(link.extended, piece.source_key, piece.source, piece.bytes);
  if (link.address) ibv_wr_set_ud_addr(link.extended, link.address.get(), link.remote_queue, kQueueKey);
  return 0;
}

/// For providers that know no ibv_wr_*.
int Counted::post_alone(const Piece& piece) noexcept {
  ibv_sge part{piece.source, piece.bytes, piece.source_key};
  ibv_send_wr request{}, *refused = nullptr;
  request.wr_id = request_id(piece.id, piece.link);
  request.sg_list = &part;
  request.num_sge = 1;
  request.opcode = piece.has_immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  request.imm_data = htobe32(piece.immediate);
  request.wr.rdma = {piece.destination, piece.destination_key};
  return ibv_post_send(links_[piece.link].queue.get(), &request, &refused);
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
    if (!may_go(held_[i], now)) {
      ++i;
      continue;
    }
    if (const int status = add_request(held_[i])) {
      error = fail({"ibv_post_send", device(), static_cast<i32>(links_[held_[i].link].peer)}, status);
      return -1;
    }
    held_[i] = held_.back();
    held_.pop_back();
  }
  return complete_requests(error);
}

/// The completion of each piece has been read before its bytes, and the note, are.
int Counted::arrived(const ibv_wc& completion, Error& error) noexcept {
  const u32 number = static_cast<u32>(completion.wr_id >> 32);
  Link& link = links_[number];
  if (completion.status != IBV_WC_SUCCESS && has_left(link.peer)) return 0;  // the connection has ended; nothing came
  if (completion.status != IBV_WC_SUCCESS || completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
    error = failed_completion({&completion, 1}, "receive");
    return -1;
  }
  if (const int status = post_receives(link, completion.wr_id, 1)) {
    error = fail({"ibv_post_recv", device(), static_cast<i32>(link.peer)}, status);
    return -1;
  }
  ++link.reposted;
  const u32 bits = be32toh(completion.imm_data);
  const int state = arrivals_.add(link.peer, bits, error);
  if (state <= 0) return state;
  const u32 slot = decode(bits).slot;
  const Note& note = words_.note(words_.landing_offset(slot));
  return setup_.publisher->publish({link.peer, slot, note.value, note.offset, note.bytes}, error);
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
  return tell_credits(error);
}

/// Tells peers how many receives are there again, a quarter of all at a time. One such write of a link is on the way at
/// most, so that an older count can't overwrite a newer one. A peer that has left needs none: its memory is gone, and
/// writing there would end this proxy, though its other peers are well.
int Counted::tell_credits(Error& error) noexcept {
  for (u32 i = 0; i < links_.size(); ++i) {
    Link& link = links_[i];
    if (link.is_telling || link.room == 0 || link.reposted - link.told < std::max(receive_depth_ / 4, 1u)) continue;
    if (has_left(link.peer)) continue;
    const u64 out = HostWords::credit_out_offset(i);
    const u64 there = HostWords::credit_offset(link_of(setup_.rank, i % links_per_peer_));
    words_.word(out) = link.told = link.reposted;
    link.is_telling = true;
    if (const int status = post_word(i, out, there, kCredit)) {
      error = fail({"ibv_post_send", device(), static_cast<i32>(link.peer)}, status, "credits");
      return -1;
    }
  }
  return 0;
}

int Counted::poll(std::span<u64> tickets, Error& error) noexcept {
  const int count = poll_sent(tickets, error);  // first: a failed send explains the receives that it flushes
  if (count < 0 || (counts() && receive(error) < 0) || submit(error) < 0 || has_lost_one(error)) return -1;
  return count;
}

int Counted::post_word(u32 link, u64 own_offset, u64 there_offset, u32 id) noexcept {
  const Endpoint& there = peers_[links_[link].peer];
  const int status = add_request({0, words_.address(own_offset), there.host_base + there_offset, host_->lkey,
                                  there.host_key, sizeof(u32), 0, id, link, false});
  if (status != 0 || !links_[link].is_open) return status;
  links_[link].is_open = false;
  return ibv_wr_complete(links_[link].extended);
}

Made make_unordered(const Setup& setup, EmulatedOrder order) {
  auto transport = std::make_unique<Unordered>(setup, order);
  if (Error error = transport->open()) return {nullptr, error};
  return {std::move(transport), {}};
}

}  // namespace mk::host::verbs
