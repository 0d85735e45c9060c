#pragma once
// The two element types: packing, unpacking, and the multicast reduction of each.
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

  /// Sum over all ranks of the multicast group, accumulated in fp32 by the switch.
  static MK_DEVICE Vector4 load_reduced(const void* multicast) {
    Vector4 v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(multicast)
                 : "memory");
    return v;
  }
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

  /// Sum over all ranks of the multicast group, accumulated in fp32 by the switch.
  static MK_DEVICE Vector4 load_reduced(const void* multicast) {
    Vector4 v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(multicast)
                 : "memory");
    return v;
  }
};

}  // namespace mk
