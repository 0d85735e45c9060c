#include "host/verbs/rc.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "abi/command_ring.h"
#include "host/verbs/counted_transport.h"

namespace mk::host::verbs {

namespace {

constexpr u32 kMostParts = 4;  ///< data writes of one message

/// Requests of one batch, chained for one doorbell.
struct Chain {
  std::array<ibv_send_wr, kMaxBatch*(kMostParts + 1)> requests;
  std::array<ibv_sge, kMaxBatch*(kMostParts + 1)> parts;
  u32 count = 0;

  ibv_send_wr& add(const ibv_sge& part, u64 id) noexcept {
    parts[count] = part;
    ibv_send_wr& request = requests[count];
    request = {};
    request.wr_id = id;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.sg_list = &parts[count];
    request.num_sge = 1;
    if (count != 0) requests[count - 1].next = &request;
    ++count;
    return request;
  }
};

/// To peers that keep the order of writes: data, then the flag. To others as every network without order.
class Rc final : public Counted {
 public:
  explicit Rc(const Setup& setup) : Counted(setup, setup.lanes, kInOrder) {}
  int post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept override;

 private:
  Error make_link(const LinkShape& shape, Link& link) override { return make_rc_link(device_, shape, link); }
  Error connect_link(const Endpoint& endpoint, u32 number, Link& link) override {
    return connect_rc_link(device_, endpoint, number, link);
  }
  u32 requests_per_message() const noexcept override { return 2; }
  bool must_count() const noexcept override {
    return setup_.region.write_order != kWritesInOrder || !device_.keeps_write_order();
  }
  void add_message(Chain& chain, const Write& write, u32 link, u32 id) noexcept;

  Chain chain_;
};

/// Data first, then the flag, which a kernel or host thread of the receiver acquires: writes of one reliable
/// connection into one registration take effect in order.
void Rc::add_message(Chain& chain, const Write& write, u32 link, u32 id) noexcept {
  const Endpoint& there = peers_[links_[link].peer];
  for (u64 done = 0; done < write.bytes; done += most_bytes_) {
    const u32 bytes = static_cast<u32>(std::min(most_bytes_, write.bytes - done));
    const u64 source = reinterpret_cast<u64>(setup_.region.base) + write.source_offset + done;
    ibv_send_wr& data = chain.add({source, bytes, region_->lkey}, request_id(id, link));
    data.wr.rdma = {there.region_base + write.destination_offset + done, there.region_key};
  }
  Note& note = words_.note(words_.staged_offset(id));
  note.value = write.value;
  const ibv_sge word{reinterpret_cast<u64>(&note.value), sizeof(u32), host_->lkey};
  ibv_send_wr& flag = chain.add(word, request_id(id, link));
  flag.send_flags = IBV_SEND_SIGNALED;
  if (links_[link].inline_bytes >= sizeof(u32)) flag.send_flags |= IBV_SEND_INLINE;
  flag.wr.rdma = {there.region_base + there.flags_offset + u64{write.slot} * sizeof(u32), there.region_key};
}

int Rc::post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept {
  const u32 number = link_of(peer, lane);
  Link& link = links_[number];
  const Place place{"ibv_post_send", device(), static_cast<i32>(peer)};
  if (peers_[peer].counts != 0) return Counted::post(peer, lane, writes, error);
  if (has_left(peer, error)) return -1;
  int taken = 0;
  chain_.count = 0;
  for (const Write& write : writes) {
    const u64 parts = (write.bytes + most_bytes_ - 1) / most_bytes_;
    if (parts > kMostParts) {
      error = fail(place, EMSGSIZE, "%llu bytes in one message", static_cast<unsigned long long>(write.bytes));
      return -1;
    }
    const u32 requests = static_cast<u32>(parts) + 1;
    u32 id = 0;
    if (link.room < requests + kReserved || !take_id(id)) break;
    messages_[id] = {write.ticket, 1, requests};
    link.room -= requests;
    add_message(chain_, write, number, id);
    ++taken;
  }
  if (taken == 0) return 0;
  ibv_send_wr* refused = nullptr;
  if (const int status = ibv_post_send(link.queue.get(), chain_.requests.data(), &refused)) {
    error = fail(place, status, "%u requests", chain_.count);
    return -1;
  }
  return taken;
}

}  // namespace

Made make_rc(const Setup& setup) {
  auto transport = std::make_unique<Rc>(setup);
  if (Error error = transport->open()) return {nullptr, error};
  return {std::move(transport), {}};
}

}  // namespace mk::host::verbs
