#pragma once
// All-gather by the copy engine: kernels of one thread around its transfers, in the order of their streams.
//
// kernel    stream  waits for               signals        does
// gate      side    entered of every peer   sending        writes the epoch where the copy engine takes it as a flag
// open      main                            entered        instead of a fused kernel: enters the launch
// arrivals  main    shard_ready; at the end                before a product of rows that had to come; at last leaves
//                   sending, entered                       the launch
//
// After the gate the copy engine writes rows of the shard to a peer, then the word with the epoch as their flag: one
// stream, so the flag comes last. The rows lie in an area of their own, which is free once every peer has entered this
// launch: all have finished the one before.
#include "device/gather_arrivals.cuh"

namespace mk {

struct Engine {
  struct Tile {
    static constexpr int kTileBytes = 0;
  };
  static constexpr OperatorId kOperator = kAllGatherGemm;
};

/// The epoch of the launch that the workspace is in or comes to; 0 after a fault.
MK_DEVICE u32 current_epoch(const LaunchArguments& args) {
  const WorkspaceHeader* header = workspace_header(args, args.rank);
  if (load_relaxed_gpu(&header->abort) != kNoFault) return 0;
  // Relaxed: stream order; the launch can't end before the gate has passed.
  const u32 epoch = load_relaxed_gpu(&header->epoch) + 1;
  return epoch == 0 ? 1 : epoch;
}

MK_DEVICE void gate_role(const LaunchArguments& args, const GatherArguments& gather) {
  const u32 epoch = current_epoch(args);
  u32* word = Gathering<Engine::Tile>{args, gather, epoch}.sending();
  if (epoch == 0) return;  // the word keeps its epoch: what it is copied to is not raised
  // Publishes: the epoch has been read.
  // pairs-with: sending release (gate_role -> signal_role), scope sys
  fence_acq_rel_sys();
  // Relaxed: the fence above releases.
  store_relaxed_sys(word, epoch);
  for (u32 peer = 0; peer < args.world; ++peer) {
    if (peer == args.rank) continue;
    if (!meet_peer<kAllGatherGemm>(args, epoch, WaitSite{kEntry, peer, 0})) return;
  }
}

MK_DEVICE void open_role(const LaunchArguments& args) {
  const RollCall<Engine> roll(args, enter_launch<kAllGatherGemm>(args));
}

/// `last`: nothing more has to come in this launch.
MK_DEVICE void engine_arrivals_role(const LaunchArguments& args, const GatherArguments& gather, u32 source, u32 group,
                                    u32 last) {
  const Gathering<Engine::Tile> launch{args, gather, current_epoch(args)};
  Arrivals<Engine> arrivals(launch, kLoadRole);
  arrivals.need(source, group);
  if (!last) return;
  for (u32 peer = 0; peer < args.world && !arrivals.given_up; ++peer) {
    if (peer == args.rank) continue;
    arrivals.given_up = !meet_peer<kAllGatherGemm>(args, launch.epoch, WaitSite{kEntry, peer, 0});
  }
  wait_for_gate<Engine>(launch);
  leave_launch(args, launch.epoch);
}

}  // namespace mk
