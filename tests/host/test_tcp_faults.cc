// tcp when the other side is a stranger, sends nonsense, or goes away.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "exchange.h"
#include "host/tcp/socket.h"
#include "host/tcp/wire.h"
#include "host/wait.h"

namespace mk::test {

namespace {

using namespace mk::host;
using tcp::Frame;
using tcp::Hello;
using tcp::Socket;

constexpr u64 kMillisecond = 1'000'000, kSecond = 1000 * kMillisecond;

tcp::Endpoint endpoint_of(Side& side, u32 peer) {
  std::vector<u8> blob;
  CHECK(!side.session->endpoint(peer, blob));
  tcp::Endpoint endpoint;
  std::memcpy(&endpoint, blob.data() + blob.size() - sizeof endpoint, sizeof endpoint);
  return endpoint;
}

void open_two(const Plan& plan, ProxyOptions options, Sides& sides) {
  options.transport = kTcp;
  for (u32 rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    CHECK(!open_side(plan, options, sides[rank]));
  }
}

Socket dial(u32 port) {
  Socket client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<u16>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK_EQUAL(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const timeval limit{20, 0};
  setsockopt(client.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(client.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  return client;
}

template <class Record>
void send_record(const Socket& client, const Record& record) {
  CHECK_EQUAL(send(client.get(), &record, sizeof record, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof record));
}

bool was_closed(const Socket& client) {
  char byte;
  const ssize_t count = recv(client.get(), &byte, 1, 0);
  return count == 0 || (count < 0 && errno != EAGAIN);
}

/// Rank 0 is a real side; rank 1 is the test, which knows the token.
struct Impostor {
  explicit Impostor(ProxyOptions options = options_for(Plan{})) {
    open_two(plan, options, sides);
    const tcp::Endpoint real = endpoint_of(sides[0], 1);
    std::vector<u8> blob;
    CHECK(!sides[1].session->endpoint(0, blob));
    CHECK(!sides[0].session->connect(1, blob));
    Error error;
    std::thread accepting([&] { error = sides[0].session->finish(now_ns() + 20 * kSecond); });
    client = dial(real.port);
    const Hello hello{tcp::kHelloMagic, 1, 2, 0, real.token};
    send_record(client, hello);
    Hello answer{};
    const ssize_t got = recv(client.get(), &answer, sizeof answer, MSG_WAITALL);
    send_record(client, hello);
    accepting.join();
    CHECK_EQUAL(got, static_cast<ssize_t>(sizeof answer));
    CHECK(answer.token == endpoint_of(sides[1], 0).token);
    CHECK(!error);
    CHECK(!sides[0].session->proxy().start());
  }
  Error fault() {
    Error error;
    Proxy& proxy = sides[0].session->proxy();
    CHECK_EQUAL(wait_bounded(now_ns() + 20 * kSecond, [&] { return proxy.fault(error); }, [] { return false; }), 0);
    return error;
  }
  u32 flag(u32 slot) {
    u32 seen = 0;
    (void)sides[0].session->wait_flag(slot, 1, now_ns() + kMillisecond, seen);
    return seen;
  }

  Plan plan;
  Sides sides;
  Socket client;
};

Frame data_frame(const Plan& plan) {
  return {tcp::kFrameMagic, tcp::kData, 3, 9, region_bytes(plan) - 64, 64};
}

void strangers_are_dropped_and_peers_still_meet() {
  Plan plan;
  plan.messages = 20;
  Sides sides;
  open_two(plan, options_for(plan), sides);
  const u32 port = endpoint_of(sides[0], 1).port;
  std::vector<Socket> strangers;
  for (int i = 0; i < 4; ++i) strangers.push_back(dial(port));
  send_record(strangers[1], std::array<char, 48>{'G', 'E', 'T', ' ', '/'});
  send_record(strangers[2], Hello{tcp::kHelloMagic, 1, 2, 0, {}});
  tcp::Token almost = endpoint_of(sides[0], 1).token;
  almost[15] ^= 1;
  send_record(strangers[3], Hello{tcp::kHelloMagic, 1, 2, 0, almost});
  CHECK(!connect_all(sides, 20 * kSecond));
  for (const Socket& stranger : strangers) CHECK(was_closed(stranger));
  const PairOutcome outcome = run_pair(plan, sides);
  CHECK_EQUAL(outcome.first.received + outcome.second.received, 40u);
  CHECK(!close_all(sides, 5 * kSecond));
}

void a_peer_that_does_not_come_is_named() {
  Plan plan;
  for (const u32 who : {0u, 1u}) {
    Sides sides;
  open_two(plan, options_for(plan), sides);
    std::vector<u8> blob;
    CHECK(!sides[1 - who].session->endpoint(who, blob));
    if (who == 1) sides[0].session.reset();  // nobody listens
    CHECK(!sides[who].session->connect(1 - who, blob));
    const u64 before = now_ns();
    const Error error = sides[who].session->finish(before + 100 * kMillisecond);
    CHECK_EQUAL(error.number, ETIMEDOUT);
    CHECK_EQUAL(error.peer, static_cast<i32>(1 - who));
    CHECK(now_ns() - before < 10 * kSecond);
  }
}

void bad_frames_close_the_connection_with_an_error() {
  const Plan plan;
  const Frame good = data_frame(plan);
  for (int wrong = 0; wrong < 5; ++wrong) {
    Frame frame = good;
    if (wrong == 0) frame.magic ^= 1;
    if (wrong == 1) frame.kind = 7;
    if (wrong == 2) frame.slot = 2 * plan.slots;
    if (wrong == 3) frame.bytes += 1;
    if (wrong == 4) frame.destination_offset = ~u64{0} - 3;
    Impostor impostor;
    send_record(impostor.client, frame);
    const Error error = impostor.fault();
    CHECK_EQUAL(error.number, EPROTO);
    CHECK_EQUAL(error.peer, 1);
    CHECK_EQUAL(std::string(error.call), std::string("frame"));
    CHECK(was_closed(impostor.client));
  }
}

void a_peer_that_vanishes_is_named_and_its_half_message_has_no_flag() {
  for (const bool in_a_message : {false, true}) {
    Impostor impostor;
    if (in_a_message) {
      send_record(impostor.client, data_frame(impostor.plan));
      send_record(impostor.client, std::array<char, 63>{});
    }
    impostor.client.reset();
    const Error error = impostor.fault();
    CHECK_EQUAL(error.number, ECONNRESET);
    CHECK_EQUAL(error.peer, 1);
    CHECK_EQUAL(std::string(error.device), std::string("lo"));
    CHECK_EQUAL(impostor.flag(3), 0u);
  }
}

void a_whole_message_has_its_flag() {
  Impostor impostor;
  send_record(impostor.client, data_frame(impostor.plan));
  send_record(impostor.client, std::array<char, 64>{});
  u32 seen = 0;
  CHECK_EQUAL(impostor.sides[0].session->wait_flag(3, 9, now_ns() + 20 * kSecond, seen), 0);
}

void a_goodbye_is_no_loss_but_the_peer_is_gone() {
  Impostor impostor;
  send_record(impostor.client, Frame{tcp::kFrameMagic, tcp::kBye, 0, 0, 0, 0});
  shutdown(impostor.client.get(), SHUT_WR);
  Session& session = *impostor.sides[0].session;
  CHECK(was_closed(impostor.client));  // the proxy has seen the end, and closed its side
  Error error;
  CHECK(!session.proxy().fault(error));
  u64 ticket = 0;
  CHECK_EQUAL(session.producer().push({0, 0, 64, 1, 0, 1, 0, 0}, now_ns() + kSecond, ticket), 0);
  CHECK_EQUAL(impostor.fault().number, ENOTCONN);
}

void a_peer_that_reads_nothing_is_named_after_the_limit() {
  Plan plan;
  plan.max_bytes = 4 << 20;
  ProxyOptions options = options_for(plan);
  options.timeout_ns = 100 * kMillisecond;
  Impostor impostor(options);
  u64 ticket = 0;
  for (u32 i = 0; i < 32; ++i) {
    const Command command{0, 0, 1 << 20, 1, i % 16, 1, 0, 0};
    if (impostor.sides[0].session->producer().push(command, now_ns() + 20 * kSecond, ticket) != 0) break;
  }
  const Error error = impostor.fault();
  CHECK_EQUAL(error.number, ETIMEDOUT);
  CHECK_EQUAL(error.peer, 1);
}

}  // namespace

std::vector<Test> tcp_fault_tests() {
  return {
      {"tcp/strangers_are_dropped_and_peers_still_meet", strangers_are_dropped_and_peers_still_meet},
      {"tcp/a_peer_that_does_not_come_is_named", a_peer_that_does_not_come_is_named},
      {"tcp/bad_frames_close_the_connection_with_an_error", bad_frames_close_the_connection_with_an_error},
      {"tcp/a_peer_that_vanishes_is_named_and_its_half_message_has_no_flag",
       a_peer_that_vanishes_is_named_and_its_half_message_has_no_flag},
      {"tcp/a_whole_message_has_its_flag", a_whole_message_has_its_flag},
      {"tcp/a_goodbye_is_no_loss_but_the_peer_is_gone", a_goodbye_is_no_loss_but_the_peer_is_gone},
      {"tcp/a_peer_that_reads_nothing_is_named_after_the_limit", a_peer_that_reads_nothing_is_named_after_the_limit},
  };
}

}  // namespace mk::test
