#pragma once
// The bounce buffer: for regions that no NIC reaches, a double of them in host memory that one does.
//
// It stands between the proxy and a transport that counts. What goes out is copied into the double first, at the same
// offset, and then posted; what comes in lands in the double, and its flag is published in the region once the bytes
// have been copied there. Flags themselves never go through the double.
#include <vector>

#include "host/transport.h"

namespace mk::host {

/// Elements in order, without allocation.
template <class Element>
class Fifo {
 public:
  explicit Fifo(std::size_t capacity) : elements_(capacity) {}
  bool full() const noexcept { return count_ == elements_.size(); }
  std::size_t size() const noexcept { return count_; }
  Element& operator[](std::size_t i) noexcept { return elements_[(first_ + i) % elements_.size()]; }
  const Element& operator[](std::size_t i) const noexcept { return elements_[(first_ + i) % elements_.size()]; }
  void push(const Element& element) noexcept { elements_[(first_ + count_++) % elements_.size()] = element; }
  void pop(std::size_t count) noexcept {
    first_ = (first_ + count) % elements_.size();
    count_ -= count;
  }

 private:
  std::vector<Element> elements_;
  std::size_t first_ = 0, count_ = 0;
};

class Bounce final : public Transport, private Publisher {
 public:
  explicit Bounce(const Setup& setup);
  ~Bounce() override { close(0); }

  /// The double, locked for copies.
  Error allocate();
  /// For the transport behind: host memory that always has to be counted.
  Setup inner_setup();
  void use(std::unique_ptr<Transport> inner) noexcept { inner_ = std::move(inner); }

  const char* device() const noexcept override { return inner_->device(); }
  Registration registration() const noexcept override { return Registration::kBounce; }
  Error register_memory() override { return inner_->register_memory(); }
  Error endpoint(u32 peer, std::vector<u8>& blob) override { return inner_->endpoint(peer, blob); }
  Error connect(u32 peer, std::span<const u8> blob) override { return inner_->connect(peer, blob); }
  Error finish(u64 deadline_ns) override { return inner_->finish(deadline_ns); }
  int post(u32 peer, u32 lane, std::span<const Write> writes, Error& error) noexcept override;
  int poll(std::span<u64> tickets, Error& error) noexcept override;
  void abandon() noexcept override { inner_->abandon(); }
  void close(u64 deadline_ns) noexcept override;

 private:
  static constexpr u64 kNoCopy = ~u64{0};

  /// On its way out. `token` is its copy's.
  struct Outgoing {
    Write write;
    u32 peer, lane;
    u64 token;
  };
  /// On its way in.
  struct Incoming {
    Arrival arrival;
    u64 token;
    bool is_started;
  };

  int publish(const Arrival& arrival, Error& error) noexcept override;
  bool may_copy() const noexcept;
  /// 0, or -1; `token` is kNoCopy where nothing has to be waited for.
  int copy(std::byte* to, const std::byte* from, u64 bytes, u64& token, Error& error) noexcept;
  int is_done(u64 token, Error& error) noexcept;
  int start_incoming(Error& error) noexcept;
  int publish_copied(Error& error) noexcept;
  int forward(Error& error) noexcept;
  u32 ready_to_forward(std::span<Write> writes, Error& error, int& state) noexcept;

  const Setup setup_;
  std::unique_ptr<Transport> inner_;
  std::byte* double_ = nullptr;
  bool is_pinned_ = false;
  Fifo<Outgoing> outgoing_;
  Fifo<Incoming> incoming_;
  std::size_t num_started_ = 0;  ///< of incoming_, from the first on
  u64 next_token_ = 0;
};

}  // namespace mk::host
