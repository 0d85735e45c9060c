#pragma once
// All-gather + GEMM in one block: where shards lie in the workspace, what has come, and the roles that compute.
#include "device/epilogue.cuh"
#include "device/gather_schedule.cuh"

namespace mk {

/// A tile's shared memory and, behind it, the barriers of the rings through which shards are moved. The rings lie where
/// stages and panels do: a block moves shards before it computes.
template <class Base>
struct GatherTile : Base {
  static constexpr u32 kChunkBytes = ChunkWalk::kChunkBytes;
  static constexpr u32 kSlotsThatFit = Base::kBarrierOffset / kChunkBytes;
  static constexpr u32 kRingSlots = kSlotsThatFit < 12 ? kSlotsThatFit : 12;
  static constexpr u32 kCopySlots = kRingSlots / 3;
  static constexpr u32 kPushSlots = kRingSlots - kCopySlots;
  static constexpr u32 kRingBarrierOffset = (Base::kSharedBytes - 1024 + 7) / 8 * 8;
  static constexpr u32 kMovedOffset = kRingBarrierOffset + kRingSlots * 8;  ///< barrier: the block moves nothing more
  static constexpr int kSharedBytes = Base::kSharedBytes + 112;
  static_assert(1024 + kMovedOffset + 8 <= kSharedBytes && kSharedBytes <= 232448, "shared memory of one SM");
};

/// One launch: its arguments and its epoch, and where things lie in the workspaces.
template <class Tile>
struct Gathering {
  const LaunchArguments& args;
  const GatherArguments& gather;
  u32 epoch;

  MK_DEVICE u8* arena(u32 at) const {
    if (gather.landing != 0) return reinterpret_cast<u8*>(gather.landing);  // the copy engine's: only of this rank
    return reinterpret_cast<u8*>(args.workspace[at] + args.region_offset + (epoch & 1) * args.region_bytes);
  }
  MK_DEVICE u32 shard_rows() const { return gather.order == kColumns ? args.m : args.segments * args.segment_rows; }
  MK_DEVICE u64 shard_bytes() const { return (u64)shard_rows() * args.k[0] * 2; }
  /// kApart, kColumns: a rank keeps no copy of its own shard; the others' lie in the order in which they come.
  MK_DEVICE u32 slot(u32 at, u32 source) const { return source > at ? source - at - 1 : source + args.world - at - 1; }

  MK_DEVICE u32 group_of(u32 row) const { return row / gather.group_rows; }
  MK_DEVICE u32 last_group() const { return (shard_rows() - 1) / gather.group_rows; }
  /// Raised by `source` (its block `part`, or its copy engine) when rows of the group have come to rank `at`, and those
  /// of all groups before it.
  MK_DEVICE u32* flag(u32 at, u32 source, u32 group, u32 part) const {
    return Staging<Tile>{args, epoch}.flag(at, kPartialReady, source, group * gather.parts + part);
  }

  /// Where the copy engine takes the epoch from, to raise a flag with it. A rank has no other use for these flags.
  MK_DEVICE u32* sending() const { return Staging<Tile>{args, epoch}.flag(args.rank, kPartialReady, args.rank, 0); }

  /// Calls visit(offset in a gathered tensor, offset in the run, bytes) for the pieces of a run of one shard.
  template <class Visit>
  MK_DEVICE void in_gathered(u32 source, u64 offset, u32 bytes, Visit&& visit) const {
    const u64 piece_bytes = (u64)(gather.order == kColumns ? 1 : args.segment_rows) * args.k[0] * 2;
    u64 piece = offset < piece_bytes ? 0 : offset / piece_bytes;
    u64 within = offset - piece * piece_bytes;
    for (u32 done = 0; done < bytes; ++piece, within = 0) {
      const u64 rest = piece_bytes - within;
      const u32 size = rest < bytes - done ? (u32)rest : bytes - done;
      visit((piece * args.world + source) * piece_bytes + within, done, size);
      done += size;
    }
  }
  /// The same for the place of a shard in the arena of rank `at`.
  template <class Visit>
  MK_DEVICE void in_arena(u32 at, u32 source, u64 offset, u32 bytes, Visit&& visit) const {
    if (gather.order == kTogether) {
      in_gathered(source, offset, bytes, visit);
    } else {
      visit(slot(at, source) * shard_bytes() + offset, 0u, bytes);
    }
  }
};

/// Wait for a count that another thread of this block raises.
template <class Count>
MK_DEVICE u32 wait_count(const LaunchArguments& args, Count&& read, u32 expected, Role role) {
  u32 seen = read();
  if (reached(seen, expected)) return seen;
  const u64 start_ns = global_timer_ns();
  while (!reached(seen = read(), expected)) {
    if (global_timer_ns() - start_ns > stall_limit_ns(args)) trap_stalled(args, role, expected);
  }
  return seen;
}

/// What one thread, or the `kLanes` lanes of one warp together, know of the shards of the others.
template <class Op, u32 kLanes>
struct Arrivals {
  using Tile = typename Op::Tile;
  const Gathering<Tile>& launch;
  const Role role;
  u32 known = ~0u;  ///< source of which `ready` groups have come
  u32 ready = 0;
  u32 met = 0;      ///< bit set of peers that have entered this very launch
  bool given_up;

