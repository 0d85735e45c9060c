#pragma once
// All-gather: shards that are fetched. A fence in front of a flag waits for all stores that the GPU has on the link;
// here there are none. Each rank lays its own images ready in its workspace; the peers' blocks fetch them over the link
// into theirs, and tell only their own GPU.
#include "device/gather_carry.cuh"

namespace mk {

inline constexpr u32 kLinkBytesPerNs = 340;  ///< of all blocks together. Source: docs/decisions/307-all-gather.md

/// Store role, before its first tile: this block's own images to where the peers fetch them. They pass through the
/// panels of that tile, which nobody needs until its products are finished.
template <class Op>
struct Layer {
  using Tile = typename Op::Tile;
  static constexpr u32 kAtOnce = Tile::kTileBytes / Tile::kImageBytes;
  static_assert(kAtOnce >= 1, "an image fits in a tile's panels");
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  const ImageWalk walk;
  u32 parity = 0;
  Trace trace;

  MK_DEVICE Layer(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), walk(ImageWalk::template make<Tile>(args, gather, args.rank)),
        trace(args, kStoreLane) {}

  MK_DEVICE u32 slot(u32 number) const { return memory.panel(0, 0) + number * Tile::kImageBytes; }
  MK_DEVICE u32 full() const { return memory.panel_staged(1, 0); }
  MK_DEVICE u32 number(const Image& image) const { return image.row_tile * walk.k_blocks + image.k_block; }
  /// Of this block's images, from `at` on: those that are moved at once.
  MK_DEVICE u32 batch(u32 at) const {
    const u32 left = (walk.images - at + gridDim.x - 1) / gridDim.x;
    return left < kAtOnce ? left : kAtOnce;
  }
  MK_DEVICE Image own(u32 at, u32 i) const { return walk.image(at + i * gridDim.x, 0, args.rank); }

  MK_DEVICE void load(u32 at) const {
    const u32 count = batch(at);
    mbarrier_arrive_expect(full(), count * Tile::kImageBytes);
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = own(at, i);
      tensor_load(slot(i), &args.a[0], full(), image.k_block * kBlockK, image.row);
    }
  }

  /// What has been asked for from `at` on. Publishes: these images.
  MK_DEVICE void lay(const Images<Op>& images, u32 at) {
    const u32 count = batch(at), next = at + kAtOnce * gridDim.x;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = own(at, i);
      bulk_store(images.laid(args.rank, number(image)), slot(i), image.rows * kBlockK * 2);
    }
    bulk_commit();
    bulk_wait_read<0>();
    if (next < walk.images) load(next);
    bulk_wait<0>();
    // pairs-with: image_laid release (lay_role -> carry_role), scope sys
    fence_acq_rel_sys();
    trace.end(kTracePush, kSomePeer, at);
    trace.begin();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Image image = own(at, i);
      for (u32 to = 0; to < args.world; ++to) {
        // Relaxed: the fence above releases.
        if (to != args.rank) store_relaxed_sys(images.laid_flag(to, args.rank, number(image)), images.epoch);
      }
    }
    trace.end(kTraceSignal, args.rank, number(own(at, 0)));
  }

  MK_DEVICE void run() {
    if (blockIdx.x < walk.images) load(blockIdx.x);
    wait_phase(args, memory.entered(), 0, kStoreRole);
    const Images<Op> images{args, gather, load_shared(memory.epoch())};
#pragma unroll 1
    for (u32 at = blockIdx.x; at < walk.images; at += kAtOnce * gridDim.x) {
      trace.begin();
      wait_phase(args, full(), parity, kStoreRole);
      parity ^= 1;
      if (images.epoch == 0) break;  // the launch must not run: nothing is told, and nothing more is asked for
      lay(images, at);
    }
    mbarrier_arrive(memory.panel_staged(0, 0));
  }
};

/// Carry role of a launch whose blocks fetch. Not of kTogether, and nothing is returned.
template <class Op>
struct Puller {
  using Tile = typename Op::Tile;
  static constexpr u32 kDepth = Tile::kSlots > 1 ? 2 : 1;  ///< images on their way at a time
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  const ImageWalk walk;
  const u32 end;       ///< images of all others
  u32 asked = 0;       ///< images of this block
  u32 met = 0;         ///< bit set of peers that have entered this very launch
  bool given_up = false;
  Trace trace;

  MK_DEVICE Puller(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), walk(ImageWalk::template make<Tile>(args, gather, args.rank)),
        end(walk.images * (args.world - 1)), trace(args, kExtraLane) {}

