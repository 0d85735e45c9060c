// mkproxy_quiet [MESSAGES]: the proxy's loop over every transport of this machine, and what it did that it must not.
// Then the same with a defect: one callback of the loop allocates, locks, logs, reads the environment or opens a file.
// Exit status 1 where something was counted without a defect, or was not with one.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "slow_engine.h"
#include "two_ranks.h"
#include "calls.h"
#if MK_WITH_VERBS && MK_WITH_EFA
#include "verbs/pair.h"
#endif

namespace mk::test {

namespace {

using namespace mk::host;

/// A flag store that does what `defect` says; the proxy calls it for each arrival.
struct Defect {
  Kind kind = kKinds;
  std::mutex mutex;

  static i32 write(void* context, void* flag, u32 value) {
    auto& self = *static_cast<Defect*>(context);
    static int* volatile kept;  // else the compiler leaves the allocation out
    if (self.kind == kAllocation) {
      kept = new int(static_cast<int>(value));
      delete kept;
    } else if (self.kind == kLock) {
      const std::scoped_lock lock(self.mutex);
    } else if (self.kind == kLog) {
      if (::write(STDERR_FILENO, "", 0) < 0) return -1;
    } else if (self.kind == kEnvironment) {
      if (std::getenv("MKCOMPILE_NO_SUCH_VARIABLE") != nullptr) return -1;
    } else if (self.kind == kFile) {
      if (const int file = ::open("/dev/null", O_RDONLY, 0); file >= 0) ::close(file);
    }
    return SlowEngine::write(nullptr, flag, value);
  }
};

/// One exchange between two ranks.
struct Case {
  std::string name;
  TransportKind kind;
  u32 lanes = 1;
  EmulatedOrder order = kInOrder;
  u64 shuffle_ns = 0;
  u64 bounce_bytes = 0;
  bool has_engine = false;
  Kind defect = kKinds;
};

struct Devices {
  std::vector<SlowEngine> engines{2};
  std::vector<std::vector<std::byte>> bounce{2};
  Defect defect;
};

void open_rank(const Case& one, const Plan& plan, u32 rank, Devices& devices, Side& side) {
  ProxyOptions options = options_for(plan);
  options.transport = one.kind;
  options.rank = rank;
  options.lanes = one.lanes;
  options.order = one.order;
  options.shuffle_ns = one.shuffle_ns;
  options.bounce_bytes = one.bounce_bytes;
  if (one.bounce_bytes != 0) {
    devices.bounce[rank].resize(one.bounce_bytes);
    options.bounce_base = reinterpret_cast<u64>(devices.bounce[rank].data());
  }
  if (one.has_engine) {
    devices.engines[rank].jobs.reserve(1024);  // the engine is the test's
    use(devices.engines[rank], options);
  }
  if (one.defect != kKinds) {
    devices.defect.kind = one.defect;
    options.flag_context = reinterpret_cast<u64>(&devices.defect);
    options.flag_write = reinterpret_cast<u64>(&Defect::write);
  }
  if (one.kind == kRc || one.kind == kSrd || one.kind == kUnordered) {
    std::snprintf(options.device, sizeof options.device, "nic%u", rank);
  }
  CHECK_EQUAL(text_of(open_side(plan, options, side)), std::string());
}

/// What the two proxies did from their first round on, until all messages had come.
std::array<u64, kKinds> counts_of(const Case& one, const Plan& plan) {
  Devices devices;
  Sides sides;
  for (u32 rank = 0; rank < 2; ++rank) open_rank(one, plan, rank, devices, sides[rank]);
  CHECK_EQUAL(text_of(meet_all(sides, 20 * kSecond)), std::string());
  std::array<u64, kKinds> counts{};
  {
    const Counted counted;
    {
      const MakesProxies makes;
      for (std::size_t rank = 0; rank < 2; ++rank) CHECK(!sides[rank].session->proxy().start());
    }
    const PairOutcome outcome = run_pair(plan, sides);
    const Outcome both[] = {outcome.first, outcome.second};
    check_outcomes(plan, both);
    for (u32 kind = 0; kind < kKinds; ++kind) counts[kind] = counted.of(static_cast<Kind>(kind));
  }
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
  return counts;
}

std::vector<Case> cases() {
  std::vector<Case> all{
      {"emulated", kEmulated},
      {"emulated, shuffled", kEmulated, 3, kShuffled, 100'000},
      {"emulated, a copy engine", kEmulated, 1, kInOrder, 0, 0, true},
      {"tcp", kTcp, 2},
      {"tcp, pinned memory", kTcp, 2, kInOrder, 0, 4 * (32 << 10), true},
  };
#if MK_WITH_VERBS && MK_WITH_EFA
  all.push_back({"rc", kRc, 2});
  all.push_back({"unordered", kUnordered, 2});
  all.push_back({"srd", kSrd, 2});
#endif
  for (u32 kind = 0; kind < kKinds; ++kind) {
    Case one{std::string("defect: ") + name_of(static_cast<Kind>(kind)), kTcp};
    one.defect = static_cast<Kind>(kind);
    all.push_back(one);
  }
  return all;
}

bool is_right(const Case& one, Plan plan) {
#if MK_WITH_VERBS && MK_WITH_EFA
  plug_in(one.kind == kSrd ? efa() : standin::Device{});
#endif
  if (one.defect != kKinds) plan.messages = 100;
  const std::array<u64, kKinds> counts = counts_of(one, plan);
  bool right = true;
  std::string text;
  for (u32 kind = 0; kind < kKinds; ++kind) {
    const bool wanted = static_cast<Kind>(kind) == one.defect;
    right = right && (counts[kind] != 0) == wanted;
    if (counts[kind] != 0) text += " " + std::to_string(counts[kind]) + " " + name_of(static_cast<Kind>(kind));
  }
  std::printf("%s %s: %llu messages each way;%s%s%s\n", right ? "ok" : "FAILED", one.name.c_str(),
              static_cast<unsigned long long>(plan.messages), text.empty() ? " nothing" : text.c_str(),
              right ? "" : "; first by ", right ? "" : first_caller());
  return right;
}

}  // namespace

}  // namespace mk::test

int main(int count, char** arguments) {
  using namespace mk::test;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Plan plan;
  plan.messages = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 10'000;
  plan.max_bytes = 4 << 10;
  plan.delays = false;
  int failed = 0;
  try {
    for (const Case& one : cases()) failed += is_right(one, plan) ? 0 : 1;
  } catch (const Failure& failure) {
    std::printf("FAILED %s\n", failure.what());
    return 1;
  }
  return failed == 0 ? 0 : 1;
}
