// The wire: one thread that takes requests and makes them take effect, each alone.
#include <atomic>
#include <chrono>
#include <cstring>

#include "objects.h"

namespace mk::standin {

namespace {

bool same(const ibv_gid& a, const ibv_gid& b) { return std::memcmp(a.raw, b.raw, sizeof a.raw) == 0; }

/// The registration of a device that allows all of [address, address + bytes).
Memory* find(Fabric& fabric, u32 key, u32 device, u64 address, u64 bytes) {
  const auto found = fabric.memory.find(key);
  if (found == fabric.memory.end() || found->second->device != device) return nullptr;
  Memory& memory = *found->second;
  const bool is_inside = address >= memory.base && bytes <= memory.mr.length &&
                         address - memory.base <= memory.mr.length - bytes;
  return is_inside ? &memory : nullptr;
}

}  // namespace

Fabric& Fabric::get() {
  static Fabric fabric;
  return fabric;
}

ibv_gid Fabric::gid_of(u32 device, u32 port, u32 index) const {
  ibv_gid gid{};
  const Gid& row = devices[device].ports[port - 1].gids[index];
  if (row.is_ipv4) {
    const u8 bytes[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, static_cast<u8>(device), static_cast<u8>(port),
                          static_cast<u8>(index + 1)};
    std::memcpy(gid.raw, bytes, sizeof bytes);
  } else {
    const u8 bytes[16] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, static_cast<u8>(device), static_cast<u8>(port),
                          static_cast<u8>(index + 1)};
    std::memcpy(gid.raw, bytes, sizeof bytes);
  }
  return gid;
}

void Fabric::start_wire() {
  ++num_open;
  if (contexts_++ != 0) return;
  ends_ = false;
  wire_ = std::thread([this] { run(); });
}

void Fabric::stop_wire() {
  {
    const std::scoped_lock lock(mutex);
    --num_open;
    if (--contexts_ != 0) return;
    ends_ = true;
  }
  work_.notify_one();
  wire_.join();
}

void Fabric::run() {
  std::unique_lock lock(mutex);
  while (!ends_) {
    if (step()) {
      lock.unlock();  // whoever posts or polls has its turn
      std::this_thread::yield();
      lock.lock();
    } else {
      work_.wait_for(lock, std::chrono::microseconds(200));
    }
  }
}

/// One request of each queue, or none.
bool Fabric::step() {
  bool moved = false;
  for (auto& [number, queue] : queues) {
    if (queue->sent.empty() || devices[queue->device].is_held) continue;
    const bool keeps_order = !queue->is_srd && devices[queue->device].keeps_order;
    const std::size_t position = keeps_order ? 0 : random_() % std::min<std::size_t>(queue->sent.size(), 16);
    seen.overtaken += position == 0 ? 0 : 1;
    moved |= deliver(*queue, position);
  }
  return moved;
}

/// May the request take effect? `to` is whose queue it names, if there is one.
ibv_wc_status Fabric::check(Queue& from, const Request& request, Queue*& to) {
  Device& device = devices[from.device];
  if (device.fails_after != ~0u && device.fails_after-- == 0) return IBV_WC_GENERAL_ERR;
  const u64 most = from.is_srd ? device.max_rdma_size : device.max_message;
  if (request.bytes > most) return IBV_WC_LOC_LEN_ERR;
  if (!request.is_inline && !find(*this, request.source_key, from.device, request.source, request.bytes)) {
    return IBV_WC_LOC_PROT_ERR;
  }
  const auto found = queues.find(request.remote_queue);
  if (found == queues.end()) return IBV_WC_RETRY_EXC_ERR;
  to = found->second.get();
  bool is_its_address = false;
  const Device& there = devices[to->device];
  for (u32 port = 1; port <= there.ports.size(); ++port) {
    for (u32 i = 0; i < there.ports[port - 1].gids.size(); ++i) {
      is_its_address |= same(request.peer, gid_of(to->device, port, i));
    }
  }
  const bool can_receive = to->state == IBV_QPS_RTR || to->state == IBV_QPS_RTS;
  if (!is_its_address || there.is_dead || device.is_dead || !can_receive) return IBV_WC_RETRY_EXC_ERR;
  if (from.is_srd) {
    bool knows_us = false;
    for (const Handle* handle : handles) {
      knows_us |= handle->device == to->device && same(handle->peer, gid_of(from.device, 1, 0));
    }
    if (!knows_us) return IBV_WC_REM_OP_ERR;
  }
  const Memory* target = find(*this, request.destination_key, to->device, request.destination, request.bytes);
  return target != nullptr && (target->access & IBV_ACCESS_REMOTE_WRITE) ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR;
}

