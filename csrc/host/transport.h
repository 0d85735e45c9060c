#pragma once
// The one interface between the proxy and a network.
//
// Life of a transport, in this order; a failure at any step leaves it fit only for close():
//   make_<name>(Setup)          control thread; opens the device
//   register_memory()           control thread, once
//   endpoint(peer) for each     control thread; blobs travel through the group's store
//   connect(peer, blob)         control thread, for each peer, in rising order; may only start the connection
//   finish(deadline)            control thread; returns once every peer is connected, or with an error
//   post(), poll()              proxy thread only, from now on. No allocation, lock, log or environment read, no block.
//   abandon()                   proxy thread, after a failure
//   close(deadline)             control thread, after the proxy thread has ended; also after errors; idempotent
//
// Messages. A Write is a message: `bytes` of data, then one flag. The flag is the word `slot` of the receiver's flag
// array and gets `value`. A message without bytes is a flag alone. The transport may cut a message into pieces.
//
// When a flag may be published: when every byte of its message can be read by whoever polls the flag (the owner GPU, or
// host threads). Two ways are right:
//   ordered connection   data writes, then the flag write, on one reliable connection, into one registration of memory
//                        without relaxed ordering. The receiver's proxy does nothing. Only where the NIC and the memory
//                        keep the order of writes (Region::write_order).
//   counted              order means nothing. Every piece tells the receiver's proxy its slot and the number of pieces;
//                        who receives counts (Arrivals, arrivals.h) and calls Publisher::publish when all have come.
// Messages have no order among each other, even on one connection. A slot has one writing peer and one message at a
// time: kernels send the next only after the receiver's credit, itself a message. Transports rely on this.
//
// Memory order. The proxy has acquired the command's header before post(), so the source bytes are there. poll() must
// read the completion that stands for a piece before it calls publish(); publish() stores with release at system scope.
//
// Completion: poll() returns the ticket of a message once its source memory may be written again, in any order, each
// ticket once. It says nothing of the receiver.
//
// Back pressure: post() takes as many of the writes as its queues have room for, in order, and returns how many. The
// proxy offers the rest again after poll(). Each accepted batch of signalled work should be one submission (one
// doorbell). The proxy keeps at most Setup::max_outstanding messages in flight over all peers and lanes, and at most
// kMaxBatch in one call; receive credits (receive work requests posted ahead) are the transport's own affair, sized
// from max_outstanding of the peers, which is the same on every rank.
//
// Failures. The first one ends the proxy: post() and poll() fill `error` and return -1, and are not called again. Its
// peers have nothing more to wait for, so abandon() tells those that can still be reached; their proxies fail in turn.
// Whatever blocks on the control thread ends at its deadline with ETIMEDOUT that names the peer.
//
// Shutdown. close() ends what is in flight or drops it, tells peers where the network can (they must not take it for a
// loss), and releases everything. The region is not touched after it returns.
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "abi/command_ring.h"
#include "abi/proxy_records.h"
#include "host/error.h"

