// srd over a stand-in of an EFA device: no order, receives that have to be there, handles both ways, sizes of requests.
#include <cerrno>
#include <cstring>

#include "pair.h"

namespace mk::test {

namespace {

using namespace mk::host;

void every_byte_arrives_before_its_flag() {
  plug_in(efa());
  {
    const Plan plan = short_plan();
    Sides sides;
    join_pair(plan, options_for(plan), kSrd, sides);
    CHECK(counts(sides[0]));
    exchange(plan, sides);
    const standin::Seen seen = standin::seen();
    CHECK(seen.overtaken > 0);
    CHECK_EQUAL(seen.not_ready, 0u);
  }
  check_nothing_is_left();
}

/// Larger messages than a request may have go in pieces, smaller ones whole; the port's limit for sends is no limit.
void messages_are_cut_by_the_devices_own_size() {
  standin::Device nic = efa();
  nic.max_rdma_size = 10'000;
  plug_in(nic);
  Plan plan = short_plan();
  plan.max_bytes = 64 << 10;
  Sides sides;
  join_pair(plan, options_for(plan), kSrd, sides);
  exchange(plan, sides);
  CHECK_EQUAL(standin::seen().largest, 10'000u);
}

/// Many more pieces than a queue has receives: nobody sends what the peer has no receive for.
void credits_keep_receives_in_front_of_immediates() {
  standin::Device nic = efa();
  nic.max_rdma_size = 512;
  plug_in(nic);
  Plan plan = short_plan();
  plan.messages = 100;
  Sides sides;
  ProxyOptions options = options_for(plan);
  options.max_outstanding = 4;  // the shallowest queues
  join_pair(plan, options, kSrd, sides);
  exchange(plan, sides);
  const standin::Seen seen = standin::seen();
  CHECK(seen.immediates > 1000);
  CHECK_EQUAL(seen.not_ready, 0u);
}

/// Fault of rank 0 after it has sent a message.
Error fault_after_a_message(Sides& sides) {
  CHECK_EQUAL(push(sides[0], 1, 64, 0), 0);
  return fault_of(sides[0]);
}

void a_receiver_without_receives_is_a_fault() {
  standin::Device nic = efa();
  nic.loses_receives = true;
  plug_in(nic);
  Sides sides;
  join_pair(short_plan(), options_for(short_plan()), kSrd, sides);
  const Error error = fault_after_a_message(sides);
  CHECK_EQUAL(error.number, ENOBUFS);
  CHECK_EQUAL(error.peer, 1);
  CHECK(std::strstr(error.detail, "not ready") != nullptr);
}

/// Rank 1 has no handle of rank 0: its device takes nothing from a stranger.
void a_peer_without_our_handle_is_a_fault() {
  plug_in(efa());
  Sides sides;
  open_pair(short_plan(), options_for(short_plan()), kSrd, sides);
  std::vector<u8> blob;
  CHECK(!sides[1].session->endpoint(0, blob));
  CHECK_EQUAL(text_of(sides[0].session->connect(1, blob)), std::string());
  for (u32 rank = 0; rank < 2; ++rank) CHECK(!sides[rank].session->proxy().start());
  CHECK_EQUAL(fault_after_a_message(sides).number, ECONNABORTED);
}

void a_peer_that_is_gone_is_a_fault() {
  plug_in(efa());
  Sides sides;
  join_pair(short_plan(), options_for(short_plan()), kSrd, sides);
  standin::change("nic1", [](standin::Device& nic) { nic.is_dead = true; });
  const Error error = fault_after_a_message(sides);
  CHECK_EQUAL(error.number, ETIMEDOUT);
  CHECK_EQUAL(error.peer, 1);
}

std::string refusal(const standin::Device& nic) {
  plug_in(nic);
  const Plan plan = short_plan();
  ProxyOptions options = options_for(plan);
  options.transport = kSrd;
  std::snprintf(options.device, sizeof options.device, "nic0");
  Sides sides(1);
  const Error error = open_side(plan, options, sides[0]);
  CHECK(error.number == ENODEV || error.number == ENOTSUP || error.number == EOPNOTSUPP);
  return text_of(error);
}

void what_is_missing_is_said() {
  CHECK(refusal({}).find("not an EFA device") != std::string::npos);
  standin::Device nic = efa();
  nic.efa_caps = 1;
  CHECK(refusal(nic).find("no RDMA write (needs rdma-core 46") != std::string::npos);
  nic = efa();
  nic.max_rdma_size = 0;
  CHECK(refusal(nic).find("max_rdma_size is 0") != std::string::npos);
  nic = efa();
  nic.refuses_queues = EOPNOTSUPP;
  CHECK(refusal(nic).find("efadv_create_qp_ex") != std::string::npos);
  check_nothing_is_left();
}

void a_message_of_too_many_pieces_is_refused() {
  standin::Device nic = efa();
  nic.max_rdma_size = 1;
  plug_in(nic);
  Sides sides;
  join_pair(short_plan(), options_for(short_plan()), kSrd, sides);
  CHECK_EQUAL(push(sides[0], 1, 8192, 0), 0);
  CHECK_EQUAL(fault_of(sides[0]).number, EMSGSIZE);
}

}  // namespace

std::vector<Test> srd_tests() {
  return {{"srd/every_byte_arrives_before_its_flag", every_byte_arrives_before_its_flag},
          {"srd/messages_are_cut_by_the_devices_own_size", messages_are_cut_by_the_devices_own_size},
          {"srd/credits_keep_receives_in_front_of_immediates", credits_keep_receives_in_front_of_immediates},
          {"srd/a_receiver_without_receives_is_a_fault", a_receiver_without_receives_is_a_fault},
          {"srd/a_peer_without_our_handle_is_a_fault", a_peer_without_our_handle_is_a_fault},
          {"srd/a_peer_that_is_gone_is_a_fault", a_peer_that_is_gone_is_a_fault},
          {"srd/what_is_missing_is_said", what_is_missing_is_said},
          {"srd/a_message_of_too_many_pieces_is_refused", a_message_of_too_many_pieces_is_refused}};
}

}  // namespace mk::test
