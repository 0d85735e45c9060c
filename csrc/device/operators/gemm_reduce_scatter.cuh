#pragma once
// GEMM + reduce-scatter: this rank's rows of the sum over all ranks of (sum_i a[i] @ weight[i] + bias).
//
// role     waits for                        signals                   touches
// load     empty stages                     full stages               a, weight
// compute  full stages                      empty stages              bias; own tiles: staged partials
//          empty or staged panels           full panels
// store    full panels; own tiles: partial  empty, staged panels      own tiles: out
//          of every peer; peers' tiles:     sent counts               peers' tiles: the owner's staging
//          entered, partial_free
// signal   sent counts                      partial_ready at owners,  flags
//                                           partial_free at peers
//
// Where the launch `adds`, own tiles are added to what lies in out; each element once.
#include "device/block.cuh"
#include "device/stream.cuh"

namespace mk {

template <class Tile_, class Element_, bool kHasBias_>
struct GemmReduceScatter {
  using Tile = Tile_;
  using Element = Element_;
  using Schedule = mk::Schedule<true>;
  using Sink = ReduceSink<GemmReduceScatter>;
  using Receiver = NoArrivals<GemmReduceScatter>;
  static constexpr OperatorId kOperator = kGemmReduceScatter;
  static constexpr bool kReduces = true, kHasBias = kHasBias_;
  static constexpr Activation kActivation = Activation::kNone;
  static constexpr Broadcast kBroadcast = Broadcast::kNone;

  /// Whether other ranks must hear of a tile: its owner of a partial; of an own tile, those who need its slot again.
  static MK_DEVICE bool publishes(const LaunchArguments& args, const Schedule& schedule, const Task& task) {
    return task.owner != args.rank || task.index + args.slots < schedule.count(args.rank);
  }
};

/// Few rows, one-shot: every rank sends the owners' rows to them and sums its own.
//
// role     waits for                       signals                   touches
// load     empty stages                    full stages               a, weight
// compute  full stages, cluster's sums,    empty stages              bias; peers' mailboxes; own mailbox; out
//          words of own mailbox
// signal   entered of every peer           entered                   flags
template <class Tile_, class Element_, bool kHasBias_>
struct StreamGemmReduceScatter {
  using Tile = Tile_;
  using Element = Element_;
  static constexpr OperatorId kOperator = kGemmReduceScatter;
  static constexpr bool kReduces = true, kScatters = true, kHasBias = kHasBias_;
  static constexpr Activation kActivation = Activation::kNone;
};

}  // namespace mk
