#pragma once
// GEMM + reduce-scatter and GEMM + all-reduce over several nodes. Within a node as alone: partials go to the rank that has
// the owner's number. That rank sums them; where the owner is a rail peer the sum goes to it by the network, chunk by
// chunk, and the owner adds the nodes' sums to its own. An all-reduce returns finished tiles the same way.
//
// role     waits for                          signals                   touches
// load     empty stages                       full stages               a, weight
// compute  full stages                        empty stages              bias; staged partials and nodes' sums
//          empty or staged panels             full panels
// store    full panels; handled tiles:        empty, staged panels      own tiles: out, final outbox, peers' staging
//          partial of every peer; own ones:   sent counts               rail peers': outbox
//          net_partial, net_final_free                                  peers': the handling rank's staging
//          rail peers': net_partial_free
// signal   sent counts, the ring's credits    flags, commands           flags, chunk counters, the proxy's ring
// copy     net_final, final_ready             net_final_free,           all-reduce: finished tiles to out and to the
//                                             final_ready, final_free   other ranks of the node
//
// Sums: own accumulators, then this node's other ranks, then the other nodes, in fp32; a node's sum is rounded once for
// the way. One rank sums a tile, so all get the same bits.
#include "device/block.cuh"
#include "device/network/receive.cuh"

namespace mk {

/// In the index of a TileNote: this rank sums the tile for a rail peer.
inline constexpr u32 kRailNote = 1u << 30;

/// Both operators; `kHierarchical`: with several ranks in a node.
template <class Op, bool kScattersRows, bool kHierarchical_>
struct NetworkOperator {
  using Schedule = NetworkSchedule<kScattersRows>;
  static constexpr bool kReduces = true, kHierarchical = kHierarchical_;
  static constexpr Activation kActivation = Activation::kNone;

  /// Whether anybody must hear of a tile.
  static MK_DEVICE bool publishes(const LaunchArguments& args, const Schedule& schedule, const Task& task) {
    if (!kScattersRows || kHierarchical) return true;
    const RailTile at = schedule.rail(task.index);
    return at.node != schedule.node || schedule.is_reused(at.index, at.node, args.rank);
  }
};

template <class Tile_, class Element_, bool kHasBias_, bool kHierarchical>
struct NetworkGemmReduceScatter
    : NetworkOperator<NetworkGemmReduceScatter<Tile_, Element_, kHasBias_, kHierarchical>, true, kHierarchical> {
  using Tile = Tile_;
  using Element = Element_;
  using Sink = NetworkSink<NetworkGemmReduceScatter>;
  using Receiver = NoFinals<NetworkGemmReduceScatter>;
  static constexpr OperatorId kOperator = kGemmReduceScatter;
  static constexpr bool kHasBias = kHasBias_;
  static constexpr Broadcast kBroadcast = Broadcast::kNone;

};

template <class Tile_, class Element_, bool kHasBias_, bool kHierarchical>
struct NetworkGemmAllReduce
    : NetworkOperator<NetworkGemmAllReduce<Tile_, Element_, kHasBias_, kHierarchical>, false, kHierarchical> {
  using Tile = Tile_;
  using Element = Element_;
  using Sink = NetworkSink<NetworkGemmAllReduce>;
  static constexpr OperatorId kOperator = kGemmAllReduce;
  static constexpr bool kHasBias = kHasBias_;
  static constexpr Broadcast kBroadcast = Broadcast::kStaged;
  static_assert(Tile::kCopiesOut, "finished tiles are copied out of the workspace");

  /// What comes over the network, then what comes from the ranks of this node; each goes on by itself.
  template <class Op>
  struct Receivers {
    NetworkCopyOut<Op, NetworkFinals<Op>, 0, kHierarchical ? 1 : kSparePanels> nodes;
    NetworkCopyOut<Op, LocalFinals<Op>, 1, 1> peers;

    MK_DEVICE Receivers(const LaunchArguments& args, const SharedMemory<Tile>& memory,
                        const typename Op::Schedule& schedule, u32 epoch)
        : nodes(args, memory, schedule, epoch), peers(args, memory, schedule, epoch) {}
    MK_DEVICE bool finished() const { return nodes.finished() && (!kHierarchical || peers.finished()); }
    MK_DEVICE WaitSite site() const { return nodes.finished() ? peers.site() : nodes.site(); }
    MK_DEVICE u32 seen() const { return nodes.finished() ? peers.seen() : nodes.seen(); }
    MK_DEVICE bool step() {
      bool moved = nodes.step();
      if constexpr (kHierarchical) moved |= peers.step();
      return moved;
    }
  };
  using Receiver = Receivers<NetworkGemmAllReduce>;
};

/// Load role: what the compute role is told of a tile is who sums it.
template <class Op>
MK_DEVICE void network_load_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory,
                         const typename Op::Schedule& schedule) {
  using Tile = typename Op::Tile;
  Ring<Tile> ring;
  Trace trace(args, kLoadLane);
  for (u32 position = blockIdx.x; position < schedule.positions(); position += gridDim.x) {
    const Task task = schedule.task(position);
    if (!task.valid) continue;
    const TilePlace place = schedule.template place<Tile>(args, task);
    const RailTile at = schedule.rail(task.index);
    const bool is_rail = at.node != schedule.node;
    TileNote note{task.index, place.column};
    if constexpr (Op::kHierarchical) {
      note.index |= task.owner != args.rank ? TileNote::kPeer : is_rail ? kRailNote : 0;
    } else {
      note.index = is_rail ? task.index | TileNote::kPeer : at.index;  // no partials to add
    }
    trace.begin();
    load_tile<Tile>(args, memory, ring, note, place.row, trace);
    trace.end(kTraceLoad, task.owner, task.index);
  }
  load_end<Tile>(args, memory, ring);
}

