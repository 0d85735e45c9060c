#pragma once
// Writing the timeline: what one thread did from when to when. All of it vanishes unless kTrace is set, a constant that
// each unit defines before its first include.
#include "abi/trace.h"
#include "device/sync.cuh"

namespace mk {

/// One thread's lane: `begin`, the task, `end`. Waits between the two are told apart by `now` before and `waited` after.
/// Registers are few beside the accumulators: times are their low words, and what the arguments know is not kept.
struct Trace {
  static constexpr u32 kNone = kTraceLanes;
  const LaunchArguments& args;
  u32 lane = kNone;  ///< kNone: nothing is written
  u32 start_ns = 0;
  u32 waited_ns = 0;

  /// `writes`: of several threads that do one task together, the one that records it.
  MK_DEVICE Trace(const LaunchArguments& args, u32 lane_index, bool writes = true) : args(args) {
    if constexpr (kTrace) lane = writes && blockIdx.x < args.trace_blocks ? lane_index : kNone;
  }

  MK_DEVICE u32 now() const {
    if constexpr (kTrace) return (u32)global_timer_ns();
    return 0;
  }
  MK_DEVICE void begin() {
    if constexpr (kTrace) start_ns = now(), waited_ns = 0;
  }
  /// `covered_ns`: so much of it had other work of this thread under way.
  MK_DEVICE void waited(u32 since_ns, u32 covered_ns = 0) {
    if constexpr (kTrace) {
      const i32 uncovered_ns = (i32)(now() - since_ns - covered_ns);  // the timer has been seen to step back
      waited_ns += uncovered_ns > 0 ? (u32)uncovered_ns : 0;
    }
  }

  MK_DEVICE void end(TraceRole role, u32 owner, u32 tile) {
    if constexpr (kTrace) {
      if (lane == kNone) return;
      const u64 slots = (u64)(blockIdx.x * kTraceLanes + lane) * (args.trace_records + 1), end_ns = global_timer_ns();
      TraceRecord* ring = reinterpret_cast<TraceRecord*>(args.trace) + slots;
      TraceLaneHeader* header = reinterpret_cast<TraceLaneHeader*>(ring);
      const u64 number = header->written;
      ring[1 + (u32)number % args.trace_records] = TraceRecord{
          end_ns - ((u32)end_ns - start_ns), end_ns, waited_ns, tile, args.trace_launch, (u8)role, (u8)owner, {}};
      header->written = number + 1;
    }
  }
  /// A task that is nothing but a wait.
  MK_DEVICE void end_wait(TraceRole role, u32 owner, u32 tile) {
    waited(start_ns);
    end(role, owner, tile);
  }
};

/// As the other, and the time that passes is time waited, but for `covered_ns` of it.
MK_DEVICE void wait_phase(const LaunchArguments& args, u32 barrier, u32 parity, Role role, Trace& trace,
                          u32 covered_ns = 0) {
  if constexpr (kTrace) {
    if (mbarrier_test_wait(barrier, parity)) return;
  }
  const u32 since_ns = trace.now();
  wait_phase(args, barrier, parity, role);
  trace.waited(since_ns, covered_ns);
}

}  // namespace mk
