// Posting and polling: what verbs.h reaches through the tables of a context and of a queue pair.
#include <cerrno>
#include <cstring>

#include "objects.h"

namespace mk::standin {

namespace {

Request& newest(ibv_qp_ex* extended) { return queue_of(extended).open.back(); }

void begin(ibv_qp_ex* extended, u32 key, u64 address) {
  Request request;
  request.id = extended->wr_id;
  request.is_signalled = (extended->wr_flags & IBV_SEND_SIGNALED) != 0;
  request.destination = address;
  request.destination_key = key;
  queue_of(extended).open.push_back(request);
}

/// Takes requests of a queue onto the wire; lock held.
int send(Fabric& fabric, Queue& queue, std::vector<Request>& requests) {
  if (queue.state == IBV_QPS_ERR) {  // a real one takes them, too, and says by completions that it did nothing
    for (const Request& request : requests) fabric.complete(queue, request, IBV_WC_WR_FLUSH_ERR);
    return 0;
  }
  if (queue.state != IBV_QPS_RTS) return EINVAL;
  if (queue.in_flight + requests.size() > queue.most_sends) return ENOMEM;
  for (Request& request : requests) {
    if (!queue.is_srd) {
      request.peer = queue.peer;
      request.remote_queue = queue.remote_queue;
    }
    queue.sent.push_back(request);
  }
  queue.in_flight += static_cast<u32>(requests.size());
  ++fabric.seen.doorbells;
  fabric.wake();
  return 0;
}

void fill_table(ibv_qp_ex& table) {
  table.wr_start = [](ibv_qp_ex* extended) { queue_of(extended).open.clear(); };
  table.wr_rdma_write = [](ibv_qp_ex* extended, u32 key, u64 address) { begin(extended, key, address); };
  table.wr_rdma_write_imm = [](ibv_qp_ex* extended, u32 key, u64 address, __be32 immediate) {
    begin(extended, key, address);
    newest(extended).has_immediate = true;
    newest(extended).immediate = immediate;
  };
  table.wr_set_sge = [](ibv_qp_ex* extended, u32 key, u64 address, u32 bytes) {
    Request& request = newest(extended);
    request.source = address;
    request.source_key = key;
    request.bytes = bytes;
  };
  table.wr_set_ud_addr = [](ibv_qp_ex* extended, ibv_ah* handle, u32 number, u32) {
    newest(extended).peer = reinterpret_cast<Handle*>(handle)->peer;
    newest(extended).remote_queue = number;
  };
  table.wr_complete = [](ibv_qp_ex* extended) {
    Fabric& fabric = Fabric::get();
    const std::scoped_lock lock(fabric.mutex);
    return send(fabric, queue_of(extended), queue_of(extended).open);
  };
}

}  // namespace

ibv_qp* make_queue(ibv_pd* domain, ibv_cq* sent, ibv_cq* received, const ibv_qp_cap& cap, bool is_srd) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  const u32 device = context_of(domain->context).device;
  const int refusal = fabric.devices[device].refuses_queues;
  if (refusal != 0 || cap.max_inline_data > fabric.devices[device].max_inline) {
    errno = refusal != 0 ? refusal : EINVAL;
    return nullptr;
  }
  auto queue = std::make_unique<Queue>();
  ibv_qp& base = queue->extended.qp_base;
  base.context = domain->context;
  base.send_cq = sent;
  base.recv_cq = received;
  base.qp_num = fabric.next_number++;
  queue->device = device;
  queue->is_srd = is_srd;
  queue->most_sends = cap.max_send_wr;
  queue->most_receives = cap.max_recv_wr;
  fill_table(queue->extended);
  ++fabric.num_open;
  return &fabric.queues.emplace(base.qp_num, std::move(queue)).first->second->extended.qp_base;
}

int post_send(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** refused) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  Queue& queue = queue_of(qp);
  std::vector<Request> requests;
  for (const ibv_send_wr* wr = first; wr != nullptr; wr = wr->next) {
    const bool with_immediate = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    *refused = const_cast<ibv_send_wr*>(wr);
    if (queue.is_srd || wr->num_sge != 1 || (!with_immediate && wr->opcode != IBV_WR_RDMA_WRITE)) return EINVAL;
    const ibv_sge& part = wr->sg_list[0];
    Request request;
    request.id = wr->wr_id;
    request.source = part.addr;
    request.source_key = part.lkey;
    request.bytes = part.length;
    request.destination = wr->wr.rdma.remote_addr;
    request.destination_key = wr->wr.rdma.rkey;
    request.has_immediate = with_immediate;
    request.immediate = wr->imm_data;
    request.is_signalled = (wr->send_flags & IBV_SEND_SIGNALED) != 0;
    request.is_inline = (wr->send_flags & IBV_SEND_INLINE) != 0;
    if (request.is_inline) {
      if (part.length > fabric.devices[queue.device].max_inline) return EINVAL;
      const auto* bytes = reinterpret_cast<const std::byte*>(part.addr);
      request.inlined.assign(bytes, bytes + part.length);
    }
    requests.push_back(request);
  }
  return send(fabric, queue, requests);
}

int post_recv(ibv_qp* qp, ibv_recv_wr* first, ibv_recv_wr** refused) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  Queue& queue = queue_of(qp);
  for (ibv_recv_wr* wr = first; wr != nullptr; wr = wr->next) {
    *refused = wr;
    if (queue.state == IBV_QPS_RESET) return EINVAL;
    if (queue.receives.size() == queue.most_receives) return ENOMEM;
    if (!fabric.devices[queue.device].loses_receives) queue.receives.push_back(wr->wr_id);
  }
  fabric.wake();
  return 0;
}

int poll_cq(ibv_cq* cq, int room, ibv_wc* completions) {
  Fabric& fabric = Fabric::get();
  const std::scoped_lock lock(fabric.mutex);
  auto& waiting = reinterpret_cast<Completions*>(cq)->waiting;
  int count = 0;
  for (; count < room && !waiting.empty(); ++count) {
    completions[count] = waiting.front();
    waiting.pop_front();
  }
  return count;
}

}  // namespace mk::standin