/// Compute role: the epilogue of tiles that others' sums are added to.
template <class Op>
struct NetworkEpilogue : Epilogue<Op> {
  using Tile = typename Op::Tile;
  using Base = Epilogue<Op>;
  using typename Base::Values;
  using Base::args, Base::memory, Base::group;

  /// `kIsFinal`: the owner's sum, else that of this node for a rail peer. `tile`: the index of the note.
  template <bool kIsFinal>
  MK_DEVICE void finish_sum(const float* acc, u32 tile, i32 column) {
#pragma unroll 1
    for (int index = 0; index < Tile::kPanels; ++index) {
      const u32 shared = memory.panel(group, index);
      wait_phase(args, memory.panel_staged(group, index), this->own_tiles & 1, kComputeRole, this->trace);
      Values panel;
#pragma unroll
      for (int i = 0; i < Values::kValues; ++i) panel.values[i] = -0.f;  // as in sum_ranks
      add_accumulators(acc, index, panel);
      if constexpr (Op::kHasBias) panel.add_bias(args.bias, args.n, column + index * Tile::kPanelN);
      add_first(shared, panel);
      add_others<kIsFinal>(tile, (group * Tile::kPanels + index) * Tile::kPanelBytes + Values::fragment_offset(), panel);
      if constexpr (kIsFinal) {
        if (args.scale != 1.f) {
#pragma unroll
          for (int i = 0; i < Values::kValues; ++i) panel.values[i] *= args.scale;
        }
        panel.store_rows(shared);
      } else {
        panel.store_fragments(shared);
      }
      this->hand_over(index);
    }
    ++this->tiles;
    ++this->own_tiles;
  }

  MK_DEVICE void add_first(u32 shared, Values& panel) const {
#pragma unroll
    for (int z = 0; z < Values::kFragments; ++z) {
      panel.add(z, load_shared_vector(shared + Values::fragment_offset() + z * 512));
    }
    __syncwarp();  // this warp's rows will be stored over what its lanes have read
  }

  MK_DEVICE void add(const u8* slot, Values& panel) const {
#pragma unroll
    for (int z = 0; z < Values::kFragments; ++z) panel.add(z, load_global_vector(slot + z * 512));
  }

  template <bool kIsFinal>
  MK_DEVICE void add_others(u32 tile, u32 offset, Values& panel) const {
    const NetworkArguments& net = network_of(args);
    const u32 epoch = load_shared(memory.epoch());
    if constexpr (Op::kHierarchical) {
      const Staging<Tile> staging{args, epoch};
#pragma unroll 1
      for (u32 source = lowest_other(args.rank) + 1; source < args.world; ++source) {
        if (source != args.rank) add(staging.partial_slot(args.rank, source, tile) + offset, panel);
      }
    }
    if constexpr (kIsFinal) {
      const NetworkStaging<Tile> boxes{args, epoch};
      const u32 at = Op::kHierarchical ? Op::Schedule::template make<Tile>(args, 1).rail(tile).index : tile;
      const u32 first = Op::kHierarchical ? 0 : lowest_other(net.node) + 1;  // that one is in shared memory
#pragma unroll 1
      for (u32 node = first; node < net.nodes; ++node) {
        if (node != net.node) add(boxes.here(boxes.inbox(net.node, node, at)) + offset, panel);
      }
    }
  }
};

