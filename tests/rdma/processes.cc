#include "processes.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "host/wait.h"

namespace mk::test {

namespace {

constexpr const char* kAddressOfRank0 = "10.78.0.1";
constexpr u32 kFirstPort = 7000;
constexpr time_t kLimitS = 60;             // of one word
constexpr u64 kLimitToMeetNs = 200'000'000'000;  // one machine may have more tests before than the other
constexpr std::chrono::milliseconds kBetweenTries{50};
constexpr u32 kMostBytes = 1 << 20;

[[noreturn]] void refuse(const char* call) { throw Failure(std::string(call) + ": " + std::strerror(errno)); }

sockaddr_in address_of(u32 number) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<u16>(kFirstPort + number));
  CHECK(inet_pton(AF_INET, kAddressOfRank0, &address.sin_addr) == 1);
  return address;
}

void limit(int descriptor, time_t seconds) {
  const timeval most{seconds, 0};
  (void)setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
}

int accept_other(const sockaddr_in& address) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  limit(listener, static_cast<time_t>(kLimitToMeetNs / 1'000'000'000));
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) refuse("bind");
  if (listen(listener, 1) != 0) refuse("listen");
  const int descriptor = accept(listener, nullptr, nullptr);
  if (descriptor < 0) refuse("accept");
  close(listener);
  return descriptor;
}

int connect_to_other(const sockaddr_in& address) {
  int descriptor = -1;
  const auto connected = [&] {
    descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return true;
    close(descriptor);
    std::this_thread::sleep_for(kBetweenTries);
    return false;
  };
  const int status = host::wait_bounded(host::now_ns() + kLimitToMeetNs, connected, [] { return false; });
  errno = status;
  if (status != 0) refuse("connect");
  return descriptor;
}

void receive_all(int descriptor, void* to, std::size_t bytes) {
  auto* at = static_cast<u8*>(to);
  while (bytes != 0) {
    const ssize_t got = recv(descriptor, at, bytes, 0);
    if (got == 0) throw Failure("the other process has gone");
    if (got < 0) refuse("recv");
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

}  // namespace

Channel::Channel(int descriptor) : descriptor_(descriptor) { limit(descriptor, kLimitS); }

Channel::~Channel() {
  if (descriptor_ >= 0) close(descriptor_);
}

void Channel::send(std::span<const u8> bytes) {
  const u32 size = static_cast<u32>(bytes.size());
  std::vector<u8> frame(sizeof size + size);
  std::memcpy(frame.data(), &size, sizeof size);
  if (size != 0) std::memcpy(frame.data() + sizeof size, bytes.data(), size);
  const ssize_t sent = ::send(descriptor_, frame.data(), frame.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(frame.size())) refuse("send");
}

std::vector<u8> Channel::receive() {
  u32 size = 0;
  receive_all(descriptor_, &size, sizeof size);
  CHECK(size <= kMostBytes);
  std::vector<u8> bytes(size);
  receive_all(descriptor_, bytes.data(), size);
  return bytes;
}

void Channel::meet() {
  send({});
  CHECK(receive().empty());
}

Channel channel_to_other_machine(u32 rank, u32 number) {
  const sockaddr_in address = address_of(number);
  const int descriptor = rank == 0 ? accept_other(address) : connect_to_other(address), yes = 1;
  (void)setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return Channel(descriptor);
}

Child::Child(const std::function<void(Channel&)>& body) {
  start([&](Channel& channel) {
    try {
      body(channel);
      return 0;
    } catch (const std::exception& error) {
      std::printf("  in the other process: %s\n", error.what());
      return 1;
    }
  });
}

Child::Child(const std::vector<std::string>& command) {
  start([&](Channel& channel) {
    (void)setenv("CHANNEL", std::to_string(channel.descriptor()).c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    (void)dup2(STDOUT_FILENO, STDERR_FILENO);
    (void)execv(arguments[0], arguments.data());
    return 127;
  });
}

void Child::start(const std::function<int(Channel&)>& body) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) refuse("socketpair");
  std::fflush(stdout);
  id_ = fork();
  if (id_ < 0) refuse("fork");
  if (id_ == 0) {
    close(ends[0]);
    Channel channel(ends[1]);
    const int status = body(channel);
    std::fflush(stdout);
    _exit(status);
  }
  close(ends[1]);
  channel_ = std::make_unique<Channel>(ends[0]);
}

int Child::status() {
  if (id_ < 0) return status_;
  int how = 0;
  if (waitpid(id_, &how, 0) < 0) refuse("waitpid");
  id_ = -1;
  status_ = WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
  return status_;
}

Child::~Child() {
  if (id_ < 0) return;
  (void)kill(id_, SIGKILL);
  (void)waitpid(id_, nullptr, 0);
}

}  // namespace mk::test
