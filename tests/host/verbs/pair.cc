#include "pair.h"

#include <cstring>

#include "host/wait.h"

namespace mk::test {

using namespace mk::host;

void plug_in(const standin::Device& like) {
  std::vector<standin::Device> both(2, like);
  both[0].name = "nic0";
  both[1].name = "nic1";
  standin::set_devices(both);
}

standin::Device efa() {
  standin::Device device;
  device.vendor = 0x1d0f;
  device.is_efa = true;
  device.keeps_order = false;
  device.ports[0].gids = {{0, false}};
  return device;
}

Plan short_plan() {
  Plan plan;
  plan.messages = 200;
  plan.max_bytes = 16 << 10;
  return plan;
}

void open_pair(const Plan& plan, ProxyOptions common, TransportKind kind, Sides& sides) {
  common.transport = kind;
  for (u32 rank = 0; rank < 2; ++rank) {
    common.rank = rank;
    std::snprintf(common.device, sizeof common.device, "nic%u", rank);
    CHECK_EQUAL(text_of(open_side(plan, common, sides[rank])), std::string());
  }
}

void join_pair(const Plan& plan, const ProxyOptions& common, TransportKind kind, Sides& sides) {
  open_pair(plan, common, kind, sides);
  CHECK_EQUAL(text_of(connect_all(sides, 5 * kSecond)), std::string());
}

void exchange(const Plan& plan, Sides& sides) {
  const PairOutcome outcome = run_pair(plan, sides);
  for (const Outcome* one : {&outcome.first, &outcome.second}) {
    CHECK_EQUAL(one->failure, std::string());
    CHECK_EQUAL(one->received, plan.messages);
    CHECK_EQUAL(one->wrong, 0u);
  }
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
}

void check_nothing_is_left() { CHECK_EQUAL(standin::num_open(), 0u); }

std::string text_of(const Error& error) {
  if (!error) return {};
  return std::string(error.call) + " " + error.device + ": " + std::strerror(error.number) + " " + error.detail;
}

Error fault_of(Side& side) {
  Error error;
  Proxy& proxy = side.session->proxy();
  CHECK_EQUAL(wait_bounded(now_ns() + 10 * kSecond, [&] { return proxy.fault(error); }, [] { return false; }), 0);
  return error;
}

int push(Side& side, u32 peer, u64 bytes, u32 chunk, u32 epoch) {
  u64 ticket = 0;
  return side.session->producer().push({0, 4096, bytes, peer, chunk, epoch, 0, 0}, now_ns() + 5 * kSecond, ticket);
}

Registration registration_of(Side& side) { return side.session->proxy().transport().registration(); }
bool counts(Side& side) { return side.session->proxy().transport().counts(); }

}  // namespace mk::test
