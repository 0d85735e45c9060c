// Does a flag overtake the tile that it announces? Block b of the writer sends tiles to block b of the reader, which
// counts words that are not yet those of the announced tile.
#include "device/ptx.cuh"

using namespace mk;

constexpr u32 kTileBytes = 32768;
constexpr u64 kLimitNs = 2000000000ull;

// pairs-with: the same flag in the other kernel
__device__ bool wait_for(const u32* flag, u32 value) {
  const u64 start = global_timer_ns();
  while ((i32)(load_acquire_sys(flag) - value) < 0) {
    if (global_timer_ns() - start > kLimitNs) return false;
  }
  return true;
}

/// kOrdered: as the product's kernels do it. Otherwise a flag stored as soon as shared memory may be reused.
template <bool kOrdered>
__device__ void write_tiles(u8* tiles, u32* flags, const u32* acknowledged, u32 count) {
  __shared__ __align__(128) u32 tile[kTileBytes / 4];
  for (u32 message = 1; message <= count; ++message) {
    if (threadIdx.x == 0 && !wait_for(acknowledged + blockIdx.x, message - 1)) return;
    __syncthreads();
    for (u32 i = threadIdx.x; i < kTileBytes / 4; i += blockDim.x) tile[i] = message;
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(tiles + (u64)blockIdx.x * kTileBytes, shared_address(tile), kTileBytes);
      bulk_commit();
      if constexpr (kOrdered) {
        bulk_wait<0>();
        fence_proxy_async();
        fence_acq_rel_sys();
      } else {
        bulk_wait_read<0>();
      }
      store_relaxed_sys(flags + blockIdx.x, message);
    }
    __syncthreads();
  }
}

extern "C" __global__ void write_ordered(u8* tiles, u32* flags, const u32* acknowledged, u32 count) {
  write_tiles<true>(tiles, flags, acknowledged, count);
}
extern "C" __global__ void write_unordered(u8* tiles, u32* flags, const u32* acknowledged, u32 count) {
  write_tiles<false>(tiles, flags, acknowledged, count);
}

extern "C" __global__ void read_tiles(const u8* tiles, const u32* flags, u32* acknowledge, u32 count, u32* wrong) {
  const u8* mine = tiles + (u64)blockIdx.x * kTileBytes;
  u32 bad = 0;
  for (u32 message = 1; message <= count; ++message) {
    if (threadIdx.x == 0 && !wait_for(flags + blockIdx.x, message)) atomicAdd(wrong + 1, 1);
    __syncthreads();
    for (u32 at = threadIdx.x * 16; at < kTileBytes; at += blockDim.x * 16) {
      const Vector4 v = load_global_vector(mine + at);
      bad += (v.x != message) + (v.y != message) + (v.z != message) + (v.w != message);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      fence_acq_rel_sys();
      store_relaxed_sys(acknowledge + blockIdx.x, message);
    }
  }
  atomicAdd(wrong, bad);
}

/// Keeps the link busy: copies of `bytes` to the peer, over and over.
extern "C" __global__ void load_link(const u8* from, u8* to, u64 bytes, u32 passes) {
  for (u32 pass = 0; pass < passes; ++pass) {
    for (u64 at = (u64)(blockIdx.x * blockDim.x + threadIdx.x) * 16; at < bytes; at += (u64)gridDim.x * blockDim.x * 16) {
      const Vector4 v = load_global_vector(from + at);
      *reinterpret_cast<uint4*>(to + at) = make_uint4(v.x, v.y, v.z, v.w);
    }
  }
}
