#pragma once
// All-gather + GEMM: the blocks that move shards, through rings of chunks in shared memory, before they compute.
#include "device/gather.cuh"

namespace mk {

/// A ring of chunks: loads run ahead of stores, and several of both are under way. Beside a GEMM it is the loads whose
/// latency decides the rate: four of them under way gave 22 GB/s with four stores as with eight.
template <class Tile, u32 kSlots, u32 kFirst>
struct ChunkRing {
  static constexpr u32 kLead = kSlots * 7 / 12;    ///< loads under way
  static constexpr u32 kStoring = kSlots - kLead;  ///< stores that may be under way when a slot is reused
  static_assert(kLead >= 1 && kStoring >= 1, "a ring of at least two");
  const LaunchArguments& args;
  const SharedMemory<Tile>& memory;
  u32 loaded = 0, stored = 0;

  MK_DEVICE u32 slot(u32 index) const { return memory.base + (kFirst + index % kSlots) * Tile::kChunkBytes; }
  MK_DEVICE u32 full(u32 index) const { return memory.base + Tile::kRingBarrierOffset + (kFirst + index % kSlots) * 8; }
  MK_DEVICE bool may_load() const { return loaded - stored < kLead; }

  /// The slot of the next load is free: its last store is complete. Returns how many stores are known to be.
  MK_DEVICE u32 reuse() {
    if (loaded < kSlots) return 0;
    bulk_wait<kStoring>();
    return stored - kStoring;
  }
  MK_DEVICE void expect(u32 bytes) { mbarrier_arrive_expect(full(loaded), bytes); }
  MK_DEVICE void wait_loaded() { wait_phase(args, full(stored), stored / kSlots & 1, kCopyRole); }
};

/// Push role: this rank's shard into the arenas of the others, in the order in which they need it; and on the way into
/// the gathered tensor, where that is returned. `kSlots`: of the ring.
template <class Op, u32 kSlots>
MK_DEVICE void push_role(const Gathering<typename Op::Tile>& launch, const SharedMemory<typename Op::Tile>& memory) {
  using Tile = typename Op::Tile;
  const LaunchArguments& args = launch.args;
  const GatherArguments& gather = launch.gather;
  ChunkRing<Tile, kSlots, 0> ring{args, memory};
  Trace trace(args, kExtraLane);
  const u8* shard = reinterpret_cast<const u8*>(gather.shard);
  u8* result = reinterpret_cast<u8*>(gather.result);
  const u32 first_step = gather.order == kTogether ? 0 : 1;
  ChunkWalk load = ChunkWalk::make(args, gather, first_step, blockIdx.x), store = load;
  u32 told = 0;
  trace.begin();
  while (!store.finished()) {
    if (!load.finished() && ring.may_load()) {
      const u32 complete = ring.reuse();
      if (complete > told) {
        told = complete;
        // pairs-with: pushed release (push_role -> push_signal_role), scope cta
        store_release_shared(memory.sent_count(1), told);
      }
      ring.expect(load.bytes());
      bulk_load(ring.slot(ring.loaded), shard + load.offset, load.bytes(), ring.full(ring.loaded));
      ++ring.loaded;
      load.advance();
      continue;
    }
    ring.wait_loaded();
    const u32 step = store.step(), peer = args.rank >= step ? args.rank - step : args.rank + args.world - step;
    const u32 slot = ring.slot(ring.stored);
    u8* arena = launch.arena(peer);
    launch.in_arena(peer, args.rank, store.offset, store.bytes(), [&](u64 target, u32 from, u32 bytes) {
      bulk_store(arena + target, slot + from, bytes);
    });
    if (result != nullptr && step == first_step) {
      launch.in_gathered(args.rank, store.offset, store.bytes(), [&](u64 target, u32 from, u32 bytes) {
        bulk_store(result + target, slot + from, bytes);
      });
    }
    bulk_commit();
    ++ring.stored;
    store.advance();
  }
  bulk_wait<0>();
  // pairs-with: pushed release (push_role -> push_signal_role), scope cta
  store_release_shared(memory.sent_count(1), ring.stored);
  trace.end(kTracePush, args.rank, ring.stored);
}

/// Signal role of a block that pushes: tells a peer of each group. Its fence waits for all bytes that the GPU has on the
/// link, and the pushes go on meanwhile.
template <class Op>
MK_DEVICE void push_signal_role(const Gathering<typename Op::Tile>& launch,
                                const SharedMemory<typename Op::Tile>& memory) {
  const LaunchArguments& args = launch.args;
  const u32 first_step = launch.gather.order == kTogether ? 0 : 1;
  ChunkWalk walk = ChunkWalk::make(args, launch.gather, first_step, blockIdx.x);
  Trace trace(args, kSignalLane);
  u32 needed = 0, fenced = 0;
  for (walk.turn = 0; !walk.finished(); ++walk.turn) {
    walk.locate();
    needed += walk.count();
    const u32 step = walk.step(), peer = args.rank >= step ? args.rank - step : args.rank + args.world - step;
    if (fenced < needed) {
      trace.begin();
      // pairs-with: pushed acquire (push_role -> push_signal_role), scope cta
      fenced = wait_count(args, [&] { return load_acquire_shared(memory.sent_count(1)); }, needed, kSignalRole);
      const u64 since_ns = trace.now();
      fence_proxy_async();
      // The bulk stores are complete: the push thread waited. Publishes: rows of this rank's shard.
      // pairs-with: shard_ready release (push_signal_role -> arrival_role), scope sys
      fence_acq_rel_sys();
      trace.waited(since_ns);
      trace.end(kTraceSignal, peer, walk.group);
    }
    // Relaxed: the fence above releases.
    store_relaxed_sys(launch.flag(peer, args.rank, walk.group, blockIdx.x), launch.epoch);
  }
}

/// Copy role: what the others send (and, where the copy engine pushes, the own shard) into the gathered tensor.
template <class Op>
MK_DEVICE void gather_copy_role(const Gathering<typename Op::Tile>& launch,
                                const SharedMemory<typename Op::Tile>& memory) {
  using Tile = typename Op::Tile;
  const LaunchArguments& args = launch.args;
  const GatherArguments& gather = launch.gather;
  ChunkRing<Tile, Tile::kCopySlots, Tile::kPushSlots> ring{args, memory};
  Arrivals<Op, 1> arrivals(launch, kCopyRole);
  Trace trace(args, kCopyLane);
  u8* result = reinterpret_cast<u8*>(gather.result);
  const u8* arena = launch.arena(args.rank);
  ChunkWalk load = ChunkWalk::make(args, gather, gather.pushes ? 1 : 0, blockIdx.x), store = load;
  const auto source_of = [&](const ChunkWalk& walk) {
    const u32 step = walk.step();
    return args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
  };
  trace.begin();
  while (!store.finished() && !arrivals.given_up) {
    if (!load.finished() && ring.may_load()) {
      const u32 source = source_of(load);
      const bool in_place = source == args.rank;  // never of kTogether: there the push thread copies it
      if (!in_place) arrivals.need(source, load.group);
      if (arrivals.given_up) break;
      ring.reuse();
      ring.expect(load.bytes());
      const u8* base = in_place ? reinterpret_cast<const u8*>(gather.shard) + load.offset : arena;
      const auto fetch = [&](u64 from, u32 to, u32 bytes) {
        bulk_load(ring.slot(ring.loaded) + to, base + from, bytes, ring.full(ring.loaded));
      };
      if (in_place) {
        fetch(0, 0, load.bytes());
      } else {
        launch.in_arena(args.rank, source, load.offset, load.bytes(), fetch);
      }
      ++ring.loaded;
      load.advance();
      continue;
    }
    ring.wait_loaded();
    launch.in_gathered(source_of(store), store.offset, store.bytes(), [&](u64 target, u32 from, u32 bytes) {
      bulk_store(result + target, ring.slot(ring.stored) + from, bytes);
    });
    bulk_commit();
    ++ring.stored;
    store.advance();
  }
  for (; ring.stored < ring.loaded; ++ring.stored) ring.wait_loaded();  // given up: nothing is under way at the end
  bulk_wait<0>();
  trace.end(kTraceCopy, args.rank, ring.stored);
}

}  // namespace mk
