#pragma once
// Which tile comes when, over nodes. The ranks of a node share out all tiles as they do alone; a tile goes to the rank
// that has the owner's number. So each rank handles its own tiles and those of its rail peers.
// Plain integer arithmetic: the tests build it for the CPU and walk it.
#include "abi/network_arguments.h"
#include "device/schedule.cuh"

namespace mk {

/// A tile that one rank handles, for itself or for a rail peer.
struct RailTile {
  u32 node;   ///< of the owner
  u32 index;  ///< among the tiles of the owner; names network slots, and with others the chunk
};

/// Handled tiles have one order on all ranks of a node: `lag` tiles of every other node, then rounds of one own tile and
/// one of each other node, then the last own tiles. A chunk that an own tile waits for always comes earlier in the order
/// of the rail peer that sends it, as long as `lag` is at least the tiles of a chunk.
template <bool kScattersRows>
struct NetworkSchedule {
  Schedule<kScattersRows> order;  ///< of this node's ranks, over handled tiles
  Schedule<kScattersRows> tiles;  ///< of all ranks, over their own tiles
  static constexpr u32 kNone = ~0u;
  u32 node, nodes, lag;
  u32 per_node;            ///< tiles of the owner who has most
  u32 slots, chunk_tiles;  ///< as in NetworkArguments

  template <class Tile>
  static MK_DEVICE NetworkSchedule make(const LaunchArguments& args, u32 grid) {
    const NetworkArguments& net = static_cast<const NetworkLaunchArguments&>(args).net;
    NetworkSchedule s;
    s.order = s.tiles = Schedule<kScattersRows>::template make<Tile>(args, grid);
    const u32 owners = args.world * net.nodes;
    s.tiles.world = owners;
    s.tiles.share = s.tiles.tiles / owners;
    s.tiles.extra = s.tiles.tiles - s.tiles.share * owners;
    s.per_node = kScattersRows ? s.tiles.tiles : s.tiles.share + (s.tiles.extra != 0);
    s.node = net.node;
    s.nodes = net.nodes;
    s.slots = net.slots;
    s.chunk_tiles = net.chunk_tiles;
    s.lag = net.lag < s.per_node ? net.lag : s.per_node;
    s.order.per_owner = s.order.tiles = s.order.share = s.per_node * s.nodes;
    s.order.extra = 0;
    s.order.lag = args.world == 1 ? 0 : args.lag < s.order.per_owner ? args.lag : s.order.per_owner;
    return s;
  }

  MK_DEVICE u32 positions() const { return order.positions(); }
  MK_DEVICE u32 owner(u32 at_node, u32 local) const { return at_node * order.world + local; }
  /// Tiles of one owner.
  MK_DEVICE u32 count(u32 at_node, u32 local) const { return tiles.count(owner(at_node, local)); }

  /// `owner` is a rank of this node, `index` counts the tiles that it handles. Invalid where the tile does not exist.
  MK_DEVICE Task task(u32 position) const {
    Task task = order.task(position);
    const RailTile at = rail(task.index);
    task.valid = at.index < count(at.node, task.owner);
    return task;
  }

  /// Which tile the handled tile `index` is; the same for all ranks of this node.
  MK_DEVICE RailTile rail(u32 index) const {
    const u32 others = nodes - 1, head = lag * others, middle = (per_node - lag) * nodes;
    u32 at_node = node, at = index;
    if (index < head) {
      at = index / others;
      at_node = node + 1 + index % others;
    } else if (index - head < middle) {
      const u32 slot = (index - head) % nodes;
      at = (index - head) / nodes + (slot == 0 ? 0 : lag);
      at_node = node + slot;
    } else {
      at = per_node - lag + (index - head - middle);
    }
    return RailTile{at_node < nodes ? at_node : at_node - nodes, at};
  }

  /// The inverse: which of the handled tiles a tile of a rail peer is.
  MK_DEVICE u32 handled(const RailTile& tile) const {
    const u32 others = nodes - 1, head = lag * others;
    const u32 slot = tile.node >= node ? tile.node - node : tile.node + nodes - node;
    if (slot != 0) return tile.index < lag ? tile.index * others + slot - 1 : head + (tile.index - lag) * nodes + slot;
    return tile.index < per_node - lag ? head + tile.index * nodes : head + (nodes - 1) * (per_node - lag) + tile.index;
  }

  /// The handled tile of an owner that last lay in the slot of `index` in a ring of `ring` slots, or kNone.
  MK_DEVICE u32 previous(u32 local, u32 index, u32 ring) const {
    while (index >= ring) {
      index -= ring;
      const RailTile at = rail(index);
      if (at.index < count(at.node, local)) return index;
    }
    return kNone;
  }
  /// Will the network slots of this tile's chunk be needed again in this launch? Then the chunk is not the last one.
  MK_DEVICE bool is_reused(u32 index, u32 at_node, u32 local) const {
    return index - index % chunk_tiles + slots < count(at_node, local);
  }

  template <class Tile>
  MK_DEVICE TilePlace place(const LaunchArguments& args, const Task& task) const {
    const RailTile at = rail(task.index);
    return tiles.template place<Tile>(args, Task{owner(at.node, task.owner), at.index, true});
  }
};

}  // namespace mk