  MK_DEVICE Arrivals(const Gathering<Tile>& launch, Role role)
      : launch(launch), role(role), given_up(launch.epoch == 0) {}

  static MK_DEVICE bool all(bool mine) { return kLanes == 1 ? mine : __all_sync(~0u, mine); }
  static MK_DEVICE u32 lane() { return kLanes == 1 ? 0 : threadIdx.x % 32; }

  /// Everything of the source at once: what most tiles find.
  MK_DEVICE bool all_here(u32 source, u32 group) const {
    bool here = true;
    for (u32 part = lane(); part < launch.gather.parts && here; part += kLanes) {
      // pairs-with: shard_ready acquire (push_signal_role -> arrival_role), scope sys
      here = reached(load_acquire_sys(launch.flag(launch.args.rank, source, group, part)), launch.epoch);
    }
    return all(here);
  }

  /// Groups up to `group` of the source are here, or the launch has been given up. May be read by bulk copies.
  MK_DEVICE void need(u32 source, u32 group) {
    if (given_up || (source == known && group < ready)) return;
    const LaunchArguments& args = launch.args;
    if (source != args.rank && !(met >> source & 1)) {
      given_up = !all(meet_peer<Op::kOperator>(args, launch.epoch, WaitSite{role, source, group}));
      met |= 1u << source;
    }
    const u32 last = launch.last_group();
    if (!given_up && all_here(source, last)) {
      group = last;
    } else if (!given_up) {
      bool came = true;
      for (u32 part = lane(); part < launch.gather.parts && came; part += kLanes) {
        const u32* flag = launch.flag(args.rank, source, group, part);
        // pairs-with: shard_ready acquire (push_signal_role -> arrival_role), scope sys
        came = wait_until<Op::kOperator>(args, flag, launch.epoch, WaitSite{role, source, group});
      }
      given_up = !all(came);
    }
    known = source;
    ready = group + 1;
    fence_proxy_async();  // flags were read by generic loads, the rows are read by bulk copies
  }
};

/// The launch must not end before the gate of the copy engine has read its epoch.
template <class Op>
MK_DEVICE void wait_for_gate(const Gathering<typename Op::Tile>& launch) {
  if (launch.epoch == 0) return;
  const LaunchArguments& args = launch.args;
  // pairs-with: sending acquire (gate_role -> signal_role), scope sys
  wait_until<Op::kOperator>(args, launch.sending(), launch.epoch, WaitSite{kSignalRole, args.rank, 0});
}

/// Arrival role, one warp: what the load role will read next is here. It looks ahead, so that flags cost the mainloop
/// nothing, and asks for all flags of a group at once.
template <class Op>
MK_DEVICE void arrival_role(const Gathering<typename Op::Tile>& launch, const SharedMemory<typename Op::Tile>& memory,
                            const GatherSchedule& schedule) {
  const LaunchArguments& args = launch.args;
  Arrivals<Op, 32> arrivals(launch, kLoadRole);
  const bool leads = threadIdx.x % 32 == 0;
  Trace trace(args, kSignalLane, leads);
  u32 told = 0;
  const auto tell = [&](u32 source, u32 tile) {
    trace.end_wait(kTraceReceive, source, tile);
    ++told;
    __syncwarp();  // the lanes' acquired flags come before the leader's release
    // pairs-with: arrived release (arrival_role -> load_role), scope cta
    if (leads) store_release_shared(memory.sent_count(0), told);
  };
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<typename Op::Tile>(launch.gather, position);
    trace.begin();
    if (schedule.order == kApart) {
      if (place.owner == args.rank) continue;
      arrivals.need(place.owner, launch.group_of(place.last_row));
      tell(place.owner, position);
    } else if (schedule.order == kTogether) {
      if (told == 0) {
        for (u32 source = 0; source < args.world; ++source) arrivals.need(source, launch.last_group());
      }
      tell(args.rank, position);
    } else {
      for (u32 step = 1; step < args.world; ++step) {
        const u32 source = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
        arrivals.need(source, launch.group_of(place.last_row));
        tell(source, position);
      }
    }
  }
}

