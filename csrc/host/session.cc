#include "host/session.h"

#include <cerrno>
#include <cstring>
#include <new>

#include "host/flags.h"
#include "host/registration.h"
#include "host/wait.h"

namespace mk::host {

namespace {

constexpr u32 kMagic = 0x58504b4d;  // "MKPX"
constexpr u32 kVersion = 2;

/// Before the transport's own part of an endpoint: what both sides must agree on, and the region's limits.
struct Header {
  u32 magic, version;
  u32 rank, world, transport, lanes, max_outstanding;
  u32 num_flags;
  u64 region_bytes;
};

template <class Function>
Function function_at(u64 address) {
  return reinterpret_cast<Function>(address);
}

CopyEngine copy_engine(const ProxyOptions& options) {
  CopyEngine engine;
  engine.context = reinterpret_cast<void*>(options.copy_context);
  engine.start = function_at<decltype(engine.start)>(options.copy_start);
  engine.finished = function_at<decltype(engine.finished)>(options.copy_finished);
  engine.pin = function_at<decltype(engine.pin)>(options.copy_pin);
  engine.unpin = function_at<decltype(engine.unpin)>(options.copy_unpin);
  return engine;
}

FlagWriter flag_writer(const ProxyOptions& options) {
  FlagWriter writer;
  writer.context = reinterpret_cast<void*>(options.flag_context);
  writer.flush = function_at<decltype(writer.flush)>(options.flag_flush);
  writer.write = function_at<decltype(writer.write)>(options.flag_write);
  writer.commit = function_at<decltype(writer.commit)>(options.flag_commit);
  return writer;
}

Region region_of(const ProxyOptions& options) {
  Region region;
  region.base = reinterpret_cast<std::byte*>(options.region_base);
  region.bytes = options.region_bytes;
  region.flags_offset = options.flags_offset;
  region.num_flags = options.num_flags;
  region.kind = static_cast<MemoryKind>(options.memory_kind);
  region.write_order = static_cast<WriteOrder>(options.write_order);
  region.dmabuf = options.dmabuf;
  region.dmabuf_offset = options.dmabuf_offset;
  return region;
}

Setup setup_of(const ProxyOptions& options, Publisher& publisher) {
  Setup setup;
  setup.rank = options.rank;
  setup.world = options.world;
  setup.region = region_of(options);
  setup.publisher = &publisher;
  setup.copy = copy_engine(options);
  setup.flag_writer = flag_writer(options);
  setup.lanes = options.lanes;
  setup.max_outstanding = options.max_outstanding;
  setup.bounce = {reinterpret_cast<std::byte*>(options.bounce_base), options.bounce_bytes};
  setup.timeout_ns = options.timeout_ns;
  setup.seed = options.seed;
  setup.device.assign(options.device, strnlen(options.device, sizeof options.device));
  return setup;
}

Error refuse(const char* what) { return fail({"options"}, EINVAL, "%s", what); }

}  // namespace

std::unique_ptr<Session> Session::open(const ProxyOptions& options, Error& error) {
  try {
    std::unique_ptr<Session> session(new Session(options));
    error = session->make();
    return error ? nullptr : std::move(session);
  } catch (const std::bad_alloc&) {
    error = fail({"allocate"}, ENOMEM);
    return nullptr;
  }
}

Error Session::check_options() const {
  const ProxyOptions& o = options_;
  if (o.world == 0 || o.rank >= o.world) return refuse("rank outside of the group");
  if (o.lanes == 0 || o.lanes > 64) return refuse("1 to 64 connections a peer");
  if (o.max_outstanding == 0 || o.max_outstanding > 65536) return refuse("1 to 65536 commands in flight");
  if (o.ring_capacity == 0) return refuse("a ring without slots");
  if ((o.ring_control == 0) != (o.ring_slots == 0)) return refuse("half a ring");
  if (o.timeout_ns == 0) return refuse("every wait needs a limit: timeout_ns is 0");
  if (o.region_base == 0 || o.num_flags == 0) return refuse("a region without memory or flags");
  const u64 flags_bytes = u64{o.num_flags} * sizeof(u32);
  const bool inside = flags_bytes <= o.region_bytes && o.flags_offset <= o.region_bytes - flags_bytes;
  if (!inside || (o.region_base + o.flags_offset) % sizeof(u32) != 0) return refuse("flags outside of the region");
  if ((o.copy_start == 0) != (o.copy_finished == 0)) return refuse("half a copy engine");
  if ((o.copy_pin == 0) != (o.copy_unpin == 0)) return refuse("memory that is pinned for good");
  if (o.write_order > kWritesUnordered) return refuse("an order of writes that is not known");
  const bool stores_flags = o.transport != kRc;
  if (o.memory_kind == static_cast<u32>(MemoryKind::kCuda) && stores_flags && o.flag_write == 0) {
    return refuse("flags in device memory, and no function that stores them");
  }
  return {};
}

void Session::place_ring() {
  control_ = reinterpret_cast<RingControl*>(options_.ring_control);
  slots_ = reinterpret_cast<Command*>(options_.ring_slots);
  if (control_ != nullptr) return;
  const std::size_t bytes = sizeof(RingControl) + sizeof(Command) * options_.ring_capacity + alignof(RingControl);
  ring_memory_ = std::make_unique<std::byte[]>(bytes);  // zeroed
  void* start = ring_memory_.get();
  std::size_t space = bytes;
  start = std::align(alignof(RingControl), sizeof(RingControl), start, space);
  control_ = static_cast<RingControl*>(start);
  slots_ = reinterpret_cast<Command*>(control_ + 1);
}

Error Session::make() {
  if (Error error = check_options()) return error;
  region_ = region_of(options_);
  place_ring();
  producer_ = std::make_unique<HostProducer>(control_, slots_, options_.ring_capacity);
  const ProxySettings settings{options_.rank,              options_.world,     options_.lanes,
                               options_.max_outstanding,   options_.timeline_capacity,
                               options_.window_ns,         options_.timeout_ns, options_.idle_spin_ns};
  const CommandRing ring(control_, slots_, options_.ring_capacity);
  proxy_ = std::make_unique<Proxy>(settings, region_, flag_writer(options_), ring);
  Made made = make_registered(options_, setup_of(options_, *proxy_));
  if (made.error) return made.error;
  proxy_->use(std::move(made.transport));
  return {};
}

Error Session::endpoint(u32 peer, std::vector<u8>& blob) {
  const Header header{kMagic,
                      kVersion,
                      options_.rank,
                      options_.world,
                      options_.transport,
                      options_.lanes,
                      options_.max_outstanding,
                      options_.num_flags,
                      options_.region_bytes};
  std::vector<u8> own;
  if (peer >= options_.world) return refuse("an endpoint for a rank outside of the group");
  if (Error error = proxy_->transport().endpoint(peer, own)) return error;
  blob.resize(sizeof header);
  std::memcpy(blob.data(), &header, sizeof header);
  blob.insert(blob.end(), own.begin(), own.end());
  return {};
}

Error Session::connect(u32 peer, std::span<const u8> blob) {
  const Place place{"connect", proxy_->transport().device(), static_cast<i32>(peer)};
  Header header{};
  if (peer >= options_.world || blob.size() < sizeof header) return fail(place, EPROTO, "not an endpoint");
  std::memcpy(&header, blob.data(), sizeof header);
  if (header.magic != kMagic || header.version != kVersion) return fail(place, EPROTO, "another version of mkcompile");
  if (header.rank != peer || header.world != options_.world || header.transport != options_.transport ||
      header.lanes != options_.lanes || header.max_outstanding != options_.max_outstanding) {
    return fail(place, EPROTO,
                "rank %u of %u, transport %u, %u connections, %u in flight there; here %u, transport %u, %u, %u",
                header.rank, header.world, header.transport, header.lanes, header.max_outstanding, options_.world,
                options_.transport, options_.lanes, options_.max_outstanding);
  }
  proxy_->set_limits(peer, {header.region_bytes, header.num_flags, true});
  return proxy_->transport().connect(peer, blob.subspan(sizeof header));
}

int Session::wait_flag(u32 slot, u32 value, u64 deadline_ns, u32& seen) const noexcept {
  if (slot >= region_.num_flags || region_.kind != MemoryKind::kHost) return EINVAL;
  auto* word = reinterpret_cast<u32*>(flag_address(region_.base, region_.flags_offset, slot));
  const auto reached = [&] {
    seen = std::atomic_ref<u32>(*word).load(std::memory_order_acquire);
    return static_cast<i32>(seen - value) >= 0;
  };
  return wait_bounded(deadline_ns, reached, [this] { return proxy_->stopped(); });
}

}  // namespace mk::host
