#pragma once
// How the network gets at the region, chosen at the start: by itself, or through a bounce buffer.
#include "host/transport.h"

namespace mk::host {

/// A transport that has registered its memory. NICs try dma-buf, then a plain registration (host memory; device memory
/// with nvidia-peermem), then a bounce buffer; where none works, the error of the last and Registration::kRefused.
Made make_registered(const ProxyOptions& options, const Setup& setup);

}  // namespace mk::host
