#pragma once
// Stores of arrival flags, by the CPU or by the caller's function.
#include <atomic>
#include <cerrno>

#include "host/transport.h"

namespace mk::host {

/// Makes a flag visible after all that its message wrote. 0, or a positive errno.
inline i32 store_flag(const FlagWriter& writer, std::byte* flag, u32 value) noexcept {
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
