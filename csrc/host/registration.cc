#include "host/registration.h"

#include <cerrno>

#include "host/bounce.h"
#include "host/transports.h"

namespace mk::host {

namespace {

bool is_verbs(const ProxyOptions& options) noexcept {
  return options.transport == kRc || options.transport == kUnordered || options.transport == kSrd;
}

/// `emulated` writes into the peers' regions itself.
bool must_bounce(const ProxyOptions& options) noexcept {
  return options.always_bounces != 0 && options.transport != kEmulated;
}

/// A bounce buffer needs somebody who copies and who sets flags, unless the CPU can.
bool can_bounce(const Setup& setup) noexcept {
  if (setup.region.kind == MemoryKind::kHost) return true;
  return setup.copy.start != nullptr && setup.flag_writer.write != nullptr;
}

Made make_bounced(const ProxyOptions& options, const Setup& setup) {
  auto bounce = std::make_unique<Bounce>(setup);
  if (Error error = bounce->allocate()) return {nullptr, error};
  Made inner = make_transport(options, bounce->inner_setup());
  if (inner.error) return inner;
  bounce->use(std::move(inner.transport));
  Error error = bounce->register_memory();
  return {std::move(bounce), error};
}

}  // namespace

Made make_registered(const ProxyOptions& options, const Setup& setup) {
  const bool is_out_of_reach = is_verbs(options) && setup.region.write_order == kWritesUnordered;
  if (is_out_of_reach && !can_bounce(setup)) {
    return {nullptr, fail({"register_memory"}, EINVAL,
                          "writes to this memory have no order, and nobody copies for a bounce buffer")};
  }
  if (is_out_of_reach || must_bounce(options)) return make_bounced(options, setup);
  Made made = make_transport(options, setup);
  if (made.error) return made;
  made.error = made.transport->register_memory();
  const bool refused = made.transport->registration() == Registration::kRefused;
  if (!made.error || !refused || !can_bounce(setup)) return made;
  made.transport.reset();  // its queues, before others are made
  return make_bounced(options, setup);
}

}  // namespace mk::host