/// Single words are stored whole, and release what the wire wrote before; so do real ones within a cache line.
void Fabric::put(const Request& request) {
  auto* to = reinterpret_cast<std::byte*>(request.destination);
  const auto* from = request.is_inline ? request.inlined.data() : reinterpret_cast<const std::byte*>(request.source);
  if (request.bytes == sizeof(u32) && request.destination % sizeof(u32) == 0) {
    u32 word = 0;
    std::memcpy(&word, from, sizeof word);
    std::atomic_ref<u32>(*reinterpret_cast<u32*>(to)).store(word, std::memory_order_release);
  } else {
    std::memcpy(to, from, request.bytes);
  }
  ++seen.writes;
  seen.bytes += request.bytes;
  seen.largest = std::max<u64>(seen.largest, request.bytes);
}

void Fabric::complete(Queue& queue, const Request& request, ibv_wc_status status) {
  if (!request.is_signalled && status == IBV_WC_SUCCESS) return;
  ibv_wc wc{};
  wc.wr_id = request.id;
  wc.status = status;
  wc.opcode = IBV_WC_RDMA_WRITE;
  wc.qp_num = queue.extended.qp_base.qp_num;
  reinterpret_cast<Completions*>(queue.extended.qp_base.send_cq)->waiting.push_back(wc);
}

void Fabric::break_queue(Queue& queue) {
  queue.state = IBV_QPS_ERR;
  for (const Request& request : queue.sent) complete(queue, request, IBV_WC_WR_FLUSH_ERR);
  queue.sent.clear();
  for (const u64 id : queue.receives) {
    ibv_wc wc{};
    wc.wr_id = id;
    wc.status = IBV_WC_WR_FLUSH_ERR;
    wc.qp_num = queue.extended.qp_base.qp_num;
    reinterpret_cast<Completions*>(queue.extended.qp_base.recv_cq)->waiting.push_back(wc);
  }
  queue.receives.clear();
}

bool Fabric::deliver(Queue& queue, std::size_t position) {
  Request request = queue.sent[position];
  Queue* to = nullptr;
  ibv_wc_status status = check(queue, request, to);
  if (status == IBV_WC_SUCCESS && request.has_immediate && to->receives.empty()) {
    ++seen.not_ready;
    if (queue.not_ready_tries == 7) return false;  // without end
    status = IBV_WC_RNR_RETRY_EXC_ERR;
  }
  queue.sent.erase(queue.sent.begin() + static_cast<std::ptrdiff_t>(position));
  --queue.in_flight;
  if (status == IBV_WC_SUCCESS) put(request);
  if (status == IBV_WC_SUCCESS && request.has_immediate) {
    ++seen.immediates;
    ibv_wc wc{};
    wc.wr_id = to->receives.front();
    wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    wc.imm_data = request.immediate;
    wc.wc_flags = IBV_WC_WITH_IMM;
    wc.byte_len = request.bytes;
    wc.qp_num = to->extended.qp_base.qp_num;
    wc.src_qp = queue.extended.qp_base.qp_num;
    to->receives.pop_front();
    reinterpret_cast<Completions*>(to->extended.qp_base.recv_cq)->waiting.push_back(wc);
  }
  const bool breaks = status != IBV_WC_SUCCESS && !queue.is_srd;
  seen.refused += status == IBV_WC_SUCCESS ? 0 : 1;
  if (breaks && devices[queue.device].flushes_first) break_queue(queue);
  complete(queue, request, status);
  if (breaks) break_queue(queue);
  return true;
}

}  // namespace mk::standin
