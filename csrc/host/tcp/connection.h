#pragma once
// One socket to one peer: frames out, frames in. Proxy thread only; nothing allocates.
#include <span>
#include <vector>

#include "host/tcp/socket.h"
#include "host/tcp/wire.h"
#include "host/transport.h"

namespace mk::host::tcp {

/// What connections of one transport share.
struct Shared {
  const Setup* setup;
  const char* device;
  u64 copy_token = 0;  ///< of the last copy that was started
};

/// A piece of a message in pinned memory, between a device that the socket can't read and the socket.
struct Slice {
  enum State : u32 { kEmpty, kCopying, kFull };
  std::span<std::byte> memory;
  State state = kEmpty;
  u64 bytes = 0;  ///< in the slice
  u64 used = 0;   ///< of those: sent, or received
  u64 token = 0;
};

class Connection {
 public:
  /// `staging` is empty where sockets can read and write the region; else one half of it serves each direction.
  Connection(Socket socket, u32 peer, Shared& shared, u32 queue_capacity, std::span<std::byte> staging);

  int descriptor() const noexcept { return socket_.get(); }
  u32 peer() const noexcept { return peer_; }
  bool is_open() const noexcept { return static_cast<bool>(socket_); }
  bool has_output() const noexcept { return queued_ != 0; }
  /// Has it received what is still on its way to the device?
  bool has_copy() const noexcept { return in_.state == Slice::kCopying; }

  /// Queues a message; false where the queue is full.
  bool push(const Write& write) noexcept;
  /// Sends what the socket takes. Tickets of messages that have left go to `tickets`, which must have room for
  /// the whole queue; `count` is their number. -1: `error`.
  int flush(std::span<u64> tickets, u32& count, Error& error) noexcept;
  /// Receives up to a budget, and publishes flags of whole messages. 1: something came; 0: nothing; -1: `error`.
  int receive(Error& error) noexcept;
  /// Tells the peer that nothing more comes. Control thread, as leave().
  void say_goodbye(u64 deadline_ns) noexcept;
  /// Closes, once the peer's machine has everything that was sent, the peer has gone, or at the deadline.
  void leave(u64 deadline_ns) noexcept;

 private:
  struct Outgoing {
    Frame frame;
    const std::byte* data;
    u64 ticket;
  };

  Outgoing& front() noexcept { return queue_[first_ % queue_.size()]; }
  u32 gather(std::span<struct iovec> parts) noexcept;
  u32 gather_staged(std::span<struct iovec> parts, Error& error) noexcept;
  void account(u64 sent, std::span<u64> tickets, u32& count) noexcept;
  int fill_slice(Error& error) noexcept;

  int receive_frame(Error& error) noexcept;
  int check_frame(Error& error) noexcept;
  int receive_payload(u64& budget, Error& error) noexcept;
  int receive_staged(u64& budget, Error& error) noexcept;
  int end_message(Error& error) noexcept;
  /// Bytes received; 0: none now; -1: `error`, or the peer has gone.
  ssize_t read_some(std::byte* to, u64 bytes, Error& error) noexcept;
  int start_copy(Slice& slice, void* to, const void* from, Error& error) noexcept;
  int copy_state(const Slice& slice, Error& error) noexcept;
  int lost(const char* call, i32 number, Error& error) noexcept;

  Socket socket_;
  u32 peer_;
  Shared& shared_;
  Slice out_, in_;

  std::vector<Outgoing> queue_;
  u64 first_ = 0;   ///< number of the message at the head
  u32 queued_ = 0;
  u64 sent_ = 0;    ///< bytes of the head, frame included

  Frame frame_{};
  u64 frame_got_ = 0;
  u64 payload_got_ = 0;
  bool said_bye_ = false;    ///< the peer has
  bool is_leaving_ = false;  ///< we have
};

}  // namespace mk::host::tcp
