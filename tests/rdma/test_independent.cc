// Rank 1 is a program that is not ours: tests/rdma/independent.py.
#include "stream.h"
#include "verbs_tests.h"

namespace mk::test {

using namespace mk::host;

namespace {

void exchange_with_pyverbs(TransportKind kind) {
  Plan plan = plan_of(std::min<u64>(400, many_messages() / 20));
  plan.max_bytes = 4096;  // Python makes the bytes up
  Child other({"/usr/bin/python3", "-B", "tests/rdma/independent.py"});
  std::ostringstream text;
  text << plan.messages << " " << plan.slots << " " << plan.max_bytes << " " << plan.seed;
  const std::string told = text.str();
  other.channel().send({reinterpret_cast<const u8*>(told.data()), told.size()});
  Sides sides(1);
  join_one(plan, options_to_drive(plan), {0, kind, "rxe0"}, other.channel(), sides[0]);
  const Party party{&sides[0], 0, 1};
  check_outcomes(plan, drive(plan, {&party, 1}));
  other.channel().meet();
  CHECK_EQUAL(text_of(close_all(sides, 5 * kSecond)), std::string());
  CHECK_EQUAL(other.status(), 0);
}

void rc_with_pyverbs() { exchange_with_pyverbs(kRc); }
void unordered_with_pyverbs() { exchange_with_pyverbs(kUnordered); }

}  // namespace

std::vector<Test> independent_tests() {
  return {{"rc/pyverbs_writes_to_us_and_reads_from_us", rc_with_pyverbs},
          {"unordered/pyverbs_writes_to_us_and_reads_from_us", unordered_with_pyverbs}};
}

}  // namespace mk::test
