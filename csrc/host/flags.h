#pragma once
// Stores of arrival flags, by the CPU or by the caller's function.
#include <atomic>
#include <cerrno>

#include "host/transport.h"

namespace mk::host {

/// Makes a flag visible after all that its message wrote. 0, or a positive errno. The networks that don't come here write
/// the flag behind the data on one reliable connection, which releases as well.
inline i32 store_flag(const FlagWriter& writer, std::byte* flag, u32 value) noexcept {
  // pairs-with: net_partial release (proxy -> store_role), scope sys
  // pairs-with: net_partial_free release (proxy -> store_role), scope sys
  // pairs-with: net_final release (proxy -> copy_role), scope sys
  // pairs-with: net_final_free release (proxy -> store_role), scope sys
  // pairs-with: net_shard release (proxy -> arrival_role), scope sys
  // pairs-with: net_entered release (proxy -> signal_role), scope sys
  if (writer.write == nullptr) {
    std::atomic_ref<u32>(*reinterpret_cast<u32*>(flag)).store(value, std::memory_order_release);
    return 0;
  }
  if (writer.flush != nullptr) {
    if (const i32 status = writer.flush(writer.context)) return -status;
  }
  return -writer.write(writer.context, flag, value);
}

/// Where flag `slot` of a region lies.
inline std::byte* flag_address(std::byte* base, u64 flags_offset, u32 slot) noexcept {
  return base + flags_offset + u64{slot} * sizeof(u32);
}

}  // namespace mk::host
