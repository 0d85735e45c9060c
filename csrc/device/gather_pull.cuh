#pragma once
// All-gather: shards that are fetched. A fence in front of a flag waits for all stores that the GPU has on the link;
// here there are none. Each rank lays its own images ready in its workspace; the peers' blocks fetch them over the link
// into theirs, and tell only their own GPU.
#include "device/gather_carry.cuh"

namespace mk {

/// Carry role of a launch whose blocks fetch. Not of kTogether, and nothing is returned.
template <class Op>
struct Puller {
  using Tile = typename Op::Tile;
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  const ImageWalk walk;
  u32 parity = 0;
  bool given_up = false;
  u32 met = 0;  ///< bit set of peers that have entered this very launch
  Trace trace;

  MK_DEVICE Puller(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), walk(ImageWalk::template make<Tile>(args, gather, args.rank)),
        trace(args, kExtraLane) {
    if (blockIdx.x < walk.images) load_own(blockIdx.x);
  }

  MK_DEVICE u32 slot(u32 number) const { return memory.base + Tile::kSlotOffset + number * Tile::kImageBytes; }
  MK_DEVICE u32 full() const { return memory.base + Tile::kSlotBarrierOffset; }
  MK_DEVICE void wait_loaded() {
    wait_phase(args, full(), parity, kCopyRole);
    parity ^= 1;
  }
  /// Of this block's images up to number `end`, from `at` on: those that are moved at once.
  MK_DEVICE u32 batch(u32 at, u32 end) const {
    const u32 left = (end - at + gridDim.x - 1) / gridDim.x;
    return left < Tile::kSlots ? left : Tile::kSlots;
  }
  MK_DEVICE u32 number(const Image& image) const { return image.row_tile * walk.k_blocks + image.k_block; }

  MK_DEVICE void load_own(u32 at) const {
    const u32 count = batch(at, walk.images);
    mbarrier_arrive_expect(full(), count * Tile::kImageBytes);
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = walk.image(at + i * gridDim.x, 0, args.rank);
      tensor_load(slot(i), &args.a[0], full(), image.k_block * kBlockK, image.row);
    }
  }

  /// Own images, which have been asked for, to where the peers fetch them. Publishes: these images.
  MK_DEVICE void lay_ready(const Images<Op>& images, u32 at) {
    const u32 count = batch(at, walk.images);
    trace.begin();
    wait_loaded();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = walk.image(at + i * gridDim.x, 0, args.rank);
      bulk_store(images.laid(args.rank, number(image)), slot(i), image.rows * kBlockK * 2);
    }
    bulk_commit();
    bulk_wait<0>();
    // pairs-with: image_laid release (carry_role -> carry_role), scope sys
    fence_acq_rel_sys();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = walk.image(at + i * gridDim.x, 0, args.rank);
      for (u32 to = 0; to < args.world; ++to) {
        // Relaxed: the fence above releases.
        if (to != args.rank) store_relaxed_sys(images.laid_flag(to, args.rank, number(image)), images.epoch);
      }
    }
    trace.end(kTracePush, kSomePeer, at);
  }

  MK_DEVICE void await_laid(const Images<Op>& images, u32 source, const Image& image) {
    const WaitSite site{kCopyRole, source, image.row_tile};
    if (!(met >> source & 1)) given_up |= !meet_peer<Op::kOperator>(args, images.epoch, site);
    met |= 1u << source;
    if (given_up) return;
    const u32* flag = images.laid_flag(args.rank, source, number(image));
    // pairs-with: image_laid acquire (carry_role -> carry_role), scope sys
    given_up = !wait_until<Op::kOperator>(args, flag, images.epoch, site);
  }

  /// Images of the ranks after this one, from number `at` on. `next`: own ones that are asked for meanwhile, if there
  /// are so many. Publishes: the images, to this GPU.
  MK_DEVICE void fetch(const Images<Op>& images, u32 at, u32 end, u32 next) {
    const u32 count = batch(at, end);
    u32 sources[Tile::kSlots], bytes = 0;
    Image wanted[Tile::kSlots];
#pragma unroll
    for (u32 i = 0; i < Tile::kSlots; ++i) {
      if (i >= count) break;
      const u32 number_i = at + i * gridDim.x, step = number_i / walk.images + 1;
      sources[i] = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
      wanted[i] = walk.image(number_i, 1, sources[i]);
      await_laid(images, sources[i], wanted[i]);
      bytes += wanted[i].rows * kBlockK * 2;
    }
    if (given_up) return;
    trace.begin();
    fence_proxy_async();  // flags were read by generic loads, images are read by bulk copies
    mbarrier_arrive_expect(full(), bytes);
#pragma unroll
    for (u32 i = 0; i < Tile::kSlots; ++i) {
      if (i >= count) break;
      bulk_load(slot(i), images.laid(sources[i], number(wanted[i])), wanted[i].rows * kBlockK * 2, full());
    }
    wait_loaded();
#pragma unroll
    for (u32 i = 0; i < Tile::kSlots; ++i) {
      if (i >= count) break;
      bulk_store(images.image(args.rank, sources[i], wanted[i].row_tile, wanted[i].k_block), slot(i),
                 wanted[i].rows * kBlockK * 2);
    }
    bulk_commit();
    bulk_wait_read<0>();
    if (next < walk.images) load_own(next);
    bulk_wait<0>();
    // pairs-with: image_fetched release (carry_role -> gather_role), scope gpu
    fence_acq_rel_gpu();
#pragma unroll
    for (u32 i = 0; i < Tile::kSlots; ++i) {
      if (i >= count) break;
      // Relaxed: the fence above releases.
      store_relaxed_sys(images.flag(args.rank, sources[i], number(wanted[i])), images.epoch);
    }
    trace.end(kTraceCopy, sources[0], at);
  }

  /// Own images and the others' by turns, in the same order on all ranks: what is waited for is laid ready by then.
  MK_DEVICE void run(u32 epoch) {
    const Images<Op> images{args, gather, epoch};
    const u32 end = walk.images * (args.world - 1), stride = Tile::kSlots * gridDim.x;
    if (epoch == 0) {  // the launch must not run: what was asked for must come before the block ends
      if (blockIdx.x < walk.images) wait_loaded();
      return;
    }
#pragma unroll 1
    for (u32 at = blockIdx.x; at < end; at += stride) {
      if (at < walk.images) lay_ready(images, at);
      if (given_up) {
        if (at + stride < walk.images) load_own(at + stride);
      } else {
        fetch(images, at, end, at + stride);
        if (given_up && at + stride < walk.images) load_own(at + stride);
      }
    }
    bulk_wait<0>();
  }
};

}  // namespace mk