/// Load role: the products of one tile with one shard, k-block by k-block, into the ring.
template <class Op>
struct GatherLoader {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  Trace trace;
  Ring<Tile> ring;
  u32 arrived = 0;
  bool fresh = true;  ///< no stage has been used

  MK_DEVICE GatherLoader(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), trace(args, kLoadLane) {}

  MK_DEVICE void load_weight(int stage, u32 weight, i32 k, i32 column) {
    const u32 full = memory.stage_full(stage);
    mbarrier_arrive_expect(full, Tile::kStageBytes);
    if constexpr (Tile::kWeightIsKn) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kBlockN / Tile::kPanelN; ++chunk) {
        tensor_load(memory.b(stage) + chunk * Tile::kPanelBytes, &args.weight[weight], full,
                    column + chunk * Tile::kPanelN, k);
      }
    } else {
      tensor_load(memory.b(stage), &args.weight[weight], full, k, column);
    }
  }
  MK_DEVICE void note(int stage, const GatherPlace& place) {
    store_shared(memory.tile_note(stage), place.weight);
    store_shared(memory.tile_note(stage) + 4, place.column);
  }

  /// `own`: rows of this rank's shard, read in place; else rows that had to come. `first`: the tile begins here.
  MK_DEVICE void load(const GatherPlace& place, bool own, u32 row, i32 weight_k, bool first) {
    const u32 blocks = (args.k[0] + kBlockK - 1) / kBlockK;
    const TensorMap* map = &args.a[0];
    u32 ahead = 0;
    if (!own) {
      if (fresh) {  // weights can be on their way before the rows are here
        ahead = blocks < (u32)Tile::kStages ? blocks : (u32)Tile::kStages;
        note(0, place);
        for (u32 i = 0; i < ahead; ++i) load_weight(i, place.weight, weight_k + i * kBlockK, place.column);
      }
      const u64 since_ns = trace.now();
      // pairs-with: arrived acquire (arrival_role -> load_role), scope cta
      wait_count(args, [&] { return load_acquire_shared(memory.sent_count(0)); }, ++arrived, kLoadRole);
      trace.waited(since_ns);
      map = &gather.arena[load_shared(memory.epoch()) & 1];
    }
    fresh = false;
    for (u32 i = 0; i < blocks; ++i) {
      if (i >= ahead) {
        wait_phase(args, memory.stage_empty(ring.stage), ring.parity ^ 1, kLoadRole, trace);
        if (first && i == 0) note(ring.stage, place);
        load_weight(ring.stage, place.weight, weight_k + i * kBlockK, place.column);
      }
      tensor_load(memory.a(ring.stage), map, memory.stage_full(ring.stage), i * kBlockK, row);
      ring.advance();
    }
  }
};

/// Load role.
template <class Op>
MK_DEVICE void gather_load_role(const LaunchArguments& args, const GatherArguments& gather,
                                const SharedMemory<typename Op::Tile>& memory, const GatherSchedule& schedule) {
  using Tile = typename Op::Tile;
  GatherLoader<Op> loader(args, gather, memory);
  const u32 shard_rows = args.segments * args.segment_rows;
  const auto slot_of = [&](u32 source) {
    return source > args.rank ? source - args.rank - 1 : source + args.world - args.rank - 1;
  };
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<Tile>(gather, position);
    loader.trace.begin();
    if (schedule.order == kApart) {
      const bool own = place.owner == args.rank;
      loader.load(place, own, own ? place.row : slot_of(place.owner) * shard_rows + place.row, 0, true);
    } else if (schedule.order == kTogether) {
      loader.load(place, false, place.row, 0, true);
    } else {
      for (u32 step = 0; step < args.world; ++step) {
        const u32 source = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
        const u32 row = step == 0 ? place.row : slot_of(source) * args.m + place.row;
        loader.load(place, step == 0, row, source * args.k[0], step == 0);
      }
    }
    loader.trace.end(kTraceLoad, place.owner, position);
  }
  load_end<Tile>(args, memory, loader.ring);
}

