// The sending half of a connection.
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "host/tcp/connection.h"
#include "host/wait.h"

namespace mk::host::tcp {

namespace {

constexpr u32 kParts = 2 * kMaxBatch;

iovec part(const void* base, u64 bytes) noexcept { return {const_cast<void*>(base), bytes}; }

}  // namespace

Connection::Connection(Socket socket, u32 peer, Shared& shared, u32 queue_capacity, std::span<std::byte> staging)
    : socket_(std::move(socket)), peer_(peer), shared_(shared), queue_(queue_capacity) {
  out_.memory = staging.first(staging.size() / 2);
  in_.memory = staging.subspan(staging.size() / 2);
}

bool Connection::push(const Write& write) noexcept {
  if (queued_ == queue_.size()) return false;
  const Frame frame{kFrameMagic, kData, write.slot, write.value, write.destination_offset, write.bytes};
  const std::byte* data = shared_.setup->region.base + write.source_offset;
  queue_[(first_ + queued_++) % queue_.size()] = {frame, data, write.ticket};
  return true;
}

/// What is left of the first messages, frame and payload each a part.
u32 Connection::gather(std::span<iovec> parts) noexcept {
  u32 count = 0;
  u64 skip = sent_;
  for (u32 i = 0; i < queued_ && count + 2 <= parts.size(); ++i) {
    const Outgoing& out = queue_[(first_ + i) % queue_.size()];
    const u64 of_frame = std::min<u64>(skip, sizeof out.frame);
    const u64 of_data = skip - of_frame;
    if (of_frame < sizeof out.frame) {
      parts[count++] = part(reinterpret_cast<const std::byte*>(&out.frame) + of_frame, sizeof out.frame - of_frame);
    }
    if (of_data < out.frame.bytes) parts[count++] = part(out.data + of_data, out.frame.bytes - of_data);
    skip = 0;
  }
  return count;
}

/// 1: the slice holds bytes to send; 0: its copy is on the way; -1: `error`.
int Connection::fill_slice(Error& error) noexcept {
  if (out_.state == Slice::kEmpty) {
    const u64 done = sent_ - std::min<u64>(sent_, sizeof(Frame));
    out_.bytes = std::min<u64>(out_.memory.size(), front().frame.bytes - done);
    out_.used = 0;
    if (start_copy(out_, out_.memory.data(), front().data + done, error) < 0) return -1;
  }
  return out_.state == Slice::kFull ? 1 : copy_state(out_, error);
}

/// The frame at the head, or the slice of its payload; 0 with `error` set where a copy failed.
u32 Connection::gather_staged(std::span<iovec> parts, Error& error) noexcept {
  const Outgoing& out = front();
  u32 count = 0;
  if (sent_ < sizeof out.frame) {
    parts[count++] = part(reinterpret_cast<const std::byte*>(&out.frame) + sent_, sizeof out.frame - sent_);
  }
  if (out.frame.bytes == 0) return count;
  const int state = fill_slice(error);
  if (state < 0) return 0;
  if (state == 1) {
    out_.state = Slice::kFull;
    parts[count++] = part(out_.memory.data() + out_.used, out_.bytes - out_.used);
  }
  return count;
}

void Connection::account(u64 sent, std::span<u64> tickets, u32& count) noexcept {
  if (out_.state == Slice::kFull) {
    const u64 of_frame = sent_ < sizeof(Frame) ? std::min<u64>(sent, sizeof(Frame) - sent_) : 0;
    out_.used += sent - of_frame;
    if (out_.used == out_.bytes) out_.state = Slice::kEmpty;
  }
  sent_ += sent;
  while (queued_ != 0 && sent_ >= sizeof(Frame) + front().frame.bytes) {
    sent_ -= sizeof(Frame) + front().frame.bytes;
    tickets[count++] = front().ticket;
    ++first_;
    --queued_;
  }
}

int Connection::flush(std::span<u64> tickets, u32& count, Error& error) noexcept {
  count = 0;
  while (queued_ != 0) {
    std::array<iovec, kParts> parts;
    const u32 num_parts = out_.memory.empty() ? gather(parts) : gather_staged(parts, error);
    if (error) return -1;
    if (num_parts == 0) return 0;
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = num_parts;
    const ssize_t sent = sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN || errno == EINTR ? 0 : lost("sendmsg", errno, error);
    account(static_cast<u64>(sent), tickets, count);
  }
  return 0;
}

void Connection::say_goodbye(u64 deadline_ns) noexcept {
  // a message that was cut off would make the goodbye part of its payload
  if (!socket_ || said_bye_ || queued_ != 0) return;
  const Frame bye{kFrameMagic, kBye, 0, 0, 0, 0};
  // what came before it has been taken by the kernel, whose buffer may be full
  pollfd room{socket_.get(), POLLOUT, 0};
  const u64 now = now_ns();
  (void)::poll(&room, 1, deadline_ns > now ? static_cast<int>((deadline_ns - now) / 1'000'000) : 0);
  (void)send(socket_.get(), &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT);
  shutdown(socket_.get(), SHUT_WR);
  is_leaving_ = true;
}

void Connection::leave(u64 deadline_ns) noexcept {
  const auto delivered = [this] {
    pollfd state{socket_.get(), 0, 0};
    // the peer has closed as well, or is gone: what it has not taken it never will
    if (::poll(&state, 1, 0) > 0 && (state.revents & (POLLERR | POLLHUP)) != 0) return true;
    int unsent = 0;
    return ioctl(socket_.get(), SIOCOUTQ, &unsent) != 0 || unsent == 0;
  };
  if (socket_ && is_leaving_) (void)wait_bounded(deadline_ns, delivered, [] { return false; });
  socket_.reset();
}

}  // namespace mk::host::tcp