/// Compute role: as alone, with one more kind of tile.
template <class Op>
MK_DEVICE void network_compute_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory, int group) {
  using Tile = typename Op::Tile;
  const u32 k_blocks = count_k_blocks(args);
  Trace trace(args, kComputeLane + group, threadIdx.x % 128 == 0);
  NetworkEpilogue<Op> epilogue{{args, memory, group, trace}};
  Ring<Tile> ring;
  for (TileNote note = next_tile(args, memory, ring, trace); note.index != TileNote::kEnd;
       note = next_tile(args, memory, ring, trace)) {
    const i32 column = note.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN);
    float acc[Tile::kGroupN / 2];
    multiply_tile<typename Op::Element>(args, memory, ring, group, k_blocks, acc, trace);
    const u32 index = note.index & ~(TileNote::kPeer | kRailNote);
    trace.end(kTraceMainloop, args.rank, index);
    trace.begin();
    if (note.index & TileNote::kPeer) {
      epilogue.finish_partial(acc, column);
    } else if (Op::kHierarchical && (note.index & kRailNote)) {
      epilogue.template finish_sum<false>(acc, index, column);
    } else {
      epilogue.template finish_sum<true>(acc, index, column);
    }
    trace.end(kTraceEpilogue, args.rank, index);
  }
}

/// Signal role: as alone; what it waits for may be a rail peer, or the proxy itself.
template <class Op>
MK_DEVICE void network_signal_role(const LaunchArguments& args, const SharedMemory<typename Op::Tile>& memory,
                           const typename Op::Schedule& schedule) {
  constexpr u32 kIdleRoundsBetweenLooks = 4096;
  const u32 epoch = enter_launch<Op::kOperator>(args);
  store_shared(memory.epoch(), epoch);
  mbarrier_arrive(memory.entered());
  NetworkRollCall<Op> roll(args, epoch);
  NetworkSignaller<Op> signaller(args, memory, schedule, epoch);
  typename Op::Receiver receiver(args, memory, schedule, epoch);
  u64 progress_ns = global_timer_ns();
  u32 idle = 0;
  while (!signaller.finished() || !receiver.finished() || !roll.finished()) {
    const bool met = roll.step(), told = signaller.step(), took = receiver.step();
    const u64 now_ns = global_timer_ns();
    if (met || told || took) {
      progress_ns = now_ns;
      continue;
    }
    if (!receiver.finished() || !roll.finished()) {
      if (load_relaxed_gpu(&workspace_header(args, args.rank)->abort) != kNoFault) break;
      const WaitSite site = receiver.finished() ? roll.site() : receiver.site();
      // Later than the store threads' waits: those know the rank that is missing, this one only who waits for it too.
      if (now_ns - progress_ns > args.deadline_ns + args.deadline_ns / 4) {
        report_fault<Op::kOperator>(args, kPeerTimeout, site, epoch, receiver.finished() ? roll.seen() : receiver.seen(),
                                    now_ns - progress_ns);
        break;
      }
      if (++idle % kIdleRoundsBetweenLooks == 0 && network_is_down<Op::kOperator>(args, site)) break;
    } else if (now_ns - progress_ns > stall_limit_ns(args)) {
      trap_stalled(args, kSignalRole, signaller.position);
    }
    __nanosleep(32);
  }
  bulk_wait<0>();
}

/// The threads that talk to the network need more registers than those of a node alone; most, where finished tiles come
/// from the network and from the node.
template <class Op>
struct NetworkRegisters {
  static constexpr bool kTwoReceivers = Op::kHierarchical && Op::kBroadcast != Broadcast::kNone;
  static constexpr int kHelper = kTwoReceivers ? 104 : 88, kMath = kTwoReceivers ? 200 : 208;
};

/// The whole kernel; as run_block.
template <class Op>
MK_DEVICE void run_network_block(const LaunchArguments& args) {
  using Tile = typename Op::Tile;
  const auto memory = shared_memory<Tile>();
  Trace trace(args, kComputeLane, threadIdx.x == 0);
  trace.begin();
  if (threadIdx.x == 0) memory.init();
  __syncthreads();

  const auto schedule = Op::Schedule::template make<Tile>(args, gridDim.x);
  const auto [group, warp, first_lane] = ThreadPlace{};
  if (group == kMathGroups) {
    decrease_registers<NetworkRegisters<Op>::kHelper>();
    if (first_lane && warp == 0) network_load_role<Op>(args, memory, schedule);
    if (first_lane && (warp == 1 || warp == 2)) store_role<Op>(args, memory, schedule, warp - 1);
    if (first_lane && warp == 3) network_signal_role<Op>(args, memory, schedule);
    __syncwarp();
  } else {
    increase_registers<NetworkRegisters<Op>::kMath>();
    network_compute_role<Op>(args, memory, group);
  }
  leave_block(args, memory, trace);
}

}  // namespace mk
