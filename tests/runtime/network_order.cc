// Reductions over nodes as threads that wait for flags and raise them, in the order of the device's own header.
#define __device__
#define __forceinline__ inline
#include "device/network/schedule.cuh"

#include <array>
#include <cstring>
#include <map>
#include <set>
#include <vector>

using mk::Task;
using mk::u32;

namespace {

struct Tile {
  static constexpr int kBlockM = 128, kBlockN = 128;
};

enum Kind { kPartial, kPartialFree, kFinal, kFinalFree, kNetPartial, kNetPartialFree, kNetFinal, kNetFinalFree };
using Flag = std::array<u32, 4>;  // kind, rank where it lies, rank that raises it, tile

struct Step {
  std::vector<Flag> needs, raises;
};
using Thread = std::vector<Step>;

struct Case {
  u32 scatters, nodes, world, rows, columns, lag, slots, net_lag, net_slots, chunk_tiles, grid, sends_credits;
};

template <bool kScatters>
struct Rank {
  const Case& c;
  u32 rank, local, first_of_node;
  mk::NetworkLaunchArguments args;
  mk::NetworkSchedule<kScatters> order;

  Rank(const Case& c, u32 rank)
      : c(c), rank(rank), local(rank % c.world), first_of_node(rank - rank % c.world) {
    std::memset(&args, 0, sizeof args);
    args.world = c.world, args.rank = local, args.segments = 1, args.segment_rows = c.rows * 128;
    args.n = c.columns * 128, args.raster_group = 2, args.lag = c.lag;
    args.net.node = rank / c.world, args.net.nodes = c.nodes, args.net.slots = c.net_slots;
    args.net.lag = c.net_lag, args.net.chunk_tiles = c.chunk_tiles;
    order = mk::NetworkSchedule<kScatters>::template make<Tile>(args, c.grid);
  }

  /// Every tile once, in a place of its own, and `handled` the inverse of `rail`.
  bool covers_all() const {
    std::map<std::array<long, 2>, int> places;
    long tiles = 0;
    for (u32 at = 0; at < order.positions(); ++at) {
      const Task task = order.task(at);
      if (!task.valid) continue;
      const auto place = order.template place<Tile>(args, task);
      ++tiles, ++places[{place.row, place.column}];
      if (order.handled(order.rail(task.index)) != task.index) return false;
    }
    const long wanted = (long)c.rows * c.columns * (kScatters ? c.nodes * c.world : 1);
    return tiles == wanted && (long)places.size() == wanted;
  }

  /// A chunk is there when each of its tiles is.
  void need_chunk(Step& step, Kind kind, u32 from, u32 owner_node, u32 index) const {
    const u32 first = index - index % c.chunk_tiles, count = order.count(owner_node, local);
    for (u32 tile = first; tile < first + c.chunk_tiles && tile < count; ++tile) {
      step.needs.push_back({kind, rank, from, tile});
    }
  }

  Step send_partial(const Task& task) const {
    Step step;
    const u32 owner = first_of_node + task.owner, before = order.previous(task.owner, task.index, c.slots);
    if (before != order.kNone) step.needs.push_back({kPartialFree, rank, owner, before});
    step.raises.push_back({kPartial, owner, rank, task.index});
    return step;
  }

  Step sum(const Task& task) const {
    Step step;
    const mk::RailTile at = order.rail(task.index);
    const u32 before = order.previous(local, task.index, c.slots);
    for (u32 peer = first_of_node; peer < first_of_node + c.world; ++peer) {
      if (peer == rank) continue;
      step.needs.push_back({kPartial, rank, peer, task.index});
      if (!kScatters && at.node == order.node && before != order.kNone) {
        step.needs.push_back({kFinalFree, rank, peer, before});
      }
      step.raises.push_back({kPartialFree, peer, rank, task.index});
    }
    at.node == order.node ? finish(step, task, at) : pass_on(step, at);
    return step;
  }

  /// The node's sum goes to the rail peer that owns the tile.
  void pass_on(Step& step, const mk::RailTile& at) const {
    const u32 owner = at.node * c.world + local;
    if (at.index >= c.net_slots) {
      need_chunk(step, kScatters ? kNetPartialFree : kNetFinal, owner, at.node, at.index - c.net_slots);
    }
    step.raises.push_back({kNetPartial, owner, rank, at.index});
  }

