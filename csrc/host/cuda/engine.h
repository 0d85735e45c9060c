#pragma once
// Copies and flags for memory of CUDA devices: a CopyEngine and a FlagWriter on streams of one device.
//
// A copy costs the device about 3 us and an event or a written value as much again, whatever their size; at 50 GB/s
// 256 KB take 5. So copies whose bytes adjoin, in source and destination, become one of up to kMergedBytes; an event
// stands for all copies of about kMarkedBytes; and the next copies go to another stream, so that the event costs them
// nothing. What is still held back goes out at the end of the proxy's round, in commit(). A copy counts as finished
// once the event behind it is, and those before. Flags go out on streams of their own, all of a round in one call, each
// behind a system fence: what was finished before is visible. Those of the next round take another stream, so that they
// wait for no other's fence; a flag has one message in flight, so no word is written twice at once.
#include <array>
#include <memory>
#include <vector>

#include "host/cuda/driver.h"
#include "host/transport.h"

namespace mk::host::cuda {

/// Used by one proxy thread at a time.
class Engine {
 public:
  /// Null and `error` where the device or the driver can't.
  /// `streams` of each kind; with one, copies and flags share it. The device's queues are few, and a stream in one queue
  /// with a kernel's waits behind what that kernel waits for: take no more than the bandwidth needs.
  static std::unique_ptr<Engine> open(const Driver& driver, int device, Error& error, u32 streams = kStreams);
  static constexpr u32 kStreams = 4;
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  CopyEngine copies() noexcept;
  FlagWriter flags() noexcept;
  /// Are a NIC's writes to this device's memory seen in order, in a kernel that polls a flag?
  WriteOrder write_order() const noexcept { return write_order_; }
  /// A dma-buf of the allocation at `address`, and where the address lies in it. The caller closes the descriptor.
  Error export_memory(u64 address, u64 bytes, int& descriptor, u64& offset) noexcept;

 private:
  static constexpr u32 kEvents = 256;
  static constexpr u32 kTokens = 1u << 16;  ///< copies in flight, at most; the proxy's limit is the same
  static constexpr u32 kFlagsARound = 128;  ///< operations that one call takes
  static constexpr u64 kMergedBytes = 1u << 20;
  static constexpr u64 kMarkedBytes = 512u << 10;

  struct Mark {
    void* event;
    u64 behind;  ///< number of the last copy before it
  };

  /// A copy that has not been given to the driver: the next one may adjoin it.
  struct Held {
    u64 destination = 0, source = 0, bytes = 0;
  };

  Engine(const Driver& driver, int device, u32 streams);
  Error make();
  Error make_streams();
  void destroy() noexcept;
  Error refuse(const char* call, Result result) const noexcept;
  Error look_at_order() noexcept;
  i32 failed(Result result) noexcept;
  i32 enter() noexcept;
  i32 start(void* destination, const void* source, u64 bytes, u64 token) noexcept;
  i32 finished(u64 token) noexcept;
  i32 look_for(u64 token) noexcept;
  i32 issue() noexcept;
  i32 mark() noexcept;
  i32 end_round() noexcept;
  i32 write(void* flag, u32 value) noexcept;
  i32 commit() noexcept;
  i32 pin(void* address, u64 bytes) noexcept;
  void unpin(void* address) noexcept;

  const u64 number_;  ///< from 1, of all engines of the process
  const Driver driver_;
  const int device_;
  const u32 num_streams_;
  void* context_ = nullptr;
  std::array<void*, kStreams> copies_{};
  u32 stream_ = 0;  ///< of the next copy
  std::array<void*, kStreams> flags_{};
  u32 flag_stream_ = 0;  ///< of the next round
  WriteOrder write_order_ = kWritesInOrder;
  bool flushes_on_stream_ = false;  ///< the device flushes in front of the flags; else the host does
  Held held_;
  u64 started_ = 0, marked_ = 0, done_ = 0;  ///< numbers of copies that the driver has, from 1
  u64 unmarked_bytes_ = 0;
  std::vector<u64> numbers_;            ///< [token % kTokens]: of the copy that holds it
  std::vector<Mark> marks_;             ///< a ring
  u32 first_mark_ = 0, num_marks_ = 0;
  std::vector<WriteOperation> pending_;
  u32 num_pending_ = 0;
};

}  // namespace mk::host::cuda
