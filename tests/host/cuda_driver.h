#pragma once
// A CUDA driver that is not there: a stand-in which is as late as a device can be.
#include "abi/proxy_records.h"
#include "host/cuda/engine.h"

namespace mk::test {

inline constexpr int kFlushOptions = 117, kWritesOrdering = 118, kExportsDmaBuf = 124;  ///< device attributes
inline constexpr u64 kAllocation = 1 << 21;  ///< what cuMemGetAddressRange finds round any address

/// Its device orders no writes, flushes on the host, exports dma-bufs. Tests change single functions.
host::cuda::Driver cuda_driver();
/// The engine's functions as a proxy takes them.
void use_engine(host::cuda::Engine& engine, ProxyOptions& options);

}  // namespace mk::test
