#pragma once
// Fixed-width integers for code that the device compiler (which has no standard headers) and the host share.
#ifdef __CUDACC_RTC__
namespace mk {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "fixed widths");
}  // namespace mk
#else
#include <cstdint>
namespace mk {
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
}  // namespace mk
#endif
