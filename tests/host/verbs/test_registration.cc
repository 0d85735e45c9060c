// Which NIC, which port and which address; and how its NIC reaches the region.
#include <cerrno>
#include <cstring>

#include "../cuda_driver.h"
#include "pair.h"

namespace mk::test {

namespace {

using namespace mk::host;
using standin::Gid;
using standin::Port;

constexpr Gid kV1{1, true}, kV2{2, true}, kV1Local{1, false}, kV2Local{2, false}, kInfiniBand{0, false};
constexpr Gid kHole{2, true, true};

Error open_one(const std::string& device, Side& side) {
  const Plan plan = short_plan();
  ProxyOptions options = options_for(plan);
  options.transport = kRc;
  options.timeout_ns = kSecond / 20;  // how long an address is waited for
  std::snprintf(options.device, sizeof options.device, "%s", device.c_str());
  return open_side(plan, options, side);
}

/// Device that is chosen on a machine with these ports, or the error's text.
std::string chosen(const std::vector<Port>& ports, const std::string& wanted = "") {
  standin::Device nic;
  nic.name = "nic0";
  nic.ports = ports;
  standin::set_devices({nic});
  Sides sides(1);
  if (const Error error = open_one(wanted, sides[0])) return text_of(error);
  return sides[0].session->proxy().transport().device();
}

void an_address_is_found_by_its_kind() {
  CHECK_EQUAL(chosen({{true, true, {kV2}}}), "nic0/1 gid 0");
  CHECK_EQUAL(chosen({{true, true, {kV1Local, kV2Local, kV1, kV2}}}), "nic0/1 gid 3");
  CHECK_EQUAL(chosen({{true, true, {kV1, kV2, kV1Local, kV2Local}}}), "nic0/1 gid 1");
  CHECK_EQUAL(chosen({{true, true, {kHole, kHole, kV1, kV2}}}), "nic0/1 gid 3");
  CHECK_EQUAL(chosen({{true, false, {kInfiniBand}}}), "nic0/1 gid 0");
}

void a_port_without_such_an_address_is_refused() {
  for (const std::vector<Gid>& gids : {std::vector<Gid>{}, {kV1, kV1Local}, {kV2Local}, {kHole}}) {
    const std::string text = chosen({{true, true, gids}});
    CHECK(text.find("no RoCE v2 address with IPv4") != std::string::npos);
  }
}

void the_first_active_port_is_taken_or_the_wanted_one() {
  const Port down{false, true, {kV2}}, up{true, true, {kV2}};
  CHECK_EQUAL(chosen({down, up}), "nic0/2 gid 0");
  CHECK_EQUAL(chosen({up, up}, "nic0/2"), "nic0/2 gid 0");
  CHECK_EQUAL(chosen({up, up}, "nic0"), "nic0/1 gid 0");
  CHECK(chosen({down, up}, "nic0/1").find("not active") != std::string::npos);
  CHECK(chosen({up}, "nic0/3").find("it has 1 ports") != std::string::npos);
  CHECK(chosen({down, down}).find("not active") != std::string::npos);
}

void a_device_that_is_not_there_is_named() {
  plug_in();
  Sides sides(1);
  Error error = open_one("nic7", sides[0]);
  CHECK_EQUAL(error.number, ENODEV);
  CHECK_EQUAL(std::string(error.device), std::string("nic7"));
  standin::set_devices({});
  error = open_one("", sides[0]);
  CHECK_EQUAL(error.number, ENODEV);
  CHECK(std::strstr(error.detail, "no RDMA device") != nullptr);
}

void a_queue_that_the_nic_refuses_is_an_error() {
  standin::Device nic;
  nic.refuses_queues = ENOMEM;
  plug_in(nic);
  Sides sides(1);
  const Error error = open_one("nic0", sides[0]);
  CHECK_EQUAL(std::string(error.call), std::string("ibv_create_qp"));
  CHECK_EQUAL(error.number, ENOMEM);
}

/// What a machine allows, and how far the chain goes there.
struct Way {
  int dmabuf;     ///< descriptor
  int refuses_dmabuf, refuses_memory;
  bool has_engine;
  WriteOrder order;
  Registration expected;
};

void region_of_a_device(const Way& way) {
  standin::Device nic;
  nic.refuses_dmabuf = way.refuses_dmabuf;
  nic.refuses_memory = way.refuses_memory;
  plug_in(nic);
  const Plan plan = short_plan();
  Error error;
  const auto engine = cuda::Engine::open(cuda_driver(), 0, error);
  Sides sides(1);
  sides[0].memory.resize(region_bytes(plan));
  standin::refuse(sides[0].memory.data(), sides[0].memory.size());
  ProxyOptions options = options_for(plan);
  options.transport = kRc;
  options.region_base = reinterpret_cast<u64>(sides[0].memory.data());
  options.memory_kind = static_cast<u32>(MemoryKind::kCuda);
  options.dmabuf = way.dmabuf;
  options.write_order = way.order;
  if (way.has_engine) use_engine(*engine, options);
  error = open_side(plan, options, sides[0]);
  if (way.expected == Registration::kRefused) {
    CHECK_EQUAL(std::string(error.call), std::string(way.order == kWritesUnordered ? "register_memory" : "ibv_reg_mr"));
    return;
  }
  CHECK_EQUAL(text_of(error), std::string());
  CHECK(registration_of(sides[0]) == way.expected);
  CHECK_EQUAL(counts(sides[0]), way.order != kWritesInOrder || way.expected == Registration::kBounce);
}

void each_way_is_tried_after_the_better_one() {
  for (const Way& way : {Way{5, 0, 0, true, kWritesInOrder, Registration::kDmaBuf},
                         Way{5, 0, EFAULT, false, kWritesInOrder, Registration::kDmaBuf},
                         Way{5, EOPNOTSUPP, 0, true, kWritesInOrder, Registration::kPeerMem},
                         Way{-1, 0, 0, true, kWritesInOrder, Registration::kPeerMem},
                         Way{5, EOPNOTSUPP, EFAULT, true, kWritesInOrder, Registration::kBounce},
                         Way{5, EOPNOTSUPP, EFAULT, false, kWritesInOrder, Registration::kRefused},
                         Way{5, 0, 0, true, kWritesFlushed, Registration::kDmaBuf},
                         Way{5, 0, 0, true, kWritesUnordered, Registration::kBounce},
                         Way{5, 0, 0, false, kWritesUnordered, Registration::kRefused}}) {
    region_of_a_device(way);
    check_nothing_is_left();
  }
}

void a_region_that_is_out_of_reach_says_why() {
  standin::Device nic;
  nic.refuses_memory = EFAULT;
  plug_in(nic);
  const Plan plan = short_plan();
  Sides sides(1);
  sides[0].memory.resize(region_bytes(plan));
  standin::refuse(sides[0].memory.data(), sides[0].memory.size());
  ProxyOptions options = options_for(plan);
  options.transport = kRc;
  options.region_base = reinterpret_cast<u64>(sides[0].memory.data());
  options.memory_kind = static_cast<u32>(MemoryKind::kCuda);
  options.dmabuf = 5;
  const Error error = open_side(plan, options, sides[0]);
  CHECK_EQUAL(error.number, EFAULT);
  CHECK_EQUAL(std::string(error.detail), std::string("dma-buf: Operation not supported; nvidia-peermem: Bad address"));
}

/// Flags of a counting rank are its proxy's to store, which can't reach device memory without an engine.
void device_memory_that_is_counted_needs_an_engine() {
  plug_in();
  const Plan plan = short_plan();
  Sides sides(1);
  ProxyOptions options = options_for(plan);
  options.transport = kRc;
  options.memory_kind = static_cast<u32>(MemoryKind::kCuda);
  options.write_order = kWritesFlushed;
  CHECK_EQUAL(std::string(open_side(plan, options, sides[0]).call), std::string("options"));
}

}  // namespace

std::vector<Test> registration_tests() {
  return {{"gid/an_address_is_found_by_its_kind", an_address_is_found_by_its_kind},
          {"gid/a_port_without_such_an_address_is_refused", a_port_without_such_an_address_is_refused},
          {"port/the_first_active_port_is_taken_or_the_wanted_one", the_first_active_port_is_taken_or_the_wanted_one},
          {"device/a_device_that_is_not_there_is_named", a_device_that_is_not_there_is_named},
          {"device/a_queue_that_the_nic_refuses_is_an_error", a_queue_that_the_nic_refuses_is_an_error},
          {"registration/each_way_is_tried_after_the_better_one", each_way_is_tried_after_the_better_one},
          {"registration/a_region_that_is_out_of_reach_says_why", a_region_that_is_out_of_reach_says_why},
          {"registration/device_memory_that_is_counted_needs_an_engine",
           device_memory_that_is_counted_needs_an_engine}};
}

}  // namespace mk::test
