#pragma once
// All-gather: where images lie in the workspaces, and what of them has come.
#include "device/gather.cuh"
#include "device/gather_walk.cuh"

namespace mk {

/// A tile's shared memory and, behind it, room for images that a block moves: one, or what else of an SM's is free.
template <class Base>
struct ImageTile : Base {
  static constexpr u32 kImageBytes = Base::kBytesA;
  static constexpr u32 kSlotOffset = (Base::kSharedBytes - 1024 + 1023) / 1024 * 1024;  ///< aligned as swizzles want it
  static constexpr u32 kFree = (232448 - (Base::kSharedBytes + 1024 + 16)) / kImageBytes;
  static constexpr u32 kSlots = kFree < 4 ? kFree : 4;
  static constexpr u32 kSlotBarrierOffset = kSlotOffset + kSlots * kImageBytes;
  static constexpr int kSharedBytes = Base::kSharedBytes + 1024 + kSlots * kImageBytes + 16;
  static_assert(1024 + kSlotBarrierOffset + 16 <= kSharedBytes && kSharedBytes <= 232448, "shared memory of one SM");
  static_assert(kSlots >= 1, "a block moves at least one image");
  static_assert(kImageK == kBlockK, "an image fills a stage's rows");
};

/// One launch: its arguments and its epoch, and where images and their flags lie.
template <class Op>
struct Images {
  using Tile = typename Op::Tile;
  /// Fetched images have a kind of their own: words of the others a peer may have raised that is a launch ahead.
  static constexpr FlagKind kHere = Op::kPulls ? kImageFetched : kPartialReady;
  const LaunchArguments& args;
  const GatherArguments& gather;
  u32 epoch;

  MK_DEVICE u32 k_blocks() const { return (args.k[0] + kBlockK - 1) / kBlockK; }
  MK_DEVICE bool by_engine() const { return gather.pushes == kEngineCopies; }
  /// The copy engine moves so many k-blocks of a group of rows at once; the last of its `parts` may be shorter.
  MK_DEVICE u32 slice_blocks() const { return (k_blocks() + gather.parts - 1) / gather.parts; }
  /// Of those that share the k of a tile, block `part` begins here.
  MK_DEVICE u32 first_k(u32 part) const { return k_blocks() * part / Tile::kSplit; }
  MK_DEVICE u32 shard_rows() const { return gather.order == kColumns ? args.m : args.segments * args.segment_rows; }
  /// Row tiles of one rank's shard. Not of kTogether.
  MK_DEVICE u32 row_tiles() const {
    const u32 rows = gather.order == kColumns ? args.m : args.segment_rows;
    return (rows + Tile::kBlockM - 1) / Tile::kBlockM * (gather.order == kColumns ? 1 : args.segments);
  }
  /// A rank keeps no copy of its own shard; the others' lie in the order in which they come.
  MK_DEVICE u32 slot(u32 at, u32 source) const { return source > at ? source - at - 1 : source + args.world - at - 1; }

  /// Where rank `at` reads an image of rank `source`'s rows: in its own workspace, or in that of the source.
  MK_DEVICE u8* image(u32 at, u32 source, u32 row_tile, u32 k_block) const {
    const bool remote = gather.pushes == kPeersRead;
    const u32 laid = gather.pushes == kBlocksPull ? row_tiles() : 0;  // own images come first
    const u32 before = laid + (gather.order == kTogether || remote ? 0 : slot(at, source) * row_tiles());
    const u64 offset = args.region_offset + (epoch & 1) * args.region_bytes;
    return reinterpret_cast<u8*>(args.workspace[remote ? source : at]) + offset +
           ((u64)(before + row_tile) * k_blocks() + k_block) * Tile::kImageBytes;
  }
  /// kBlocksPull: where `source` lays an image of its rows ready, and what it tells rank `at` of that.
  MK_DEVICE u8* laid(u32 source, u32 index) const {
    return reinterpret_cast<u8*>(args.workspace[source] + args.region_offset + (epoch & 1) * args.region_bytes) +
           (u64)index * Tile::kImageBytes;
  }
  MK_DEVICE u32* laid_flag(u32 at, u32 source, u32 index) const {
    return Staging<Tile>{args, epoch}.flag(at, kPartialFree, source, index);
  }
  /// Raised by `source` when an image of its rows can be read by rank `at`; by its copy engine for a group of rows;
  /// kBlocksPull: by rank `at` itself.
  MK_DEVICE u32* flag(u32 at, u32 source, u32 index) const {
    return Staging<Tile>{args, epoch}.flag(at, kHere, source, index);
  }
};

/// What one thread, or the 32 lanes of one warp together, know of the shards of the others.
template <class Op, u32 kLanes>
struct ImageArrivals {
  using Tile = typename Op::Tile;
  Images<Op> images;
  u32 met = 0;  ///< bit set of peers that have entered this very launch
  bool given_up = false;

