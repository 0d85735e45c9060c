#include "pair.h"

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
  open_on("nic", plan, common, kind, sides);
}

void join_pair(const Plan& plan, const ProxyOptions& common, TransportKind kind, Sides& sides) {
  join_on("nic", plan, common, kind, sides);
}

void exchange(const Plan& plan, Sides& sides) {
  const PairOutcome outcome = run_pair(plan, sides);
  const Outcome both[] = {outcome.first, outcome.second};
  check_outcomes(plan, both);
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
}

void check_nothing_is_left() { CHECK_EQUAL(standin::num_open(), 0u); }

int push(Side& side, u32 peer, u64 bytes, u32 chunk, u32 epoch) {
  u64 ticket = 0;
  return side.session->producer().push({0, 4096, bytes, peer, chunk, epoch, 0, 0}, now_ns() + 5 * kSecond, ticket);
}

Registration registration_of(Side& side) { return side.session->proxy().transport().registration(); }
bool counts(Side& side) { return side.session->proxy().transport().counts(); }

}  // namespace mk::test
