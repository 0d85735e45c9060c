#include "host/tcp/handshake.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "host/transport.h"

namespace mk::host::tcp {

namespace {

constexpr u64 kMillisecondNs = 1'000'000;
constexpr u64 kAnswerNs = 5'000 * kMillisecondNs;  ///< for a hello, and for one address to answer
constexpr u64 kPauseNs = 50 * kMillisecondNs;      ///< before all addresses are tried again
constexpr u64 kRoundNs = 100 * kMillisecondNs;
constexpr std::size_t kMaxGuests = 64;

/// Comparison that takes as long for a wrong token as for a right one.
bool same(const Token& a, const Token& b) {
  u32 difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<u32>(a[i] ^ b[i]);
  return difference == 0;
}

/// A hello that comes in, maybe in parts.
struct Incoming {
  Hello hello{};
  std::size_t got = 0;

  /// 1: complete; 0: more to come; -1: closed or broken.
  int receive(int descriptor) {
    const ssize_t count = recv(descriptor, reinterpret_cast<char*>(&hello) + got, sizeof hello - got, MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
    if (count == 0) return -1;
    got += static_cast<std::size_t>(count);
    return got == sizeof hello ? 1 : 0;
  }
};

/// Somebody who connected. A guest who has shown a good token is answered, and belongs to us once it says hello again:
/// a peer that gave this connection up before we looked never does.
struct Guest {
  Socket socket;
  Incoming incoming;
  u64 since_ns;
  bool answered = false;
};

/// One connection that we make.
struct Dial {
  u32 peer, lane;
  Socket socket;
  Incoming incoming;
  u64 since_ns = 0;
  u32 next_address = 0;
  bool greeted = false;
  int last_errno = 0;
};

bool send_hello(int descriptor, const Hello& hello) {
  // a fresh socket has room for 32 bytes
  return send(descriptor, &hello, sizeof hello, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof hello);
}

socklen_t socket_address(const Address& address, u32 port, sockaddr_storage& storage) {
  storage = {};
  if (address.family == AF_INET) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<u16>(port));
    std::memcpy(&v4->sin_addr, address.bytes.data(), 4);
    return sizeof *v4;
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(static_cast<u16>(port));
  std::memcpy(&v6->sin6_addr, address.bytes.data(), 16);
  return sizeof *v6;
}

class Handshake {
 public:
  Handshake(const Party& party, const Socket& listener, std::vector<Socket>& sockets, u32& strangers)
      : party_(party), listener_(listener), sockets_(sockets), strangers_(strangers) {
    sockets_.clear();
    sockets_.resize(std::size_t{party.world} * party.lanes);
    for (u32 peer = 0; peer < party.rank; ++peer) {
      for (u32 lane = 0; lane < party.lanes && party.connected[peer]; ++lane) dials_.push_back({peer, lane, {}, {}});
    }
  }

  Error run(u64 deadline_ns) {
    while (!complete()) {
      const u64 now = now_ns();
      if (now >= deadline_ns) return missing();
      start_dials(now);
      wait(std::min(deadline_ns - now, kRoundNs));
      welcome();
      hear_guests();
      hear_answers();
    }
    return {};
  }

 private:
  Socket& place(u32 peer, u32 lane) { return sockets_[std::size_t{peer} * party_.lanes + lane]; }
  Hello hello_to(u32 peer, u32 lane) const {
    return {kHelloMagic, party_.rank, party_.world, lane, party_.endpoints[peer].token};
  }
  bool complete();
  Error missing();
  std::vector<Address> addresses(u32 peer) const;
  void start_dials(u64 now);
  void start(Dial& dial, u64 now);
  void wait(u64 limit_ns);
  void welcome();
  void hear_guests();
  bool is_known(const Hello& hello) const;
  int hear(Guest& guest);
  void hear_answers();
  int hear(Dial& dial);

