#pragma once
// What the handles of the stand-in point to. All of it is guarded by one lock.
#include <infiniband/verbs.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "standin.h"

namespace mk::standin {

struct Context {
  verbs_context verbs{};
  u32 device = 0;
};

struct Memory {
  ibv_mr mr{};
  u64 base = 0;
  u32 device = 0;
  int access = 0;
};

struct Completions {
  ibv_cq cq{};
  std::deque<ibv_wc> waiting;
};

/// An address handle: who can be reached, and (on EFA) of whom writes are taken.
struct Handle {
  ibv_ah ah{};
  u32 device = 0;
  ibv_gid peer{};
};

/// One request on its way.
struct Request {
  u64 id = 0, source = 0, destination = 0;
  u32 source_key = 0, destination_key = 0, bytes = 0, immediate = 0;
  u32 remote_queue = 0;
  ibv_gid peer{};
  bool has_immediate = false, is_signalled = false, is_inline = false;
  std::vector<std::byte> inlined;
};

struct Queue {
  ibv_qp_ex extended{};  // its first member is the ibv_qp
  u32 device = 0;
  bool is_srd = false, signals_all = false;
  u32 most_sends = 0, most_receives = 0, in_flight = 0;
  ibv_qp_state state = IBV_QPS_RESET;
  ibv_gid peer{};
  u32 remote_queue = 0, queue_key = 0;
  u8 not_ready_tries = 0;
  std::deque<u64> receives;
  std::deque<Request> sent;   ///< on their way
  std::vector<Request> open;  ///< between wr_start and wr_complete
};

/// The whole stand-in.
class Fabric {
 public:
  static Fabric& get();

  std::mutex mutex;
  std::vector<Device> devices;
  std::map<u32, std::unique_ptr<Queue>> queues;   ///< by number
  std::map<u32, std::unique_ptr<Memory>> memory;  ///< by key
  std::vector<Handle*> handles;
  const void* refused = nullptr;
  u64 refused_bytes = 0;
  u64 num_open = 0;
  u32 next_number = 0x100, next_key = 0x1000;
  Seen seen;

  ibv_gid gid_of(u32 device, u32 port, u32 index) const;
  void start_wire();  ///< lock held; with the first context
  void stop_wire();   ///< lock not held; after the last
  void wake() { work_.notify_one(); }
  /// Every request and receive of a connection ends with an error.
  void break_queue(Queue& queue);
  void complete(Queue& queue, const Request& request, ibv_wc_status status);

 private:
  void run();
  bool step();
  bool deliver(Queue& queue, std::size_t position);
  ibv_wc_status check(Queue& from, const Request& request, Queue*& to);
  void put(const Request& request);

  std::condition_variable work_;
  std::thread wire_;
  u32 contexts_ = 0;
  bool ends_ = false;
  std::mt19937 random_{12345};
};

inline Queue& queue_of(ibv_qp* queue) { return *reinterpret_cast<Queue*>(queue); }
inline Queue& queue_of(ibv_qp_ex* queue) { return *reinterpret_cast<Queue*>(queue); }
inline Context& context_of(ibv_context* context) {
  return *reinterpret_cast<Context*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context));
}
/// A queue pair of either kind, or null with errno.
ibv_qp* make_queue(ibv_pd* domain, ibv_cq* sent, ibv_cq* received, const ibv_qp_cap& cap, bool is_srd);

}  // namespace mk::standin