  MK_DEVICE u32 slot(u32 turn) const { return memory.base + Tile::kSlotOffset + turn % kDepth * Tile::kImageBytes; }
  MK_DEVICE u32 full(u32 turn) const { return memory.base + Tile::kSlotBarrierOffset + turn % kDepth * 8; }
  MK_DEVICE u32 number(const Image& image) const { return image.row_tile * walk.k_blocks + image.k_block; }
  /// This block's images in the order of their numbers, those of the rank after this one first.
  MK_DEVICE u32 at(u32 turn) const { return blockIdx.x + turn * gridDim.x; }
  MK_DEVICE u32 source(u32 at) const {
    const u32 step = at / walk.images + 1;
    return args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
  }

  /// May be read by bulk copies then, or the launch has been given up.
  MK_DEVICE void await_laid(const Images<Op>& images, u32 from, const Image& image) {
    const WaitSite site{kCopyRole, from, image.row_tile};
    if (!(met >> from & 1)) given_up |= !meet_peer<Op::kOperator>(args, images.epoch, site);
    met |= 1u << from;
    if (given_up) return;
    const u32* flag = images.laid_flag(args.rank, from, number(image));
    // pairs-with: image_laid acquire (lay_role -> carry_role), scope sys
    given_up = !wait_until<Op::kOperator>(args, flag, images.epoch, site);
    fence_proxy_async();  // flags were read by generic loads, images are read by bulk copies
  }

  /// One block begins after the other: the images that are needed first come first. All at once they would all be as
  /// late as the last one.
  MK_DEVICE void take_turn() const {
    const u64 start_ns = global_timer_ns(), pause_ns = blockIdx.x * Tile::kImageBytes / kLinkBytesPerNs;
    while (global_timer_ns() - start_ns < pause_ns) {
    }
  }

  /// The same block of the rank after this one has laid these: as many at once, which the flag of the first tells of.
  MK_DEVICE bool is_known(u32 next) const { return next < walk.images && asked % Layer<Op>::kAtOnce != 0; }

  /// The next image, if there is one, is on its way then, or the launch has been given up.
  MK_DEVICE void ask(const Images<Op>& images) {
    const u32 next = at(asked);
    if (next >= end || given_up) return;
    const u32 from = source(next);
    const Image image = walk.image(next, 1, from);
    if (!is_known(next)) await_laid(images, from, image);
    if (given_up) return;
    if (asked == 0) take_turn();
    const u32 bytes = image.rows * kBlockK * 2;
    mbarrier_arrive_expect(full(asked), bytes);
    bulk_load(slot(asked), images.laid(from, number(image)), bytes, full(asked));
    ++asked;
  }

  /// There is a next image, and asking for it would not wait for a peer that is late.
  MK_DEVICE bool can_ask(const Images<Op>& images) const {
    const u32 next = at(asked);
    if (next >= end || given_up) return false;
    if (is_known(next)) return true;
    const u32 from = source(next);
    // pairs-with: image_laid acquire (lay_role -> carry_role), scope sys
    return reached(load_acquire_sys(images.laid_flag(args.rank, from, number(walk.image(next, 1, from)))), images.epoch);
  }

  /// An image that has been asked for, into the own workspace, while others come. Publishes: the image, to this GPU.
  /// One that is late is waited for when nothing else is left to tell of.
  MK_DEVICE void fetch(const Images<Op>& images, u32 turn) {
    const u32 from = source(at(turn));
    const Image image = walk.image(at(turn), 1, from);
    trace.begin();
    wait_phase(args, full(turn), turn / kDepth & 1, kCopyRole);
    bulk_store(images.image(args.rank, from, image.row_tile, image.k_block), slot(turn), image.rows * kBlockK * 2);
    bulk_commit();
    bulk_wait_read<0>();
    // The second image is not asked for before: the first ones of all blocks come first.
#pragma unroll 1
    while (asked <= turn + kDepth && can_ask(images)) ask(images);
    bulk_wait<0>();
    // pairs-with: image_fetched release (carry_role -> gather_role), scope gpu
    fence_acq_rel_gpu();
    // Relaxed: the fence above releases.
    store_relaxed_sys(images.flag(args.rank, from, number(image)), images.epoch);
    trace.end(kTraceCopy, from, number(image));
    if (asked == turn + 1) ask(images);
  }

  /// In the same order on all ranks. What has been asked for comes before the block ends.
  MK_DEVICE void run(u32 epoch) {
    const Images<Op> images{args, gather, epoch};
    if (epoch != 0) ask(images);
#pragma unroll 1
    for (u32 turn = 0; turn < asked; ++turn) fetch(images, turn);
  }
};

}  // namespace mk
