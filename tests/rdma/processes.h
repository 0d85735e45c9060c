#pragma once
// Ranks in processes of their own, on one machine or two, and what they tell each other beside the network under test.
#include <sys/types.h>

#include <functional>
#include <span>
#include <vector>

#include "check.h"
#include "abi/types.h"

namespace mk::test {

/// A stream to one other process. Each call fails where that one has gone, or says nothing for too long.
class Channel {
 public:
  explicit Channel(int descriptor);
  Channel(Channel&& other) noexcept : descriptor_(other.descriptor_) { other.descriptor_ = -1; }
  Channel& operator=(Channel&&) = delete;
  ~Channel();

  void send(std::span<const u8> bytes);
  std::vector<u8> receive();
  /// Returns when both have come here.
  void meet();
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

/// To the process that calls this with the other rank in the other machine; `number` is that of the test.
Channel channel_to_other_machine(u32 rank, u32 number);

/// A process forked from this one, which must have no other thread, with a channel to it.
class Child {
 public:
  /// `body` runs there; what it throws is printed, and makes the status 1.
  explicit Child(const std::function<void(Channel&)>& body);
  /// Executes a program there; $CHANNEL is the descriptor of its end.
  explicit Child(const std::vector<std::string>& command);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child();  ///< kills it where it still runs

  Channel& channel() { return *channel_; }
  /// Waits for its end. Exit status, or 128 + signal.
  int status();

 private:
  void start(const std::function<int(Channel&)>& body);

  std::unique_ptr<Channel> channel_;
  pid_t id_ = -1;
  int status_ = -1;
};

}  // namespace mk::test
