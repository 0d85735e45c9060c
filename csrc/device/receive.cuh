#pragma once
// The finished tiles that other ranks send to this one: waiting for them, and copying them out of the workspace.
#include "device/comm.cuh"

namespace mk {

/// The finished tiles that one block takes care of: every gridDim-th of all that peers own, in the owners' order.
template <class Op>
struct ArrivalQueue {
  const LaunchArguments& args;
  const typename Op::Schedule& schedule;
  u32 next = blockIdx.x;
  u32 owner = 0, index = 0;

  MK_DEVICE ArrivalQueue(const LaunchArguments& args, const typename Op::Schedule& schedule, u32 epoch)
      : args(args), schedule(schedule) {
    if (epoch == 0) next = schedule.per_owner * (args.world - 1);
    locate();
  }
  MK_DEVICE bool finished() const { return next >= schedule.per_owner * (args.world - 1); }
  MK_DEVICE void advance() {
    next += gridDim.x;
    locate();
  }
  /// Skips tiles that an owner does not have.
  MK_DEVICE void locate() {
    while (!finished()) {
      index = next / (args.world - 1);
      owner = args.rank + 1 + next % (args.world - 1);
      owner = owner < args.world ? owner : owner - args.world;
      if (index < schedule.count(owner)) return;
      next += gridDim.x;
    }
  }
};

/// Direct broadcast: owners store into this rank's result; the kernel must not end before they have.
template <class Op>
struct ArrivalWatch {
  const Staging<typename Op::Tile> staging;
  ArrivalQueue<Op> queue;
  Trace trace;

  MK_DEVICE ArrivalWatch(const LaunchArguments& args, const SharedMemory<typename Op::Tile>&,
                         const typename Op::Schedule& schedule, u32 epoch)
      : staging{args, epoch}, queue(args, schedule, epoch), trace(args, kCopyLane) {
    trace.begin();
  }

  MK_DEVICE bool finished() const { return queue.finished(); }
  MK_DEVICE u32 seen() const {
    // pairs-with: final_ready acquire (signal_role -> copy_role), scope sys
    return load_acquire_sys(staging.flag(staging.args.rank, kFinalReady, queue.owner, queue.index));
  }
  MK_DEVICE bool step(bool) {
    if (finished() || !reached(seen(), staging.epoch)) return false;
    trace.end_wait(kTraceReceive, queue.owner, queue.index);
    trace.begin();
    queue.advance();
    return true;
  }
};

/// Staged broadcast: one thread copies finished tiles through shared memory into this rank's result: through the two
/// spare panels while the block computes, and through all panels once it has sent its last tile, when time counts.
template <class Op>
struct CopyOut {
  using Tile = typename Op::Tile;
  static constexpr u32 kTilePanels = kMathGroups * Tile::kPanels;
  const SharedMemory<Tile>& memory;
  const typename Op::Schedule& schedule;
  const Staging<Tile> staging;
  ArrivalQueue<Op> queue;
  u32 loaded = 0, stored = 0;  ///< panels of the current tile
  u32 narrow_tiles = 0, wide_tiles = 0;
  bool arrived = false;  ///< the current tile is here
  bool wide = false;     ///< all panels are free; decided anew for each tile
  Trace trace;

  MK_DEVICE CopyOut(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                    const typename Op::Schedule& schedule, u32 epoch)
      : memory(memory), schedule(schedule), staging{args, epoch}, queue(args, schedule, epoch),
        trace(args, kCopyLane) {}

  MK_DEVICE bool finished() const { return queue.finished(); }
  MK_DEVICE u32 seen() const {
    // pairs-with: final_ready acquire (signal_role -> copy_role), scope sys
    return load_acquire_sys(staging.flag(staging.args.rank, kFinalReady, queue.owner, queue.index));
  }

  MK_DEVICE u32 slots() const { return wide ? kTilePanels : kSparePanels; }
  MK_DEVICE u32 panel(u32 at) const {
    return wide ? memory.panel(at / Tile::kPanels, at % Tile::kPanels) : memory.spare(at % kSparePanels);
  }
  MK_DEVICE u32 barrier(u32 at) const { return memory.copy_full(wide ? kSparePanels + at : at % kSparePanels); }
  /// Uses of the panel's barrier before this one.
  MK_DEVICE u32 uses(u32 at) const {
    constexpr u32 kUsesInTile = kTilePanels / kSparePanels;
    return wide ? wide_tiles : narrow_tiles * kUsesInTile + at / kSparePanels;
  }

