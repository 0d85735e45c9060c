#pragma once
// Waiting: inside a block on mbarriers, for a peer on flags; and giving up, with a report of who was waited for.
#include "device/ptx.cuh"

namespace mk {

/// Who waits, for whom and for what: the text of a timeout.
struct WaitSite {
  Role role;
  u32 peer;
  u32 tile;
};

MK_DEVICE WorkspaceHeader* workspace_header(const LaunchArguments& args, u32 rank) {
  return reinterpret_cast<WorkspaceHeader*>(args.workspace[rank]);
}

/// Flags only grow; the difference is signed, so that they may wrap.
MK_DEVICE bool reached(u32 seen, u32 expected) { return (i32)(seen - expected) >= 0; }

/// The first fault of a workspace is the one that is reported; `code` is written after the rest.
template <OperatorId kOperator>
MK_DEVICE void report_fault(const LaunchArguments& args, FaultCode code, WaitSite site, u32 expected, u32 seen,
                            u64 waited_ns) {
  if (kOperator != kGemm && compare_and_swap_gpu(&workspace_header(args, args.rank)->abort, 0, code) != 0) return;
  volatile FaultReport* report = reinterpret_cast<FaultReport*>(args.fault);
  if (report == nullptr) return;
  report->op = kOperator;
  report->rank = args.rank;
  report->peer = site.peer;
  report->role = site.role;
  report->tile = site.tile;
  report->expected = expected;
  report->seen = seen;
  report->waited_ns = waited_ns;
  report->block = blockIdx.x;
  report->thread = threadIdx.x;
  __threadfence_system();
  report->code = code;
}

/// True once a peer's flag has reached `epoch`; false when the launch has been given up. Never blocks for ever.
/// After true, what the peer released before the flag may be read by ordinary loads of this thread.
template <OperatorId kOperator>
MK_DEVICE bool wait_until(const LaunchArguments& args, const u32* flag, u32 epoch, WaitSite site) {
  u32 seen = load_acquire_sys(flag);
  if (reached(seen, epoch)) return true;
  const u64 start_ns = global_timer_ns();
  while (true) {
    seen = load_acquire_sys(flag);
    if (reached(seen, epoch)) return true;
    if (load_relaxed_gpu(&workspace_header(args, args.rank)->abort) != kNoFault) return false;
    const u64 waited_ns = global_timer_ns() - start_ns;
    if (waited_ns > args.deadline_ns) {
      report_fault<kOperator>(args, kPeerTimeout, site, epoch, seen, waited_ns);
      return false;
    }
  }
}

/// Where rank `source` tells rank `at` which launch it has entered.
MK_DEVICE u64* entered_word(const LaunchArguments& args, u32 at, u32 source, u32 epoch) {
  return &workspace_header(args, at)->entered[epoch & 1][source];
}
MK_DEVICE u64 entry(const LaunchArguments& args, u32 epoch) { return (u64)args.identity << 32 | epoch; }

/// Has the peer, which has entered this epoch, entered it with this launch? If not, reports it.
template <OperatorId kOperator>
MK_DEVICE bool know_peer(const LaunchArguments& args, u32 epoch, WaitSite site) {
  const u64 seen = load_acquire_sys(entered_word(args, args.rank, site.peer, epoch));
  if (seen == entry(args, epoch)) return true;
  report_fault<kOperator>(args, kLaunchMismatch, site, args.identity, (u32)(seen >> 32), 0);
  return false;
}

/// Wait until a peer has entered this epoch. False, and a report, if it has entered it with another launch.
template <OperatorId kOperator>
MK_DEVICE bool meet_peer(const LaunchArguments& args, u32 epoch, WaitSite site) {
  const u64* word = entered_word(args, args.rank, site.peer, epoch);
  return wait_until<kOperator>(args, reinterpret_cast<const u32*>(word), epoch, site) &&
         know_peer<kOperator>(args, epoch, site);
}

/// A wait inside one block that did not end: reported in a few words, then a trap, since the block can't drain.
MK_DEVICE void trap_stalled(const LaunchArguments& args, Role role, u32 detail) {
  volatile FaultReport* report = reinterpret_cast<FaultReport*>(args.fault);
  if (report != nullptr) {
    report->role = role;
    report->seen = detail;
    report->block = blockIdx.x;
    report->code = kLocalStall;
    __threadfence_system();
  }
  __trap();
}

/// A thread may wait for its peers one after the other, each up to the deadline, while others of the block wait for it:
/// more passes only by a fault of ours.
MK_DEVICE constexpr u64 stall_limit_ns(u64 deadline_ns, u32 world) {
  return (world + 1) * deadline_ns + 1000000000ull;
}
MK_DEVICE u64 stall_limit_ns(const LaunchArguments& args) { return stall_limit_ns(args.deadline_ns, args.world); }

/// Wait for a phase of a barrier of this block.
MK_DEVICE void wait_phase(const LaunchArguments& args, u32 barrier, u32 parity, Role role) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const u64 start_ns = global_timer_ns();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, role, barrier);
  }
}

/// A captured graph knows nothing of the fault that its workspace had, and the host has taken the report: tell it again.
template <OperatorId kOperator>
MK_DEVICE void report_replay(const LaunchArguments& args, u32 aborted) {
  volatile FaultReport* report = reinterpret_cast<FaultReport*>(args.fault);
  if (report == nullptr || report->code != kNoFault) return;
  report->op = kOperator;
  report->rank = args.rank;
  report->seen = aborted;
  __threadfence_system();
  report->code = kReplayAfterFault;
}

/// One thread of each block, beside the first loads. Returns the epoch of this launch, or 0 where it must send nothing.
template <OperatorId kOperator>
MK_DEVICE u32 enter_launch(const LaunchArguments& args) {
  WorkspaceHeader* header = workspace_header(args, args.rank);
  // Relaxed: launches on one workspace follow each other in stream order; that is what the count checks.
  const u32 ticket = add_relaxed_gpu(&header->blocks_in, 1);
  const u32 aborted = load_relaxed_gpu(&header->abort);
  const u32 epoch = load_relaxed_gpu(&header->epoch) + 1;
  if (aborted != kNoFault) {
    if (args.is_captured && blockIdx.x == 0) report_replay<kOperator>(args, aborted);
    return 0;
  }
  if (ticket >= gridDim.x) {
    report_fault<kOperator>(args, kLaunchOrder, WaitSite{kEntry, args.rank, 0}, gridDim.x, ticket, 0);
    return 0;
  }
  return epoch == 0 ? 1 : epoch;
}

/// Thread 0 of each block, after everything else: the last block that leaves makes the epoch the finished one.
MK_DEVICE void leave_launch(const LaunchArguments& args, u32 epoch) {
  WorkspaceHeader* header = workspace_header(args, args.rank);
  if (add_relaxed_gpu(&header->blocks_out, 1) + 1 != gridDim.x) return;
  header->blocks_in = 0;
  header->blocks_out = 0;
  if (epoch != 0) header->epoch = epoch;
}

}  // namespace mk
