#include "host/emulated/emulated.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "host/arrivals.h"
#include "host/flags.h"

namespace mk::host {

namespace {

constexpr u32 kPieces = 3;  ///< data pieces of a shuffled message
constexpr u64 kPieceAlignment = 16;

/// What a rank tells the others.
struct Endpoint {
  u64 base, bytes, flags_offset;
  u32 num_flags, process;
};

struct Peer {
  std::byte* base = nullptr;
  Endpoint endpoint{};
};

/// A part of a message on its way. The last part of a message is its flag.
struct Piece {
  u64 due_ns;
  u32 message;
  std::byte* destination;
  const std::byte* source;
  u64 bytes;
  bool is_flag;
};

/// A message on its way.
struct Message {
  Write write;
  u32 peer;
  u32 pieces;  ///< of which are left
};

class Emulated final : public Transport {
 public:
  Emulated(const Setup& setup, const EmulatedLink& link, std::vector<std::byte*> peer_bases)
      : setup_(setup), link_(link), peer_bases_(std::move(peer_bases)), peers_(setup.world), random_(setup.seed) {
    messages_.resize(setup.max_outstanding);
    for (u32 i = 0; i < setup.max_outstanding; ++i) free_.push_back(setup.max_outstanding - 1 - i);
    pieces_.reserve(std::size_t{setup.max_outstanding} * (kPieces + 1));
  }

  const char* device() const noexcept override { return "emulated"; }
  Registration registration() const noexcept override { return Registration::kNone; }
  Error register_memory() override { return {}; }
  Error endpoint(u32 peer, std::vector<u8>& blob) override;
  Error connect(u32 peer, std::span<const u8> blob) override;
  Error finish(u64) override { return {}; }
  int post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept override;
  int poll(std::span<u64> tickets, Error& error) noexcept override;
  void close(u64) noexcept override { pieces_.clear(); }

 private:
  bool has_engine() const noexcept { return setup_.copy.start != nullptr; }
  bool is_cut(const Write& write) const noexcept {
    return link_.order != kInOrder && !has_engine() && write.bytes != 0;
  }
  u64 arrival(u64 bytes, u64 now) noexcept;
  void cut(u32 id, u64 due_ns) noexcept;
  void add(const Piece& piece) noexcept;
  int deliver(const Piece& piece, Error& error) noexcept;
  int set_flag(const Message& message, Error& error) noexcept;