/// Compute role: the epilogue of one tile.
template <class Op>
MK_DEVICE void finish_product(Epilogue<Op>& epilogue, const float* acc, i32 column, u64 bias, u32 n) {
  using Tile = typename Op::Tile;
  using Values = typename Epilogue<Op>::Values;
#pragma unroll
  for (int index = 0; index < Tile::kPanels; ++index) {
    epilogue.wait_empty(index);
    Values panel;
#pragma unroll
    for (int i = 0; i < Values::kValues; ++i) panel.values[i] = acc[index * Values::kValues + i];
    if constexpr (Op::kHasBias) {
      if (bias != 0) panel.add_bias(bias, n, column + index * Tile::kPanelN);
    }
    panel.store_rows(epilogue.memory.panel(epilogue.group, index));
    epilogue.hand_over(index);
  }
  ++epilogue.tiles;
}

/// Compute role: every tile of this block.
template <class Op>
MK_DEVICE void gather_compute_role(const LaunchArguments& args, const GatherArguments& gather,
                                   const SharedMemory<typename Op::Tile>& memory, int group) {
  using Tile = typename Op::Tile;
  const u32 k_blocks = (args.k[0] + kBlockK - 1) / kBlockK * (gather.order == kColumns ? args.world : 1);
  Trace trace(args, kComputeLane + group, threadIdx.x % 128 == 0);
  Epilogue<Op> epilogue{args, memory, group, trace};
  Ring<Tile> ring;
  // No `while (true)`: see compute_role.
  for (TileNote note = next_tile(args, memory, ring, trace); note.index != TileNote::kEnd;
       note = next_tile(args, memory, ring, trace)) {
    const i32 column = note.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN);
    float acc[Tile::kGroupN / 2];
    multiply_tile<typename Op::Element>(args, memory, ring, group, k_blocks, acc, trace);
    trace.end(kTraceMainloop, kSomePeer, note.index);
    trace.begin();
    finish_product(epilogue, acc, column, gather.bias[note.index], gather.n[note.index]);
    trace.end(kTraceEpilogue, kSomePeer, note.index);
  }
}

/// Store role: panel by panel as the math group fills them.
template <class Op>
MK_DEVICE void gather_store_role(const LaunchArguments& args, const GatherArguments& gather,
                                 const SharedMemory<typename Op::Tile>& memory, const GatherSchedule& schedule,
                                 int group) {
  using Tile = typename Op::Tile;
  Trace trace(args, kStoreLane + group);
  u32 tiles = 0;
  for (u32 position = schedule.first(); position < schedule.positions(); position = schedule.next(position)) {
    const GatherPlace place = schedule.template place<Tile>(gather, position);
    const i32 x = place.column + (Tile::kSplitsRows ? 0 : group * Tile::kGroupN);
    const i32 y = place.out_row + (Tile::kSplitsRows ? group * 64 : 0);
#pragma unroll 1
    for (int index = 0; index < Tile::kPanels; ++index) {
      wait_phase(args, memory.panel_full(group, index), tiles & 1, kStoreRole, trace);
      if (index == 0) trace.begin();
      tensor_store(&gather.out[place.weight], memory.panel(group, index), x + index * Tile::kPanelN, y, place.run);
      bulk_commit();
      if (index > 0) {
        bulk_wait_read<1>();
        mbarrier_arrive(memory.panel_empty(group, index - 1));
      }
    }
    bulk_wait_read<0>();
    mbarrier_arrive(memory.panel_empty(group, Tile::kPanels - 1));
    trace.end(kTraceStore, place.owner, position);
    ++tiles;
  }
  bulk_wait<0>();
}

}  // namespace mk
