#pragma once
// One block: barriers, then each warp into its role.
//
// warps  role     does
// 0-3    compute  math group 0: tensor cores, epilogue into panels
// 4-7    compute  math group 1
// 8      load     one thread: operands of all tiles through the ring of stages
// 9, 10  store    one thread each: the panels of one math group, to this rank's result or to the peers
// 11     signal   one thread: flags to the peers; finished tiles from the peers
#include "device/epilogue.cuh"
#include "device/frame.cuh"
#include "device/receive.cuh"

namespace mk {

inline constexpr int kHelperRegisters = 72;
inline constexpr int kMathRegisters = 216;

/// Load role.
template <class Op>
MK_DEVICE void load_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory,
                         const typename Op::Schedule& schedule) {
  using Tile = typename Op::Tile;
  Ring<Tile> ring;
  Trace trace(args, kLoadLane);
  for (u32 position = blockIdx.x; position < schedule.positions(); position += gridDim.x) {
    const Task task = schedule.task(position);
    if (!task.valid) continue;
    const TilePlace place = schedule.template place<Tile>(args, task);
    const u32 peer = task.owner == args.rank ? 0 : TileNote::kPeer;
    trace.begin();
    load_tile<Tile>(args, memory, ring, TileNote{task.index | peer, place.column}, place.row, trace);
    trace.end(kTraceLoad, task.owner, task.index);
  }
  load_end<Tile>(args, memory, ring);
}

/// Store role: panel by panel as the math group fills them; a panel is handed back when its stores have read it.
template <class Op>
MK_DEVICE void store_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory,
                          const typename Op::Schedule& schedule, int group) {
  using Tile = typename Op::Tile;
  typename Op::Sink sink(args, memory, group);
  Trace trace(args, kStoreLane + group);
  u32 tiles = 0;
  for (u32 position = blockIdx.x; position < schedule.positions(); position += gridDim.x) {
    const Task task = schedule.task(position);
    if (!task.valid) continue;
    const TilePlace place = schedule.template place<Tile>(args, task);
    const bool last = position + gridDim.x >= schedule.positions();
    trace.begin();
    sink.begin(task);
    if constexpr (Op::kReduces) trace.end_wait(kTraceReceive, task.owner, task.index);
#pragma unroll 1
    for (int index = 0; index < Tile::kPanels; ++index) {
      wait_phase(args, memory.panel_full(group, index), tiles & 1, kStoreRole, trace);
      if (index == 0) trace.begin();
      sink.send(task, place, index, last);
      bulk_commit();
      if (index > 0) {
        bulk_wait_read<1>();
        mbarrier_arrive(memory.panel_empty(group, index - 1));
      }
    }
    bulk_wait_read<0>();
    mbarrier_arrive(memory.panel_empty(group, Tile::kPanels - 1));
    sink.end(task, schedule);
    trace.end(task.owner == args.rank ? kTraceStore : kTracePush, task.owner, task.index);
    ++tiles;
  }
  bulk_wait<0>();
}

/// The whole kernel.
template <class Op>
MK_DEVICE void run_block(const LaunchArguments& args) {
  using Tile = typename Op::Tile;
  const auto memory = shared_memory<Tile>();
  Trace trace(args, kComputeLane, threadIdx.x == 0);
  trace.begin();
  if (threadIdx.x == 0) memory.init();
  __syncthreads();

  const auto schedule = Op::Schedule::template make<Tile>(args, gridDim.x);
  const auto [group, warp, first_lane] = ThreadPlace{};
  if (group == kMathGroups) {
    decrease_registers<kHelperRegisters>();
    if (first_lane && warp == 0) load_role<Op>(args, memory, schedule);
    if (first_lane && (warp == 1 || warp == 2)) store_role<Op>(args, memory, schedule, warp - 1);
    if constexpr (Op::kReduces) {
      if (first_lane && warp == 3) signal_role<Op>(args, memory, schedule);
    }
    __syncwarp();
  } else {
    increase_registers<kMathRegisters>();
    compute_role<Op>(args, memory, group);
  }
  if constexpr (Op::kReduces) {
    leave_block(args, memory, trace);
  } else if constexpr (kTrace) {
    trace.end(kTraceBlock, args.rank, 0);
  }
}

}  // namespace mk
