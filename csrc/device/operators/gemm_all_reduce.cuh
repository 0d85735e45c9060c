#pragma once
// GEMM + all-reduce, two-shot: the sum over all ranks of (sum_i a[i] @ weight[i] + bias), the same bits on every rank.
// Each tile has one owner, who sums and sends the result to all.
//
// role     waits for                        signals                   touches
// load     empty stages                     full stages               a, weight
// compute  full stages                      empty stages              bias; own tiles: staged partials
//          empty or staged panels           full panels
// store    full panels; own tiles: partial  empty, staged panels      own tiles: out, and every peer's result or staging
//          of every peer, final_free;       sent counts               peers' tiles: the owner's staging
//          peers' tiles: entered,
//          partial_free
// signal   sent counts                      partial_ready, partial_   flags
//                                           free, final_ready
// copy     final_ready of every owner       final_free                staged only: finished tiles to out
//
// Where the launch `adds` (staged only), finished tiles are added to what lies in out: each element once, so that its
// bits do not depend on the order.
//
// A direct store into a peer's result needs no entry barrier: a tile is finished only after that peer's partial of this
// launch has come, so its stream is inside this launch and earlier readers of the result are done.
#include "device/block.cuh"
#include "device/stream.cuh"

namespace mk {

template <class Tile_, class Element_, bool kHasBias_, Broadcast kBroadcast_>
struct GemmAllReduce {
  using Tile = Tile_;
  using Element = Element_;
  using Schedule = mk::Schedule<false>;
  using Sink = ReduceSink<GemmAllReduce>;
  static constexpr OperatorId kOperator = kGemmAllReduce;
  static constexpr bool kReduces = true, kHasBias = kHasBias_;
  static constexpr Activation kActivation = Activation::kNone;
  static constexpr Broadcast kBroadcast = kBroadcast_;
  static_assert(kBroadcast != Broadcast::kNone && Tile::kCopiesOut == (kBroadcast == Broadcast::kStaged));

  template <class Op, Broadcast>
  struct ReceiverOf {
    using Type = ArrivalWatch<Op>;
  };
  template <class Op>
  struct ReceiverOf<Op, Broadcast::kStaged> {
    using Type = CopyOut<Op>;
  };
  using Receiver = typename ReceiverOf<GemmAllReduce, kBroadcast>::Type;

  /// Every tile goes to another rank.
  static MK_DEVICE bool publishes(const LaunchArguments&, const Schedule&, const Task&) { return true; }
};

/// Few rows, one-shot: every rank sends its partial to all others and sums.
//
// role     waits for                       signals                   touches
// load     empty stages                    full stages               a, weight
// compute  full stages, cluster's sums,    empty stages              bias; peers' mailboxes; own mailbox; out
//          words of own mailbox
// signal   entered of every peer           entered                   flags
template <class Tile_, class Element_, bool kHasBias_>
struct StreamGemmAllReduce {
  using Tile = Tile_;
  using Element = Element_;
  static constexpr OperatorId kOperator = kGemmAllReduce;
  static constexpr bool kReduces = true, kScatters = false, kHasBias = kHasBias_;
  static constexpr Activation kActivation = Activation::kNone;
};

}  // namespace mk