  const Party& party_;
  const Socket& listener_;
  std::vector<Socket>& sockets_;
  u32& strangers_;
  std::vector<Guest> guests_;
  std::vector<Dial> dials_;
};

bool Handshake::complete() {
  for (u32 peer = 0; peer < party_.world; ++peer) {
    for (u32 lane = 0; lane < party_.lanes; ++lane) {
      if (party_.connected[peer] && !place(peer, lane)) return false;
    }
  }
  return true;
}

Error Handshake::missing() {
  for (u32 peer = 0; peer < party_.world; ++peer) {
    for (u32 lane = 0; lane < party_.lanes; ++lane) {
      if (!party_.connected[peer] || place(peer, lane)) continue;
      const Place where{peer < party_.rank ? "connect" : "accept", "", static_cast<i32>(peer)};
      const auto dial = std::find_if(dials_.begin(), dials_.end(),
                                     [&](const Dial& one) { return one.peer == peer && one.lane == lane; });
      const char* last = dial != dials_.end() && dial->last_errno != 0 ? std::strerror(dial->last_errno) : "no answer";
      return fail(where, ETIMEDOUT, "connection %u of %u: %s; %u strangers dropped", lane, party_.lanes, last,
                  strangers_);
    }
  }
  return {};
}

/// Best first: the loopback where the peer is on this machine.
std::vector<Address> Handshake::addresses(u32 peer) const {
  const Endpoint& endpoint = party_.endpoints[peer];
  std::vector<Address> all;
  all.reserve(1 + endpoint.num_addresses);
  if (endpoint.host == party_.host) all.push_back({AF_INET, {127, 0, 0, 1}});
  for (u32 i = 0; i < endpoint.num_addresses; ++i) all.push_back(endpoint.addresses[i]);
  return all;
}

void Handshake::start_dials(u64 now) {
  for (Dial& dial : dials_) {
    if (place(dial.peer, dial.lane)) continue;
    if (dial.socket && now - dial.since_ns > kAnswerNs) {
      dial.last_errno = ETIMEDOUT;
      dial.socket.reset();
    }
    if (!dial.socket) start(dial, now);
  }
}

void Handshake::start(Dial& dial, u64 now) {
  const std::vector<Address> all = addresses(dial.peer);
  if (dial.next_address >= all.size()) {
    if (now - dial.since_ns < kPauseNs) return;
    dial.next_address = 0;
  }
  dial.since_ns = now;
  if (all.empty()) return;
  const Address& address = all[dial.next_address++];
  sockaddr_storage storage;
  const socklen_t size = socket_address(address, party_.endpoints[dial.peer].port, storage);
  dial.socket = Socket(socket(static_cast<int>(address.family), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  dial.incoming = {};
  dial.greeted = false;
  if (dial.socket && connect(dial.socket.get(), reinterpret_cast<const sockaddr*>(&storage), size) != 0 &&
      errno != EINPROGRESS) {
    dial.last_errno = errno;
    dial.socket.reset();
  }
}

void Handshake::wait(u64 limit_ns) {
  std::vector<pollfd> watched{{listener_.get(), POLLIN, 0}};
  for (const Guest& guest : guests_) watched.push_back({guest.socket.get(), POLLIN, 0});
  for (const Dial& dial : dials_) {
    if (dial.socket) watched.push_back({dial.socket.get(), static_cast<short>(dial.greeted ? POLLIN : POLLOUT), 0});
  }
  const u64 limit_ms = std::max<u64>(limit_ns / kMillisecondNs, 1);
  const bool pausing = std::any_of(dials_.begin(), dials_.end(), [this](const Dial& dial) {
    return !dial.socket && !place(dial.peer, dial.lane);
  });
  (void)poll(watched.data(), watched.size(), static_cast<int>(pausing ? std::min<u64>(limit_ms, 10) : limit_ms));
}

void Handshake::welcome() {
  while (true) {
    Socket socket(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) return;
    if (guests_.size() == kMaxGuests) {  // the oldest silent one makes room
      guests_.erase(guests_.begin());
      ++strangers_;
    }
    guests_.push_back({std::move(socket), {}, now_ns()});
  }
}

void Handshake::hear_guests() {
  const u64 now = now_ns();
  std::erase_if(guests_, [&](Guest& guest) {
    const int state = hear(guest);
    if (state == 0 && now - guest.since_ns <= kAnswerNs) return false;
    if (state <= 0) ++strangers_;
    return true;
  });
}

bool Handshake::is_known(const Hello& hello) const {
  // whoever dials has the higher rank
  return hello.magic == kHelloMagic && hello.world == party_.world && hello.rank < party_.world &&
         hello.rank > party_.rank && hello.lane < party_.lanes && party_.connected[hello.rank] &&
         same(hello.token, party_.tokens[hello.rank]);
}

/// 1: connected; 0: not yet; -1: a stranger, or gone.
int Handshake::hear(Guest& guest) {
  const int state = guest.incoming.receive(guest.socket.get());
  if (state <= 0) return state;
  const Hello hello = guest.incoming.hello;
  if (!is_known(hello)) return -1;
  if (guest.answered) {
    place(hello.rank, hello.lane) = std::move(guest.socket);
    return 1;
  }
  guest.incoming = {};
  guest.answered = true;
  return send_hello(guest.socket.get(), hello_to(hello.rank, hello.lane)) ? 0 : -1;
}

void Handshake::hear_answers() {
  for (Dial& dial : dials_) {
    if (!dial.socket) continue;
    const int state = hear(dial);
    if (state > 0) place(dial.peer, dial.lane) = std::move(dial.socket);
    if (state < 0) dial.socket.reset();
  }
}

/// 1: connected and known; 0: not yet; -1: this address is none.
int Handshake::hear(Dial& dial) {
  if (!dial.greeted) {
    pollfd ready{dial.socket.get(), POLLOUT, 0};
    if (poll(&ready, 1, 0) <= 0) return 0;
    socklen_t size = sizeof dial.last_errno;
    getsockopt(dial.socket.get(), SOL_SOCKET, SO_ERROR, &dial.last_errno, &size);
    if (dial.last_errno != 0) return -1;
    if (!send_hello(dial.socket.get(), hello_to(dial.peer, dial.lane))) return -1;
    dial.greeted = true;
  }
  const int state = dial.incoming.receive(dial.socket.get());
  if (state < 0) dial.last_errno = ECONNRESET;
  if (state <= 0) return state;
  const Hello& hello = dial.incoming.hello;
  const bool known = hello.magic == kHelloMagic && hello.rank == dial.peer && hello.world == party_.world &&
                     hello.lane == dial.lane && same(hello.token, party_.tokens[dial.peer]);
  if (!known) dial.last_errno = EACCES;
  return known && send_hello(dial.socket.get(), hello_to(dial.peer, dial.lane)) ? 1 : -1;
}

}  // namespace

Error listen_anywhere(Socket& listener, u32& port) {
  listener = Socket(socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_storage storage{};
  socklen_t size = sizeof(sockaddr_in6);
  const int off = 0;
  const auto bind_to = [&](sa_family_t family) {
    storage.ss_family = family;  // any address, any port
    return listener && bind(listener.get(), reinterpret_cast<const sockaddr*>(&storage), size) == 0;
  };
  bool bound = listener && setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0;
  bound = bound && bind_to(AF_INET6);
  if (!bound) {  // a kernel without IPv6
    listener = Socket(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    size = sizeof(sockaddr_in);
    if (!bind_to(AF_INET)) return fail({"bind"}, errno);
  }
  if (listen(listener.get(), SOMAXCONN) != 0) return fail({"listen"}, errno);
  size = sizeof storage;
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return fail({"getsockname"}, errno);
  }
  port = ntohs(storage.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in&>(storage).sin_port
                                            : reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
  return {};
}

Error shake_hands(const Party& party, const Socket& listener, u64 deadline_ns, std::vector<Socket>& sockets,
                  u32& strangers) {
  return Handshake(party, listener, sockets, strangers).run(deadline_ns);
}

}  // namespace mk::host::tcp
