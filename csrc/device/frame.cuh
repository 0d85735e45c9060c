#pragma once
// The frame of a whole kernel: where its shared memory begins, which thread is which, and the end of a launch.
#include "device/tile.cuh"

namespace mk {

template <class Tile>
MK_DEVICE SharedMemory<Tile> shared_memory() {
  extern __shared__ __align__(1024) u8 dynamic_shared[];
  return SharedMemory<Tile>{(shared_address(dynamic_shared) + 1023) & ~1023u};
}

/// A thread's place among the warps of a block: four of each math group, then four for all other roles.
struct ThreadPlace {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  const bool first_lane = threadIdx.x % 32 == 0;
};

/// The last that all threads of a block do in a launch with peers.
template <class Tile>
MK_DEVICE void leave_block(const LaunchArguments& args, const SharedMemory<Tile>& memory, Trace& trace) {
  __syncthreads();
  if (threadIdx.x == 0) leave_launch(args, load_shared(memory.epoch()));
  if constexpr (kTrace) trace.end(kTraceBlock, args.rank, load_shared(memory.epoch()));
}

}  // namespace mk
