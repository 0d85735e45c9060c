#pragma once
// All-gather: the thread of every block that moves images, as many at a time as there is room for, beside the block's
// products. So many blocks have some on their way that the link is busy, and none takes an SM from the products.
//
// With `pace_ns` image number n of the launch is sent n paces after the block has entered, at the rate of the link: what
// waits for the link blocks the loads of its SM, a fence waits for it, and the images that are needed first would be as
// late as the last of a burst. Then a block may send `parts` images, one after the other, before a fence and their flags.
#include "device/gather_image.cuh"

namespace mk {

/// Carry role. What is sent depends on who moves the rows: images to each peer; images to the own workspace, where the
/// peers read them; nothing where the copy engine sends. Where the gathered tensor is returned, images go there, too:
/// the own ones as they are sent, the others' as they come.
template <class Op>
struct Carrier {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  const ImageWalk walk;
  const u32 first_step, end;
  const ImageRuns runs;  ///< one fence publishes a run
  u32 parity = 0;
  u32 asked = 0;  ///< images that the slots have been asked for
  u64 entered_ns = 0;
  Trace trace;

  MK_DEVICE Carrier(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), walk(ImageWalk::template make<Tile>(args, gather, args.rank)),
        first_step(gather.pushes == kBlocksPush && gather.order != kTogether ? 1 : 0),
        end(walk.images * steps()), runs{gridDim.x, args.pace_ns == 0 || Op::kReturns ? 1 : gather.parts},
        trace(args, kExtraLane) {
    if (runs.first(blockIdx.x) < end) load_own(runs.first(blockIdx.x));
  }

  MK_DEVICE u32 steps() const {
    if (gather.pushes == kBlocksPush) return args.world - first_step;
    return gather.pushes == kPeersRead || Op::kReturns ? 1 : 0;
  }
  MK_DEVICE u32 slot(u32 number = 0) const { return memory.base + Tile::kSlotOffset + number * Tile::kImageBytes; }
  MK_DEVICE u32 full() const { return memory.base + Tile::kSlotBarrierOffset; }
  MK_DEVICE void wait_loaded() {
    wait_phase(args, full(), parity, kCopyRole);
    parity ^= 1;
  }

  /// Number `i` of this block's images from `at` on, of one run or of those that are sent together.
  MK_DEVICE Image own(u32 at, u32 i) const { return walk.image(at + i * runs.stride(), first_step, args.rank); }
  MK_DEVICE u32 peer(const Image& image) const {
    return args.rank >= image.step ? args.rank - image.step : args.rank + args.world - image.step;
  }

  /// From number `at` on. One, where images of the others are taken by turns with own ones, or each has its time.
  MK_DEVICE void load_own(u32 at) {
    const u32 left = (end - at + gridDim.x - 1) / gridDim.x;
    const u32 most = Op::kReturns || args.pace_ns != 0 ? 1 : Tile::kSlots;
    asked = left < most ? left : most;
    mbarrier_arrive_expect(full(), asked * Tile::kImageBytes);
#pragma unroll 1
    for (u32 i = 0; i < asked; ++i) {
      const Image image = own(at, i);
      tensor_load(slot(i), &args.a[0], full(), image.k_block * kBlockK, image.row);
    }
  }
  MK_DEVICE void keep(const Image& image) const {
    tensor_store(&gather.gathered, slot(), image.k_block * kBlockK, image.run_row, image.run);
  }

  /// The bulk stores are complete; this thread, which has waited for them, needs no proxy fence for what they wrote.
  /// Publishes: these images.
  MK_DEVICE void publish(const Images<Op>& images, u32 at, u32 count) const {
    // pairs-with: image_ready release (carry_role -> gather_role), scope sys
    fence_acq_rel_sys();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = own(at, i);
      const u32 index = image.row_tile * walk.k_blocks + image.k_block, only = peer(image);
      for (u32 to = 0; to < args.world; ++to) {
        const bool told = gather.pushes == kPeersRead ? to != args.rank : to == only;
        // Relaxed: the fence above releases.
        if (told) store_relaxed_sys(images.flag(to, args.rank, index), images.epoch);
      }
    }
  }

