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
  const LaunchArguments& args;
  const GatherArguments& gather;
  const SharedMemory<Tile>& memory;
  const ImageWalk walk;
  u32 parity = 0;
  bool given_up = false;
  u32 met = 0;     ///< bit set of peers that have entered this very launch
  u32 source = 0;  ///< of the image that has been asked for
  Image wanted;    ///< that image
  Trace trace;

  MK_DEVICE Puller(const LaunchArguments& args, const GatherArguments& gather, const SharedMemory<Tile>& memory)
      : args(args), gather(gather), memory(memory), walk(ImageWalk::template make<Tile>(args, gather, args.rank)),
        trace(args, kExtraLane) {}

  MK_DEVICE u32 slot(u32 turn) const {
    return memory.base + Tile::kSlotOffset + (Tile::kSlots > 1 ? turn % 2 : 0) * Tile::kImageBytes;
  }
  MK_DEVICE u32 full() const { return memory.base + Tile::kSlotBarrierOffset; }
  MK_DEVICE u32 number(const Image& image) const { return image.row_tile * walk.k_blocks + image.k_block; }

  MK_DEVICE void await_laid(const Images<Op>& images) {
    const WaitSite site{kCopyRole, source, wanted.row_tile};
    if (!(met >> source & 1)) given_up |= !meet_peer<Op::kOperator>(args, images.epoch, site);
    met |= 1u << source;
    if (given_up) return;
    const u32* flag = images.laid_flag(args.rank, source, number(wanted));
    // pairs-with: image_laid acquire (lay_role -> carry_role), scope sys
    given_up = !wait_until<Op::kOperator>(args, flag, images.epoch, site);
  }

  /// One block begins after the other: the images that are needed first come first. All at once they would all be as
  /// late as the last one.
  MK_DEVICE void take_turn() const {
    const u64 start_ns = global_timer_ns(), pause_ns = blockIdx.x * Tile::kImageBytes / kLinkBytesPerNs;
    while (global_timer_ns() - start_ns < pause_ns) {
    }
  }

  /// Number `at` of the images of the ranks after this one is on its way then, or the launch has been given up.
  MK_DEVICE void ask(const Images<Op>& images, u32 at, u32 turn) {
    const u32 step = at / walk.images + 1;
    source = args.rank + step < args.world ? args.rank + step : args.rank + step - args.world;
    wanted = walk.image(at, 1, source);
    await_laid(images);
    if (given_up) return;
    if (turn == 0) take_turn();
    fence_proxy_async();  // flags were read by generic loads, images are read by bulk copies
    const u32 bytes = wanted.rows * kBlockK * 2;
    mbarrier_arrive_expect(full(), bytes);
    bulk_load(slot(turn), images.laid(source, number(wanted)), bytes, full());
  }

  /// The image that has been asked for, into the own workspace, while number `next` comes. Publishes: the image, to
  /// this GPU.
  MK_DEVICE void fetch(const Images<Op>& images, u32 next, u32 end, u32 turn) {
    trace.begin();
    wait_phase(args, full(), parity, kCopyRole);
    parity ^= 1;
    const u32 from = source, index = number(wanted);
    bulk_store(images.image(args.rank, from, wanted.row_tile, wanted.k_block), slot(turn), wanted.rows * kBlockK * 2);
    bulk_commit();
    if constexpr (Tile::kSlots == 1) bulk_wait_read<0>();
    if (next < end) ask(images, next, turn + 1);
    bulk_wait<0>();
    // pairs-with: image_fetched release (carry_role -> gather_role), scope gpu
    fence_acq_rel_gpu();
    // Relaxed: the fence above releases.
    store_relaxed_sys(images.flag(args.rank, from, index), images.epoch);
    trace.end(kTraceCopy, from, index);
  }

  /// In the same order on all ranks, one image on its way at a time: all blocks' together keep the link busy.
  MK_DEVICE void run(u32 epoch) {
    const Images<Op> images{args, gather, epoch};
    const u32 end = epoch == 0 ? 0 : walk.images * (args.world - 1);
    u32 turn = 0;
    if (blockIdx.x < end) ask(images, blockIdx.x, turn);
#pragma unroll 1
    for (u32 at = blockIdx.x; at < end && !given_up; at += gridDim.x) fetch(images, at + gridDim.x, end, turn++);
  }
};

}  // namespace mk
