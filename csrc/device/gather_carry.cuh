#pragma once
// All-gather: the threads of every block that move images beside the block's products: one moves, one at a time; one
// tells of them. So many blocks have one on its way that the link is busy, and none takes an SM from the products.
#include "device/gather_image.cuh"

namespace mk {

/// Which images of this rank's shard are sent: to each peer; to the own workspace, where the peers read them; nothing
/// where the copy engine sends, but into the gathered tensor, where that is returned.
template <class Tile>
struct Sending {
  const LaunchArguments& args;
  const ImageWalk walk;
  const u32 first_step, end;

  MK_DEVICE Sending(const LaunchArguments& args, const GatherArguments& gather)
      : args(args), walk(ImageWalk::template make<Tile>(args, gather, args.rank)),
        first_step(gather.pushes == kBlocksPush && gather.order != kTogether ? 1 : 0),
        end(walk.images * steps(gather)) {}

  MK_DEVICE u32 steps(const GatherArguments& gather) const {
    if (gather.pushes == kBlocksPush) return args.world - first_step;
    return gather.pushes == kPeersRead || gather.result != 0 ? 1 : 0;
  }
  MK_DEVICE Image image(u32 at) const { return walk.image(at, first_step, args.rank); }
  MK_DEVICE u32 peer(const Image& image) const {
    return args.rank >= image.step ? args.rank - image.step : args.rank + args.world - image.step;
  }
  MK_DEVICE u32 number(const Image& image) const { return image.row_tile * walk.k_blocks + image.k_block; }
};

/// Carry role. Where the gathered tensor is returned, images go there, too: the own ones as they are sent, the others'
/// as they come.
template <class Op>
struct Carrier {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  const Sending<Tile> sending;
  const bool returns;
  u32 parity = 0;
  Image loading;  ///< what the slot has been asked for
  Trace trace;

  MK_DEVICE Carrier(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), sending(args, gather),
        returns(gather.result != 0), trace(args, kExtraLane) {
    if (blockIdx.x < sending.end) load_own(blockIdx.x);
  }

  MK_DEVICE u32 slot() const { return memory.base + Tile::kSlotOffset; }
  MK_DEVICE u32 full() const { return memory.base + Tile::kSlotBarrierOffset; }
  MK_DEVICE void wait_loaded() {
    wait_phase(args, full(), parity, kCopyRole);
    parity ^= 1;
  }

  MK_DEVICE void load_own(u32 at) {
    loading = sending.image(at);
    mbarrier_arrive_expect(full(), Tile::kImageBytes);
    tensor_load(slot(), &args.a[0], full(), loading.k_block * kBlockK, loading.row);
  }
  MK_DEVICE void keep(const Image& image) const {
    tensor_store(&gather.gathered, slot(), image.k_block * kBlockK, image.run_row, image.run);
  }

  /// One image of the own shard, which has been asked for.
  MK_DEVICE void send(const Images<Tile>& images, u32 next) {
    const Image image = loading;
    const u32 peer = sending.peer(image);
    trace.begin();
    wait_loaded();
    if (gather.pushes != kEngineCopies) {
      const u32 part = image.first * kBlockK * 2;
      u8* target = images.image(peer, args.rank, image.row_tile, image.k_block);
      bulk_store(target + part, slot() + part, image.rows * kBlockK * 2);
    }
    if (returns && image.step == sending.first_step && gather.order != kTogether) keep(image);
    bulk_commit();
    bulk_wait_read<0>();
    if (!returns && next < sending.end) load_own(next);
    bulk_wait<0>();
    // pairs-with: carried release (carry_role -> announce_role), scope cta
    store_release_shared(memory.sent_count(0), load_shared(memory.sent_count(0)) + 1);
    trace.end(kTracePush, peer, sending.number(image));
  }