  MK_DEVICE void await_turn(u32 at) const {
    const u64 due_ns = (u64)at * args.pace_ns;
    while (global_timer_ns() - entered_ns < due_ns) __nanosleep(32);
  }

  /// Those of the own shard that have been asked for, from number `at` on; `next`: the first one after them.
  MK_DEVICE void send(const Images<Op>& images, u32 at, u32 next) {
    const u32 count = asked;
    if (args.pace_ns != 0) await_turn(at);
    trace.begin();
    wait_loaded();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = own(at, i);
      if (gather.pushes != kEngineCopies) {
        const u32 part = image.first * kBlockK * 2;
        u8* target = images.image(peer(image), args.rank, image.row_tile, image.k_block);
        bulk_store(target + part, slot(i) + part, image.rows * kBlockK * 2);
      }
      if (Op::kReturns && image.step == first_step && gather.order != kTogether) keep(image);
    }
    bulk_commit();
    bulk_wait_read<0>();
    if (!Op::kReturns && next < end) load_own(next);
    const u32 before = runs.place(at);
    if (before + 1 < runs.length && next < end) return;
    bulk_wait<0>();
    const u32 since_ns = trace.now();
    if (gather.pushes != kEngineCopies) publish(images, at - before, before + count);
    trace.waited(since_ns);
    trace.end(kTracePush, kSomePeer, at);
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
                  arrivals.images.slot(args.rank, source) * walk.shard_rows + image.row);
    } else {
      const u32 bytes = image.rows * kBlockK * 2;
      mbarrier_arrive_expect(full(), bytes);
      bulk_load(slot(), arrivals.images.image(args.rank, source, image.row_tile, image.k_block), bytes, full());
    }
    wait_loaded();
    keep(image);
    bulk_commit();
    bulk_wait_read<0>();
    trace.end(kTraceCopy, source, image.row_tile * walk.k_blocks + image.k_block);
  }

  /// The launch must not run: what was asked for must come before the block ends.
  MK_DEVICE bool given_up(u32 epoch, u32 at) {
    if (epoch == 0 && at < end) wait_loaded();
    return epoch == 0;
  }

  MK_DEVICE void send_and_receive(ImageArrivals<Op, 1>& arrivals) {
    const ImageWalk whole = ImageWalk::template make<Tile>(args, gather, args.rank, gather.order == kTogether);
    const u32 come = whole.images * (gather.order == kTogether ? 1 : args.world - 1);
    u32 received = blockIdx.x;
    for (u32 at = runs.first(blockIdx.x), next; at < end || received < come; at = next) {
      if (given_up(arrivals.images.epoch, at)) return;
      next = runs.after(at, at < end ? asked : 1);
      if (at < end) send(arrivals.images, at, next);
      // The peers send theirs in the same order, kTogether those to themselves first: what waits is sent by then.
      if (received < come && (at >= end || (received < at && gather.order != kTogether))) {
        if (arrivals.given_up && at >= end) break;
        if (!arrivals.given_up) receive(arrivals, whole, received);
        received += gridDim.x;
      }
      if (next < end) load_own(next);
    }
  }

  MK_DEVICE void run(u32 epoch) {
    entered_ns = global_timer_ns();
    ImageArrivals<Op, 1> arrivals(args, gather);
    arrivals.enter(epoch);
    if constexpr (Op::kReturns) {
      send_and_receive(arrivals);
    } else {
      for (u32 at = runs.first(blockIdx.x), next; at < end; at = next) {
        if (given_up(epoch, at)) return;
        next = runs.after(at, asked);
        send(arrivals.images, at, next);
      }
    }
    bulk_wait<0>();
  }
};

}  // namespace mk
