#pragma once
// The two element types: how pairs of them are packed and unpacked.
#include "device/ptx.cuh"

namespace mk {

struct Bf16 {
  static MK_DEVICE u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static MK_DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
  static MK_DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
};

struct Fp16 {
  static MK_DEVICE u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static MK_DEVICE float low(u32 pair) {
    float value;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}\n" : "=f"(value) : "r"(pair));
    return value;
  }
  static MK_DEVICE float high(u32 pair) {
    float value;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;\n}\n" : "=f"(value) : "r"(pair));
    return value;
  }
};

}  // namespace mk
