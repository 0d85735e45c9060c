#include "host/tcp/tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "host/tcp/addresses.h"
#include "host/tcp/connection.h"
#include "host/tcp/handshake.h"

namespace mk::host {

namespace {

using namespace tcp;

constexpr u32 kEndpointMagic = 0x45504b4d;  // "MKPE"
constexpr u64 kMinSliceBytes = 4096;
constexpr u64 kLongestGoodbyeNs = 2'000'000'000;
constexpr u64 kMostQuietS = 15;             ///< before we ask whether the other machine is there
constexpr u64 kMostUnansweredMs = 60'000;

class Tcp final : public Transport {
 public:
  explicit Tcp(const Setup& setup) : setup_(setup), shared_{&setup_, device_} {
    std::snprintf(device_, sizeof device_, "%s", setup.device.empty() ? "tcp" : setup.device.c_str());
    party_ = {setup.rank, setup.world, setup.lanes, host_number(), {}, {}, {}};
    party_.tokens.resize(setup.world);
    party_.endpoints.resize(setup.world);
    party_.connected.resize(setup.world);
    completed_.resize(setup.max_outstanding);
  }

  Error open();
  const char* device() const noexcept override { return device_; }
  Registration registration() const noexcept override {
    return setup_.bounce.empty() ? Registration::kNone : Registration::kBounce;
  }
  Error register_memory() override { return {}; }
  Error endpoint(u32 peer, std::vector<u8>& blob) override;
  Error connect(u32 peer, std::span<const u8> blob) override;
  Error finish(u64 deadline_ns) override;
  int post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept override;
  int poll(std::span<u64> tickets, Error& error) noexcept override;
  void close(u64 deadline_ns) noexcept override;

 private:
  Error adopt(std::vector<Socket>& sockets);
  void tune(int descriptor) noexcept;
  void name_device(int descriptor);
  int flush(Connection& connection, Error& error) noexcept;
  int receive(Error& error) noexcept;

  const Setup setup_;
  char device_[40] = {};
  Shared shared_;
  Party party_;
  std::vector<Address> addresses_;
  Socket listener_, events_;
  u32 port_ = 0, strangers_ = 0;
  std::vector<std::unique_ptr<Connection>> connections_;  ///< [peer * lanes + lane]; null for ourselves
  std::vector<u64> completed_;                            ///< tickets that poll() has still to return
  u32 num_completed_ = 0;
};

Error Tcp::open() {
  if (setup_.region.kind == MemoryKind::kCuda || !setup_.bounce.empty()) {
    const u64 needed = u64{setup_.world} * setup_.lanes * 2 * kMinSliceBytes;
    if (setup_.copy.start == nullptr || setup_.bounce.size() < needed) {
      return fail({"tcp"}, EINVAL, "device memory needs copy functions and %llu bytes of pinned memory",
                  static_cast<unsigned long long>(needed));
    }
  }
  if (Error error = local_addresses(setup_.device, addresses_)) return error;
  for (Token& token : party_.tokens) {
    if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
      return fail({"getrandom"}, errno);
    }
  }
  return listen_anywhere(listener_, port_);
}

Error Tcp::endpoint(u32 peer, std::vector<u8>& blob) {
  Endpoint own{};
  own.magic = kEndpointMagic;
  own.port = port_;
  own.host = party_.host;
  own.token = party_.tokens[peer];
  own.num_addresses = static_cast<u32>(addresses_.size());
  std::copy(addresses_.begin(), addresses_.end(), own.addresses.begin());
  blob.resize(sizeof own);
  std::memcpy(blob.data(), &own, sizeof own);
  return {};
}

Error Tcp::connect(u32 peer, std::span<const u8> blob) {
  Endpoint& endpoint = party_.endpoints[peer];
  const Place place{"connect", device_, static_cast<i32>(peer)};
  if (peer == setup_.rank) return fail(place, EINVAL, "tcp does not connect a rank to itself");
  if (blob.size() != sizeof endpoint) return fail(place, EPROTO, "an endpoint of %zu bytes", blob.size());
  std::memcpy(&endpoint, blob.data(), sizeof endpoint);
  if (endpoint.magic != kEndpointMagic || endpoint.num_addresses > kMaxAddresses) {
    return fail(place, EPROTO, "not an endpoint of tcp");
  }
  party_.connected[peer] = 1;
  return {};
}

Error Tcp::finish(u64 deadline_ns) {
  std::vector<Socket> sockets;
  Error error = shake_hands(party_, listener_, deadline_ns, sockets, strangers_);
  listener_.reset();
  if (error) {
    if (error.device[0] == 0) std::memcpy(error.device, device_, sizeof error.device);
    return error;
  }
  return adopt(sockets);
}

Error Tcp::adopt(std::vector<Socket>& sockets) {
  events_ = Socket(epoll_create1(EPOLL_CLOEXEC));
  if (!events_) return fail({"epoll_create1", device_}, errno);
  // every connection has an equal part of the pinned memory
  const std::size_t part = setup_.bounce.size() / sockets.size() & ~(kMinSliceBytes - 1);
  connections_.resize(sockets.size());
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    if (!sockets[i]) continue;
    const int descriptor = sockets[i].get();
    const i32 peer = static_cast<i32>(i / setup_.lanes);
    tune(descriptor);
    name_device(descriptor);
    connections_[i] = std::make_unique<Connection>(std::move(sockets[i]), static_cast<u32>(peer), shared_,
                                                   setup_.max_outstanding, setup_.bounce.subspan(i * part, part));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = i;
    if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) {
      return fail({"epoll_ctl", device_, peer}, errno);
    }
  }
  return {};
}