  const Setup setup_;
  const EmulatedLink link_;
  const std::vector<std::byte*> peer_bases_;
  std::vector<Peer> peers_;
  std::vector<Message> messages_;
  std::vector<u32> free_;
  std::vector<Piece> pieces_;  ///< a heap, earliest first
  std::mt19937_64 random_;
  u64 link_free_ns_ = 0;
  u64 last_due_ns_ = 0;
};

/// What deliver() found.
enum Delivery : int { kFailed = -1, kCopying = 0, kComplete = 1, kMoreToCome = 2 };

/// Order of the heap: the earliest piece on top.
bool later(const Piece& a, const Piece& b) noexcept { return a.due_ns > b.due_ns; }

Error Emulated::endpoint(u32, std::vector<u8>& blob) {
  const Endpoint own{reinterpret_cast<u64>(setup_.region.base), setup_.region.bytes, setup_.region.flags_offset,
                     setup_.region.num_flags, static_cast<u32>(getpid())};
  blob.resize(sizeof own);
  std::memcpy(blob.data(), &own, sizeof own);
  return {};
}

Error Emulated::connect(u32 peer, std::span<const u8> blob) {
  const Place place{"connect", device(), static_cast<i32>(peer)};
  if (blob.size() != sizeof(Endpoint)) return fail(place, EPROTO, "an endpoint of %zu bytes", blob.size());
  Peer& other = peers_[peer];
  std::memcpy(&other.endpoint, blob.data(), sizeof other.endpoint);
  if (!peer_bases_.empty()) {
    other.base = peer_bases_[peer];
  } else if (other.endpoint.process == static_cast<u32>(getpid())) {
    other.base = reinterpret_cast<std::byte*>(other.endpoint.base);
  }
  if (other.base == nullptr) return fail(place, EINVAL, "another process, and its memory is not mapped here");
  return {};
}

u64 Emulated::arrival(u64 bytes, u64 now) noexcept {
  link_free_ns_ = std::max(link_free_ns_, now);
  if (link_.bandwidth_bytes_per_s != 0) {
    const double rate = static_cast<double>(link_.bandwidth_bytes_per_s);
    link_free_ns_ += static_cast<u64>(static_cast<double>(bytes) * 1e9 / rate);
  }
  u64 due_ns = link_free_ns_ + link_.latency_ns;
  if (link_.order == kInOrder && link_.shuffle_ns != 0) due_ns += random_() % link_.shuffle_ns;
  if (link_.order == kInOrder) due_ns = last_due_ns_ = std::max(due_ns, last_due_ns_);
  return due_ns;
}

void Emulated::add(const Piece& piece) noexcept {
  pieces_.push_back(piece);  // reserved for all messages
  std::push_heap(pieces_.begin(), pieces_.end(), later);
}

void Emulated::cut(u32 id, u64 due_ns) noexcept {
  Message& message = messages_[id];
  const Write& write = message.write;
  std::byte* destination = peers_[message.peer].base + write.destination_offset;
  const std::byte* source = setup_.region.base + write.source_offset;
  const u64 size = (write.bytes / kPieces + kPieceAlignment) / kPieceAlignment * kPieceAlignment;
  const auto extra = [this] { return link_.shuffle_ns == 0 ? 0 : random_() % link_.shuffle_ns; };
  message.pieces = 1;
  for (u64 begin = 0; begin < write.bytes; begin += size) {
    ++message.pieces;
    add({due_ns + extra(), id, destination + begin, source + begin, std::min(size, write.bytes - begin), false});
  }
  add({due_ns + extra(), id, nullptr, nullptr, 0, true});
}

int Emulated::post(u32 peer, u32, std::span<const Write> writes, Error& error) noexcept {
  const u64 now = now_ns();
  int taken = 0;
  for (const Write& write : writes) {
    if (free_.empty()) break;
    const u32 id = free_.back();
    free_.pop_back();
    messages_[id] = {write, peer, 1};
    const u64 due_ns = arrival(write.bytes, now);
    std::byte* destination = peers_[peer].base + write.destination_offset;
    const std::byte* source = setup_.region.base + write.source_offset;
    if (is_cut(write)) {
      cut(id, due_ns);
    } else {
      const u64 extra = link_.order == kInOrder || link_.shuffle_ns == 0 ? 0 : random_() % link_.shuffle_ns;
      add({due_ns + extra, id, destination, source, write.bytes, true});
      if (has_engine() && write.bytes != 0) {
        const i32 status = setup_.copy.start(setup_.copy.context, destination, source, write.bytes, write.ticket);
        if (status < 0) {
          error = fail({"copy", device(), static_cast<i32>(peer)}, -status, "%llu bytes",
                       static_cast<unsigned long long>(write.bytes));
          return -1;
        }
      }
    }
    ++taken;
  }
  return taken;
}

int Emulated::set_flag(const Message& message, Error& error) noexcept {
  const Peer& peer = peers_[message.peer];
  std::byte* flag = flag_address(peer.base, peer.endpoint.flags_offset, message.write.slot);
  if (const i32 status = store_flag(setup_.flag_writer, flag, message.write.value)) {
    error = fail({"flag", device(), static_cast<i32>(message.peer)}, status, "flag %u", message.write.slot);
    return -1;
  }
  return 0;
}

int Emulated::deliver(const Piece& piece, Error& error) noexcept {
  Message& message = messages_[piece.message];
  if (has_engine() && piece.bytes != 0) {
    const i32 status = setup_.copy.finished(setup_.copy.context, message.write.ticket);
    if (status < 0) {
      error = fail({"copy", device(), static_cast<i32>(message.peer)}, -status, "ticket %llu",
                   static_cast<unsigned long long>(message.write.ticket));
      return kFailed;
    }
    if (status == 0) return kCopying;
  } else if (piece.bytes != 0) {
    std::memcpy(piece.destination, piece.source, piece.bytes);
  }
  if (piece.is_flag && link_.order == kUncounted && set_flag(message, error) < 0) return kFailed;
  if (--message.pieces != 0) return kMoreToCome;
  if (link_.order != kUncounted && set_flag(message, error) < 0) return kFailed;
  return kComplete;
}

int Emulated::poll(std::span<u64> tickets, Error& error) noexcept {
  const u64 now = now_ns();
  int count = 0;
  while (!pieces_.empty() && pieces_.front().due_ns <= now && static_cast<std::size_t>(count) < tickets.size()) {
    const int state = deliver(pieces_.front(), error);
    if (state == kFailed) return -1;
    if (state == kCopying) break;  // behind its time; engines finish in order
    const u32 id = pieces_.front().message;
    std::pop_heap(pieces_.begin(), pieces_.end(), later);
    pieces_.pop_back();
    if (state != kComplete) continue;
    tickets[static_cast<std::size_t>(count++)] = messages_[id].write.ticket;
    free_.push_back(id);
  }
  return count;
}

}  // namespace

Made make_emulated(const Setup& setup, const EmulatedLink& link, std::vector<std::byte*> peer_bases) {
  if (!peer_bases.empty() && peer_bases.size() != setup.world) {
    return {nullptr, fail({"emulated"}, EINVAL, "%zu regions for %u ranks", peer_bases.size(), setup.world)};
  }
  return {std::make_unique<Emulated>(setup, link, std::move(peer_bases)), {}};
}

}  // namespace mk::host