  /// `block_is_done`: the store threads have sent everything, nothing but this thread uses the panels.
  MK_DEVICE bool step(bool block_is_done) {
    if (finished()) return false;
    if (!arrived) {
      if (!reached(seen(), staging.epoch)) return false;
      trace.begin();
      fence_proxy_async();  // the flag was read by a generic load, the slot is read by bulk copies
      arrived = true;
      wide = block_is_done;
    }
    if (loaded < kTilePanels && loaded < stored + slots()) {
      load_panel();
      return true;
    }
    if (!mbarrier_test_wait(barrier(stored), uses(stored) & 1)) return false;
    store_panel();
    if (stored == kTilePanels) finish_tile();
    return true;
  }

  MK_DEVICE void load_panel() {
    bulk_wait_read<0>();  // the store that last used this panel
    const u8* from = staging.final_slot(staging.args.rank, queue.owner, queue.index);
    mbarrier_arrive_expect(barrier(loaded), Tile::kPanelBytes);
    bulk_load(panel(loaded), from + loaded * Tile::kPanelBytes, Tile::kPanelBytes, barrier(loaded));
    ++loaded;
  }

  MK_DEVICE void store_panel() {
    const TilePlace place = schedule.template place<Tile>(staging.args, Task{queue.owner, queue.index, true});
    const u32 group = stored / Tile::kPanels, index = stored % Tile::kPanels;
    const i32 x = place.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN) + index * Tile::kPanelN;
    deliver(staging.args, panel(stored), x, place.out_row + (Tile::kSplitsRows ? group * 64 : 0), place.segment);
    bulk_commit();
    ++stored;
  }

  /// Give the slot back to its owner where that owner will need it again in this launch.
  MK_DEVICE void finish_tile() {
    if (queue.index + staging.args.slots < schedule.count(queue.owner)) {
      // All loads from the slot have completed on their barriers. Publishes: the slot may be written.
      // pairs-with: final_free release (copy_role -> store_role), scope sys
      fence_acq_rel_sys();
      // Relaxed: the fence above releases.
      store_relaxed_sys(staging.flag(queue.owner, kFinalFree, staging.args.rank, queue.index), staging.epoch);
    }
    trace.end(kTraceCopy, queue.owner, queue.index);
    (wide ? wide_tiles : narrow_tiles) += 1;
    loaded = stored = 0;
    arrived = false;
    queue.advance();
  }
};

/// Nothing comes back: reduce-scatter.
template <class Op>
struct NoArrivals {
  struct Queue {
    u32 owner = 0, index = 0;
  } queue;
  MK_DEVICE NoArrivals(const LaunchArguments&, const SharedMemory<typename Op::Tile>&, const typename Op::Schedule&,
                       u32) {}
  MK_DEVICE bool finished() const { return true; }
  MK_DEVICE u32 seen() const { return 0; }
  MK_DEVICE bool step(bool) { return false; }
};

/// Signal role: one thread tells of this rank's tiles and takes in the others', whichever can go on.
template <class Op>
MK_DEVICE void signal_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory,
                           const typename Op::Schedule& schedule) {
  const u32 epoch = enter_launch<Op::kOperator>(args);
  store_shared(memory.epoch(), epoch);
  mbarrier_arrive(memory.entered());
  RollCall<Op> roll(args, epoch);
  Signaller<Op> signaller(args, memory, schedule, epoch);
  typename Op::Receiver receiver(args, memory, schedule, epoch);
  u64 progress_ns = global_timer_ns();
  while (!signaller.finished() || !receiver.finished() || !roll.finished()) {
    const bool met = roll.step(), told = signaller.step(), took = receiver.step(signaller.finished());
    const u64 now_ns = global_timer_ns();
    if (met || told || took) {
      progress_ns = now_ns;
      continue;
    }
    if (!receiver.finished() || !roll.finished()) {
      if (load_relaxed_gpu(&workspace_header(args, args.rank)->abort) != kNoFault) break;
      // Later than the store threads' waits: those know the rank that is missing, this one only who waits for it too.
      if (now_ns - progress_ns > args.deadline_ns + args.deadline_ns / 4) {
        const WaitSite site = receiver.finished() ? WaitSite{kEntry, roll.peer(), 0}
                                                  : WaitSite{kCopyRole, receiver.queue.owner, receiver.queue.index};
        report_fault<Op::kOperator>(args, kPeerTimeout, site, epoch, receiver.finished() ? roll.seen() : receiver.seen(),
                                    now_ns - progress_ns);
        break;
      }
    } else if (now_ns - progress_ns > stall_limit_ns(args)) {
      trap_stalled(args, kSignalRole, signaller.position);
    }
    __nanosleep(32);
  }
  bulk_wait<0>();
}

}  // namespace mk
