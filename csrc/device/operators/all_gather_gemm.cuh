#pragma once
// All-gather + GEMMs: out[i] = gathered @ weight[i] + bias[i], for up to four weights; and the gathered tensor.
//
// role      waits for                   signals                 touches
// carry     loaded images; image_ready  entered, image_ready    the shard; workspaces of the peers, or the own one;
//           where rows are returned                             the gathered tensor
// lay       entered                     image_laid              the shard, the own workspace: where blocks fetch
// arrival   entered, image_ready        arrived                 nothing
// load      arrived, empty stages       full stages             the shard or a workspace, weight
// compute   full stages, empty panels   empty stages, full      bias
//                                       panels
// store     full panels                 empty panels            out
//
// All roles are in every block. The shard is contiguous. The first block also calls the roll, as every launch with
// peers does.
#include "device/gather_block.cuh"

namespace mk {

/// `kPulls_`: blocks fetch the peers' images. `kReturns_`: the gathered tensor is a result, too.
template <class Tile_, class Element_, bool kHasBias_, bool kPulls_, bool kReturns_>
struct AllGatherGemm {
  using Tile = Tile_;
  using Element = Element_;
  static constexpr OperatorId kOperator = kAllGatherGemm;
  static constexpr bool kReduces = false, kHasBias = kHasBias_, kPulls = kPulls_, kReturns = kReturns_;
  static constexpr Activation kActivation = Activation::kNone;
};

}  // namespace mk
