#pragma once
// All-gather by the copy engine: kernels of one thread around its transfers, in the order of their streams.
//
// kernel    stream  waits for               signals        does
// gate      side    entered of every peer   sending        writes the epoch where the copy engine takes it as a flag
//                                           or lost_peer   where a peer does not come
// open      main                            entered        instead of a fused kernel: enters the launch
// arrivals  main    shard_ready; at the end                before a product of rows that had to come; at last leaves
//                   sending, entered                       the launch
// audit     main    lost_peer                              after the last product: have its rows been spoilt?
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

/// The launch has been given up, but transfers that are in a stream can't be called back. They raise no flag, since the
/// word that they copy keeps its epoch. A peer that still reads rows of the launch before must not take what they write
/// for those: it is told before the first of them begins.
MK_DEVICE void disown_transfers(const LaunchArguments& args) {
  for (u32 peer = 0; peer < args.world; ++peer) {
    // Relaxed: the fence below, and the end of this kernel, come before the transfers.
    if (peer != args.rank) store_relaxed_sys(&workspace_header(args, peer)->lost_peer, args.rank + 1);
  }
  // Publishes: nothing but the words.
  // pairs-with: lost_peer release (gate_role -> audit_role), scope sys
  fence_acq_rel_sys();
}

MK_DEVICE bool meet_peers(const LaunchArguments& args, u32 epoch) {
  for (u32 peer = 0; peer < args.world; ++peer) {
    if (peer == args.rank) continue;
    if (!meet_peer<kAllGatherGemm>(args, epoch, WaitSite{kEntry, peer, 0})) return false;
  }
  return true;
}

MK_DEVICE void gate_role(const LaunchArguments& args, const GatherArguments& gather) {
  const u32 epoch = current_epoch(args);
  if (epoch == 0 || !meet_peers(args, epoch)) {
    disown_transfers(args);
    return;
  }
  // Publishes: the epoch has been read.
  // pairs-with: sending release (gate_role -> signal_role), scope sys
  fence_acq_rel_sys();
  // Relaxed: the fence above releases.
  store_relaxed_sys(Gathering<Engine::Tile>{args, gather, epoch}.sending(), epoch);
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
  if (!arrivals.given_up) meet_peers(args, launch.epoch);
  wait_for_gate<Engine>(launch);
  leave_launch(args, launch.epoch);
}

/// The launch has been left, but for its last product.
MK_DEVICE void audit_role(const LaunchArguments& args) {
  // Relaxed: stream order.
  audit_transfers<kAllGatherGemm>(args, load_relaxed_gpu(&workspace_header(args, args.rank)->epoch));
}

}  // namespace mk