/// Small messages at once; and a dead link or machine is noticed before those who wait for an arrival give up, also
/// where we only receive. Where a kernel refuses one of these, the proxy's own limit is left.
void Tcp::tune(int descriptor) noexcept {
  const auto set = [&](int level, int name, int value) {
    (void)setsockopt(descriptor, level, name, &value, sizeof value);
  };
  const u64 limit_ms = setup_.timeout_ns / 1'000'000;
  const u64 quiet_s = std::clamp<u64>(limit_ms / 4000, 1, kMostQuietS);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(quiet_s));
  set(IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(quiet_s));
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::clamp<u64>(limit_ms / 2, 1, kMostUnansweredMs)));
}

/// The interface that a connection uses, for errors and for `doctor`.
void Tcp::name_device(int descriptor) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return;
  Address address{storage.ss_family, {}};
  if (storage.ss_family == AF_INET) {
    std::memcpy(address.bytes.data(), &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, 4);
  } else {
    const in6_addr& given = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
    std::memcpy(address.bytes.data(), &given, 16);
    if (IN6_IS_ADDR_V4MAPPED(&given)) {
      address = {AF_INET, {given.s6_addr[12], given.s6_addr[13], given.s6_addr[14], given.s6_addr[15]}};
    }
  }
  const std::string name = interface_of(address);
  if (!name.empty()) std::snprintf(device_, sizeof device_, "%s", name.c_str());
}

int Tcp::flush(Connection& connection, Error& error) noexcept {
  u32 count = 0;
  const int status = connection.flush(std::span(completed_).subspan(num_completed_), count, error);
  num_completed_ += count;
  return status;
}

int Tcp::post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept {
  Connection& connection = *connections_[std::size_t{peer} * setup_.lanes + lane];
  if (!connection.is_open()) {
    error = fail({"post", device_, static_cast<i32>(peer)}, ENOTCONN, "the peer has closed its connection");
    return -1;
  }
  int taken = 0;
  for (const Write& write : writes) {
    if (!connection.push(write)) break;
    ++taken;
  }
  return flush(connection, error) < 0 ? -1 : taken;
}

int Tcp::receive(Error& error) noexcept {
  std::array<epoll_event, 32> events;
  const int count = epoll_wait(events_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    if (connections_[events[static_cast<std::size_t>(i)].data.u64]->receive(error) < 0) return -1;
  }
  return 0;
}

int Tcp::poll(std::span<u64> tickets, Error& error) noexcept {
  for (const auto& connection : connections_) {
    if (!connection || !connection->is_open()) continue;
    if (connection->has_copy() && connection->receive(error) < 0) return -1;
    if (connection->has_output() && flush(*connection, error) < 0) return -1;
  }
  if (receive(error) < 0) return -1;
  const u32 count = std::min(num_completed_, static_cast<u32>(tickets.size()));
  num_completed_ -= count;
  std::copy_n(completed_.begin() + num_completed_, count, tickets.begin());
  return static_cast<int>(count);
}

void Tcp::close(u64 deadline_ns) noexcept {
  const u64 until = std::min(deadline_ns, now_ns() + kLongestGoodbyeNs);
  for (const auto& connection : connections_) {
    if (connection) connection->say_goodbye(until);
  }
  for (const auto& connection : connections_) {
    if (connection) connection->leave(until);
  }
  connections_.clear();
  listener_.reset();
  events_.reset();
}

}  // namespace

Made make_tcp(const Setup& setup) {
  auto transport = std::make_unique<Tcp>(setup);
  if (Error error = transport->open()) return {nullptr, error};
  return {std::move(transport), {}};
}

}  // namespace mk::host
