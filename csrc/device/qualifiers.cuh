#pragma once
// The one macro of the device code.
#define MK_DEVICE __device__ __forceinline__