namespace mk::host {

enum class MemoryKind : u32 { kHost = 0, kCuda = 1 };

/// How a network reaches the region.
enum class Registration : u32 {
  kNone = 0,     ///< not registered (sockets, copies)
  kHost = 1,     ///< ordinary registration of host memory
  kDmaBuf = 2,   ///< ibv_reg_dmabuf_mr
  kPeerMem = 3,  ///< ibv_reg_mr of a device pointer
  kBounce = 4,   ///< pinned host memory, copied to and from by Setup::copy
  kRefused = 5,  ///< by none of these
};

/// The memory that peers write and we send from: data and arrival flags in one block, laid out by the caller.
struct Region {
  std::byte* base = nullptr;
  u64 bytes = 0;
  u64 flags_offset = 0;  ///< of the first 32-bit flag word; all flags lie inside the region
  u32 num_flags = 0;
  MemoryKind kind = MemoryKind::kHost;
  WriteOrder write_order = kWritesInOrder;
  i32 dmabuf = -1;         ///< descriptor that covers the region, or -1; stays the caller's
  u64 dmabuf_offset = 0;   ///< of `base` in it
};

/// Copies for memory that the CPU can't touch. All null: memcpy, finished at once.
struct CopyEngine {
  void* context = nullptr;
  /// Starts a copy that `token` names. 0, or a negative errno. Must not block.
  i32 (*start)(void* context, void* destination, const void* source, u64 bytes, u64 token) = nullptr;
  /// 1: done, and its bytes can be read by all; 0: not yet; a negative errno.
  i32 (*finished)(void* context, u64 token) = nullptr;
  /// Locks host memory for copies that don't block; control thread. 0, or a negative errno. May be null, both or none.
  i32 (*pin)(void* context, void* address, u64 bytes) = nullptr;
  void (*unpin)(void* context, void* address) = nullptr;
};

/// Stores to flag words that the CPU can't reach. All null: a release store by the proxy thread.
struct FlagWriter {
  void* context = nullptr;
  /// Makes what the network wrote readable by the device (GPUDirect write order). 0, or a negative errno. May be null.
  i32 (*flush)(void* context) = nullptr;
  /// Stores `value` at `flag`, ordered after the flush. 0, or a negative errno.
  i32 (*write)(void* context, void* flag, u32 value) = nullptr;
  /// Issues what write() has only collected; called once a round, after poll(). 0, or a negative errno. May be null.
  i32 (*commit)(void* context) = nullptr;
};

/// A message that is complete: `bytes` at `offset` of the own region, and the flag that says so.
struct Arrival {
  u32 peer;
  u32 slot;
  u32 value;
  u64 offset;
  u64 bytes;
};

/// Publishes flags of the own region; implemented by the proxy, called by transports from poll() on the proxy thread.
class Publisher {
 public:
  virtual ~Publisher() = default;
  /// All bytes of the message are in place. -1 with `error` filled where the slot does not exist or the device refuses;
  /// the transport then returns -1 from poll().
  virtual int publish(const Arrival& arrival, Error& error) noexcept = 0;
};

/// What every transport gets. `publisher` outlives it.
struct Setup {
  u32 rank = 0;
  u32 world = 1;
  Region region;
  Publisher* publisher = nullptr;
  CopyEngine copy;
  FlagWriter flag_writer;     ///< for flags that a transport stores itself (emulated: the peer's)
  u32 lanes = 1;              ///< connections to each peer
  u32 max_outstanding = 256;  ///< messages in flight over all peers; the same on every rank
  std::span<std::byte> bounce;  ///< pinned memory for sockets; empty for host memory
  u64 timeout_ns = 0;         ///< how long a peer may be silent in the midst of something before it counts as lost
  u64 seed = 0;               ///< of whatever is random (shuffling)
  std::string device;         ///< NIC ("mlx5_0", "rxe0") or interface ("eth0"); empty: the transport chooses
};

/// One message; see the top of the file.
struct Write {
  u64 ticket;
  u64 source_offset;
  u64 destination_offset;
  u64 bytes;
  u32 slot;
  u32 value;
};

class Transport {
 public:
  virtual ~Transport() = default;

  /// Device in use, for errors and `doctor`: "mlx5_0/1 gid 3", "eth0", "emulated". Valid for the transport's life.
  virtual const char* device() const noexcept = 0;
  virtual Registration registration() const noexcept = 0;
  /// Are flags of the own region published by the own proxy? Known once the memory is registered.
  virtual bool counts() const noexcept { return true; }

  [[nodiscard]] virtual Error register_memory() = 0;
  /// What `peer` needs to reach us; at most kMaxEndpointBytes.
  [[nodiscard]] virtual Error endpoint(u32 peer, std::vector<u8>& blob) = 0;
  /// `blob` is what the peer's endpoint(our rank) made. It came from another process: check sizes.
  [[nodiscard]] virtual Error connect(u32 peer, std::span<const u8> blob) = 0;
  /// `deadline_ns` is absolute, on the clock of now_ns().
  [[nodiscard]] virtual Error finish(u64 deadline_ns) = 0;

  /// Offsets, slot and peer were checked against both regions. Returns how many writes were taken, or -1.
  virtual int post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept = 0;
  /// Makes progress in both directions; fills tickets of completed messages; returns how many, or -1.
  virtual int poll(std::span<u64> tickets, Error& error) noexcept = 0;

  /// Must not block; what it can't tell at once it does not tell.
  virtual void abandon() noexcept {}
  virtual void close(u64 deadline_ns) noexcept = 0;
};

inline constexpr u32 kMaxEndpointBytes = 4096;

/// A transport, or why there is none.
struct Made {
  std::unique_ptr<Transport> transport;
  Error error;
};

/// Nanoseconds on CLOCK_MONOTONIC.
u64 now_ns() noexcept;

}  // namespace mk::host
