#pragma once
// Copies and flags for memory of CUDA devices: a CopyEngine and a FlagWriter on two streams of one device.
//
// Copies of one engine run on one stream, in order. Each is followed by an event as long as there are free ones; else a
// later event stands for it. A copy counts as finished once an event behind it is. Flags go out on a stream of their
// own, all of a round in one call, and each write is behind a system fence: what was finished before is visible.
#include <memory>
#include <vector>

#include "host/cuda/driver.h"
#include "host/transport.h"

namespace mk::host::cuda {

/// Used by one proxy thread at a time.
class Engine {
 public:
  /// Null and `error` where the device or the driver can't.
  static std::unique_ptr<Engine> open(const Driver& driver, int device, Error& error);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  CopyEngine copies() noexcept;
  /// With `flush`, where the device does not order what NICs write before what it reads.
  FlagWriter flags() noexcept;

 private:
  static constexpr u32 kEvents = 256;
  static constexpr u32 kTokens = 1u << 16;  ///< copies in flight, at most; the proxy's limit is the same
  static constexpr u32 kFlagsARound = 128;  ///< operations that one call takes

  struct Mark {
    void* event;
    u64 behind;  ///< number of the last copy before it
  };

  Engine(const Driver& driver, int device);
  Error make();
  i32 failed(Result result) noexcept;
  i32 enter() noexcept;
  i32 start(void* destination, const void* source, u64 bytes, u64 token) noexcept;
  i32 finished(u64 token) noexcept;
  i32 mark() noexcept;
  i32 write(void* flag, u32 value) noexcept;
  i32 commit() noexcept;

  const Driver driver_;
  const int device_;
  void* context_ = nullptr;
  void* copies_ = nullptr;
  void* flags_ = nullptr;
  bool needs_flush_ = false;
  bool entered_ = false;                ///< the proxy thread has the context
  u64 started_ = 0, marked_ = 0, done_ = 0;  ///< numbers of copies, from 1
  std::vector<u64> numbers_;            ///< [token % kTokens]
  std::vector<Mark> marks_;             ///< a ring
  u32 first_mark_ = 0, num_marks_ = 0;
  std::vector<WriteOperation> pending_;
  u32 num_pending_ = 0;
};

}  // namespace mk::host::cuda