  /// One image of another rank (kTogether: of all) into the gathered tensor.
  MK_DEVICE void receive(ImageArrivals<Op, 1>& arrivals, const ImageWalk& whole, u32 at) {
    const u32 step = at / whole.images + 1;
    const u32 source = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
    const Image image = whole.image(at, 1, source);
    const u32 first_row = image.row, last_row = first_row + image.rows - 1;
    arrivals.await_tile(source, image.row_tile, first_row, last_row, image.k_block, 1);
    if (arrivals.given_up) return;
    trace.begin();
    if (gather.pushes == kEngineCopies) {
      mbarrier_arrive_expect(full(), Tile::kImageBytes);
      tensor_load(slot(), &gather.arena[0], full(), image.k_block * kBlockK,
                  arrivals.images.slot(args.rank, source) * sending.walk.shard_rows + image.row);
    } else {
      const u32 bytes = image.rows * kBlockK * 2;
      mbarrier_arrive_expect(full(), bytes);
      bulk_load(slot(), arrivals.images.image(args.rank, source, image.row_tile, image.k_block), bytes, full());
    }
    wait_loaded();
    keep(image);
    bulk_commit();
    bulk_wait_read<0>();
    trace.end(kTraceCopy, source, sending.number(image));
  }

  MK_DEVICE void run(u32 epoch) {
    ImageArrivals<Op, 1> arrivals(args, gather);
    arrivals.enter(epoch);
    const ImageWalk whole = ImageWalk::template make<Tile>(args, gather, args.rank, gather.order == kTogether);
    const u32 come = !returns ? 0 : whole.images * (gather.order == kTogether ? 1 : args.world - 1);
    const u32 end = sending.end;
    u32 received = blockIdx.x;
    for (u32 at = blockIdx.x; at < end || received < come; at += gridDim.x) {
      if (epoch == 0) {  // the launch must not run: what was asked for must come before the block ends
        if (at < end) wait_loaded();
        return;
      }
      const u32 next = at + gridDim.x;
      if (at < end) send(arrivals.images, next);
      // The peers send theirs in the same order, kTogether those to themselves first: what waits is sent by then.
      if (received < come && (at >= end || (received < at && gather.order != kTogether))) {
        if (arrivals.given_up && at >= end) break;
        if (!arrivals.given_up) receive(arrivals, whole, received);
        received += gridDim.x;
      }
      if (returns && next < end) load_own(next);
    }
    bulk_wait<0>();
  }
};

/// Images of this block that have been carried: more than `told`. Sleeps between looks: a warp that spins takes turns
/// from math warps.
MK_DEVICE u32 await_carried(const LaunchArguments& args, u32 count, u32 told) {
  u64 start_ns = 0;
  while (true) {
    // pairs-with: carried acquire (carry_role -> announce_role), scope cta
    const u32 carried = load_acquire_shared(count);
    if (carried > told) return carried;
    const u64 now_ns = global_timer_ns();
    if (start_ns == 0) start_ns = now_ns;
    if (now_ns - start_ns > stall_limit_ns(args)) trap_stalled(args, kSignalRole, told);
    __nanosleep(64);
  }
}

/// Announce role: tells of images that have been carried. Its fence waits for all bytes that the GPU has on the link,
/// and the next image goes meanwhile; one fence serves all that have been carried before it.
template <class Op>
MK_DEVICE void announce_role(const LaunchArguments& args, const GatherArguments& gather,
                             const SharedMemory<typename Op::Tile>& memory) {
  wait_phase(args, memory.entered(), 0, kSignalRole);
  const Images<typename Op::Tile> images{args, gather, load_shared(memory.epoch())};
  if (images.epoch == 0 || gather.pushes == kEngineCopies) return;  // nothing is sent, or nothing for others
  const Sending<typename Op::Tile> sending(args, gather);
  Trace trace(args, kSignalLane);
  u32 told = 0, fenced = 0;
  for (u32 at = blockIdx.x; at < sending.end; at += gridDim.x, ++told) {
    const Image image = sending.image(at);
    const u32 peer = sending.peer(image);
    if (fenced <= told) {
      fenced = await_carried(args, memory.sent_count(0), told);
      trace.begin();
      fence_proxy_async();
      // The bulk stores are complete: the carrying thread waited. Publishes: all images that it has counted.
      // pairs-with: image_ready release (announce_role -> gather_role), scope sys
      fence_acq_rel_sys();
      trace.waited(trace.start_ns);
      trace.end(kTraceSignal, peer, sending.number(image));
    }
    for (u32 to = 0; to < args.world; ++to) {
      const bool concerned = gather.pushes == kPeersRead ? to != args.rank : to == peer;
      // Relaxed: the fence above releases.
      if (concerned) store_relaxed_sys(images.flag(to, args.rank, sending.number(image)), images.epoch);
    }
  }
}

}  // namespace mk