  MK_DEVICE ImageArrivals(const LaunchArguments& args, const GatherArguments& gather) : images{args, gather, 0} {}
  MK_DEVICE void enter(u32 epoch) {
    images.epoch = epoch;
    given_up = epoch == 0;
  }

  static MK_DEVICE bool all(bool mine) { return kLanes == 1 ? mine : __all_sync(~0u, mine); }

  MK_DEVICE void meet(u32 source, u32 row_tile) {
    if (source == images.args.rank || met >> source & 1) return;
    Trace trace(images.args, kSignalLane, kLanes == 32 && threadIdx.x % 32 == 0);  // of clocks: see trace/clocks.py
    trace.begin();
    given_up |= !all(meet_peer<Op::kOperator>(images.args, images.epoch, WaitSite{kLoadRole, source, row_tile}));
    met |= 1u << source;
    trace.end_wait(kTraceReceive, source, kNoTile);
  }

  /// Of the images from number `index` on, how many have come: at most `count`, at most as many as there are lanes.
  MK_DEVICE u32 here(u32 source, u32 index, u32 count) const {
    const u32 lane = threadIdx.x % 32;
    const u32 at = images.by_engine() ? index : index + (lane < count ? lane : count - 1);
    // pairs-with: image_ready acquire (carry_role -> gather_role), scope sys
    // pairs-with: image_fetched acquire (carry_role -> gather_role), scope gpu
    const bool mine = reached(load_acquire_sys(images.flag(images.args.rank, source, at)), images.epoch);
    const u32 missing = ~__ballot_sync(~0u, mine);
    const u32 number = missing == 0 ? 32 : __ffs(missing) - 1;
    return number < count ? number : count;
  }

  /// How many of `count` k-blocks of a row tile of a source have come, from `k_block` on: at least one.
  MK_DEVICE u32 await(u32 source, u32 row_tile, u32 last_row, u32 k_block, u32 count) {
    meet(source, row_tile);
    u32 index = row_tile * images.k_blocks() + k_block;
    if (images.by_engine()) {
      const u32 slice = k_block / images.slice_blocks(), left = (slice + 1) * images.slice_blocks() - k_block;
      index = last_row / images.gather.group_rows * images.gather.parts + slice;
      if (left < count) count = left;
    }
    u32 number = 0;
    while (!given_up && number == 0) {
      if constexpr (kLanes == 1) {
        number = 1;
      } else if ((number = here(source, index, count)) != 0) {
        break;
      }
      const u32* flag = images.flag(images.args.rank, source, index);
      const WaitSite site{kLoadRole, source, row_tile};
      // pairs-with: image_ready acquire (carry_role -> gather_role), scope sys
      // pairs-with: image_fetched acquire (carry_role -> gather_role), scope gpu
      given_up = !all(wait_until<Op::kOperator>(images.args, flag, images.epoch, site));
    }
    return given_up ? count : number;
  }

  /// The same for a whole tile (kTogether: several ranks' rows lie in it), which bulk copies may read then.
  MK_DEVICE u32 await_tile(u32 source, u32 row_tile, u32 first_row, u32 last_row, u32 k_block, u32 count) {
    const bool together = images.gather.order == kTogether;
    const u32 last = together ? last_row / images.shard_rows() : source;
    for (u32 from = together ? first_row / images.shard_rows() : source; from <= last; ++from) {
      count = await(from, row_tile, last_row, k_block, count);
    }
    if constexpr (kLanes > 1) __syncwarp();  // what the lanes have acquired comes before the loads of one of them
    fence_proxy_async();  // flags were read by generic loads, images are read by bulk copies
    return count;
  }
};

}  // namespace mk
