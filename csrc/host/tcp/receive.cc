// The receiving half of a connection, and what both halves share.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "host/tcp/connection.h"

namespace mk::host::tcp {

namespace {

constexpr u64 kBudgetBytes = 4 << 20;  ///< received from one connection before others have their turn
constexpr u32 kFramesAtOnce = 64;

}  // namespace

int Connection::lost(const char* call, i32 number, Error& error) noexcept {
  const char* how = number == ECONNRESET ? "the peer's process ended, or its machine closed the connection" : "";
  error = fail({call, shared_.device, static_cast<i32>(peer_)}, number, "%s", how);
  return -1;
}

ssize_t Connection::read_some(std::byte* to, u64 bytes, Error& error) noexcept {
  const ssize_t count = recv(socket_.get(), to, bytes, MSG_DONTWAIT);
  if (count > 0) return count;
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (said_bye_) {
    socket_.reset();
    return 0;
  }
  return lost("recv", count == 0 ? ECONNRESET : errno, error);
}

int Connection::start_copy(Slice& slice, void* to, const void* from, Error& error) noexcept {
  const CopyEngine& copy = shared_.setup->copy;
  slice.token = ++shared_.copy_token;
  slice.state = Slice::kCopying;
  const i32 status = copy.start(copy.context, to, from, slice.bytes, slice.token);
  if (status >= 0) return 0;
  error = fail({"copy", shared_.device, static_cast<i32>(peer_)}, -status);
  return -1;
}

int Connection::copy_state(const Slice& slice, Error& error) noexcept {
  const CopyEngine& copy = shared_.setup->copy;
  const i32 status = copy.finished(copy.context, slice.token);
  if (status >= 0) return status;
  error = fail({"copy", shared_.device, static_cast<i32>(peer_)}, -status);
  return -1;
}

int Connection::check_frame(Error& error) noexcept {
  const Region& region = shared_.setup->region;
  const bool inside = frame_.bytes <= region.bytes && frame_.destination_offset <= region.bytes - frame_.bytes;
  if (frame_.magic == kFrameMagic && frame_.kind == kData && inside && frame_.slot < region.num_flags) return 0;
  error = fail({"frame", shared_.device, static_cast<i32>(peer_)}, EPROTO,
               "bad frame: magic %08x kind %u slot %u, %llu bytes at %llu of %llu", frame_.magic, frame_.kind,
               frame_.slot, static_cast<unsigned long long>(frame_.bytes),
               static_cast<unsigned long long>(frame_.destination_offset),
               static_cast<unsigned long long>(region.bytes));
  socket_.reset();
  return -1;
}

/// 1: a frame is there; 0: not yet; -1: `error`.
int Connection::receive_frame(Error& error) noexcept {
  if (frame_got_ < sizeof frame_) {
    const ssize_t count =
        read_some(reinterpret_cast<std::byte*>(&frame_) + frame_got_, sizeof frame_ - frame_got_, error);
    if (count <= 0) return static_cast<int>(count);
    frame_got_ += static_cast<u64>(count);
    if (frame_got_ < sizeof frame_) return 0;
    payload_got_ = 0;
    if (frame_.magic == kFrameMagic && frame_.kind == kBye) {
      said_bye_ = true;
      frame_got_ = 0;
      return 0;
    }
    if (check_frame(error) < 0) return -1;
  }
  return 1;
}

/// 1: all of it is in place; 0: not yet; -1: `error`.
int Connection::receive_payload(u64& budget, Error& error) noexcept {
  std::byte* to = shared_.setup->region.base + frame_.destination_offset;
  while (payload_got_ < frame_.bytes) {
    if (budget == 0) return 0;
    const ssize_t count = read_some(to + payload_got_, std::min(frame_.bytes - payload_got_, budget), error);
    if (count <= 0) return static_cast<int>(count);
    payload_got_ += static_cast<u64>(count);
    budget -= static_cast<u64>(count);
  }
  return 1;
}

int Connection::receive_staged(u64& budget, Error& error) noexcept {
  std::byte* to = shared_.setup->region.base + frame_.destination_offset;
  while (payload_got_ < frame_.bytes) {
    if (in_.state == Slice::kEmpty) {
      in_.state = Slice::kFull;  // being filled
      in_.bytes = std::min<u64>(in_.memory.size(), frame_.bytes - payload_got_);
      in_.used = 0;
    }
    while (in_.used < in_.bytes) {
      if (budget == 0) return 0;
      const ssize_t count = read_some(in_.memory.data() + in_.used, std::min(in_.bytes - in_.used, budget), error);
      if (count <= 0) return static_cast<int>(count);
      in_.used += static_cast<u64>(count);
      budget -= static_cast<u64>(count);
    }
    if (in_.state == Slice::kFull && start_copy(in_, to + payload_got_, in_.memory.data(), error) < 0) return -1;
    const int state = copy_state(in_, error);
    if (state <= 0) return state;
    payload_got_ += in_.bytes;
    in_.state = Slice::kEmpty;
  }
  return 1;
}

int Connection::end_message(Error& error) noexcept {
  frame_got_ = 0;
  const Arrival arrival{peer_, frame_.slot, frame_.value, frame_.destination_offset, frame_.bytes};
  return shared_.setup->publisher->publish(arrival, error);
}

int Connection::receive(Error& error) noexcept {
  u64 budget = kBudgetBytes;
  int came = 0;
  for (u32 frames = 0; frames < kFramesAtOnce && socket_; ++frames) {
    int state = receive_frame(error);
    if (state < 0) return -1;
    if (state == 0 && !said_bye_) return came;
    if (state == 0) continue;  // look for the end of the stream behind the goodbye
    state = in_.memory.empty() ? receive_payload(budget, error) : receive_staged(budget, error);
    if (state < 0) return -1;
    if (state == 0) return came | (budget != kBudgetBytes ? 1 : 0);
    came = 1;
    if (end_message(error) < 0) return -1;
  }
  return came;
}

}  // namespace mk::host::tcp
