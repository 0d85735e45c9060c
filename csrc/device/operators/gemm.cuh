#pragma once
// GEMM: out = activation(sum_i a[i] @ weight[i] + bias). One rank, no workspace.
//
// role     waits for              signals          touches
// load     empty stages           full stages      a, weight
// compute  full stages            empty stages     bias
//          empty panels           full panels
// store    full panels            empty panels     out
#include "device/block.cuh"
#include "device/stream.cuh"

namespace mk {

/// Store thread of one math group: panels to the result.
template <class Op>
struct LocalSink {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  const int group;

  MK_DEVICE LocalSink(const LaunchArguments& args, const SharedMemory<Tile>& memory, int group)
      : args(args), memory(memory), group(group) {}
  MK_DEVICE void begin(const Task&) {}
  MK_DEVICE void send(const Task&, const TilePlace& place, int index, bool) {
    const i32 x = place.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN) + index * Tile::kPanelN;
    tensor_store(&args.out, memory.panel(group, index), x, place.out_row + (Tile::kSplitsRows ? group * 64 : 0), 0);
  }
  MK_DEVICE void end(const Task&, const typename Op::Schedule&) {}
};

template <class Tile_, class Element_, bool kHasBias_, Activation kActivation_>
struct Gemm {
  using Tile = Tile_;
  using Element = Element_;
  using Schedule = mk::Schedule<false>;
  using Sink = LocalSink<Gemm>;
  static constexpr OperatorId kOperator = kGemm;
  static constexpr bool kReduces = false, kHasBias = kHasBias_;
  static constexpr Activation kActivation = kActivation_;
};

/// Few rows: no store role, the compute role stores from registers.
template <class Tile_, class Element_, bool kHasBias_, Activation kActivation_>
struct StreamGemm {
  using Tile = Tile_;
  using Element = Element_;
  static constexpr OperatorId kOperator = kGemm;
  static constexpr bool kReduces = false, kScatters = false, kHasBias = kHasBias_;
  static constexpr Activation kActivation = kActivation_;
};

}  // namespace mk