  /// The nodes' sums are added to the own one.
  void finish(Step& step, const Task& task, const mk::RailTile& at) const {
    for (u32 node = 0; node < c.nodes; ++node) {
      if (node == order.node) continue;
      const u32 peer = node * c.world + local;
      need_chunk(step, kNetPartial, peer, order.node, at.index);
      if (!kScatters && at.index >= c.net_slots) {
        need_chunk(step, kNetFinalFree, peer, order.node, at.index - c.net_slots);
      }
      if (c.sends_credits) step.raises.push_back({kScatters ? kNetPartialFree : kNetFinal, peer, rank, at.index});
    }
    for (u32 peer = first_of_node; !kScatters && peer < first_of_node + c.world; ++peer) {
      if (peer != rank) step.raises.push_back({kFinal, peer, rank, task.index});
    }
  }

  Thread multiply(u32 block) const {
    Thread thread;
    for (u32 at = block; at < order.positions(); at += c.grid) {
      const Task task = order.task(at);
      if (task.valid) thread.push_back(task.owner == local ? sum(task) : send_partial(task));
    }
    return thread;
  }

  /// All-reduce: finished tiles from the rail peers, to this result and on to the other ranks of the node.
  Thread copy_from_network(u32 block) const {
    Thread thread;
    for (u32 turn = block; turn < order.per_node * (c.nodes - 1); turn += c.grid) {
      const u32 index = turn / (c.nodes - 1), node = (order.node + 1 + turn % (c.nodes - 1)) % c.nodes;
      if (index >= order.count(node, local)) continue;
      Step step;
      const u32 handled = order.handled(mk::RailTile{node, index}), before = order.previous(local, handled, c.slots);
      need_chunk(step, kNetFinal, node * c.world + local, node, index);
      for (u32 peer = first_of_node; peer < first_of_node + c.world; ++peer) {
        if (peer == rank) continue;
        if (before != order.kNone) step.needs.push_back({kFinalFree, rank, peer, before});
        step.raises.push_back({kFinal, peer, rank, handled});
      }
      step.raises.push_back({kNetFinalFree, node * c.world + local, rank, index});
      thread.push_back(step);
    }
    return thread;
  }

  /// All-reduce: finished tiles from the other ranks of the node.
  Thread copy_from_node(u32 block) const {
    Thread thread;
    for (u32 turn = block; turn < order.order.per_owner * (c.world - 1); turn += c.grid) {
      const u32 index = turn / (c.world - 1), owner = (local + 1 + turn % (c.world - 1)) % c.world;
      const mk::RailTile at = order.rail(index);
      if (at.index >= order.count(at.node, owner)) continue;
      thread.push_back({{{kFinal, rank, first_of_node + owner, index}},
                        {{kFinalFree, first_of_node + owner, rank, index}}});
    }
    return thread;
  }
};

/// Whether all threads come to their ends, whichever goes first: flags are only ever raised.
bool all_end(const std::vector<Thread>& threads) {
  std::set<Flag> raised;
  std::vector<size_t> next(threads.size(), 0);
  const auto ready = [&](const Step& step) {
    for (const Flag& flag : step.needs) {
      if (!raised.count(flag)) return false;
    }
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t i = 0; i < threads.size(); ++i) {
      for (; next[i] < threads[i].size() && ready(threads[i][next[i]]); ++next[i], moved = true) {
        for (const Flag& flag : threads[i][next[i]].raises) raised.insert(flag);
      }
    }
  }
  for (size_t i = 0; i < threads.size(); ++i) {
    if (next[i] < threads[i].size()) return false;
  }
  return true;
}

template <bool kScatters>
int walk_case(const Case& c) {
  std::vector<Thread> threads;
  for (u32 number = 0; number < c.nodes * c.world; ++number) {
    const Rank<kScatters> rank(c, number);
    if (!rank.covers_all()) return 1;
    for (u32 block = 0; block < c.grid; ++block) {
      threads.push_back(rank.multiply(block));
      if (kScatters) continue;
      threads.push_back(rank.copy_from_network(block));
      if (c.world > 1) threads.push_back(rank.copy_from_node(block));
    }
  }
  return all_end(threads) ? 0 : 2;
}

}  // namespace

/// 0: right; 1: tiles are missing or meet; 2: threads wait for each other.
extern "C" int walk(const u32* words) {
  Case c;
  static_assert(sizeof c == 12 * sizeof(u32));
  std::memcpy(&c, words, sizeof c);
  return c.scatters ? walk_case<true>(c) : walk_case<false>(c);
}
