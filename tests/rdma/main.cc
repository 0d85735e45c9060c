// mkproxy_rdma_tests NAME...: the tests whose name begins with one of these, in an order that does not depend on them.
// They need the devices rxe0 and rxe1; those of a pair need rxe2 and the other machine.
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <span>

#include "verbs_tests.h"

namespace {

bool passes(const mk::test::Test& test) {
  const auto started = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  };
  try {
    test.run();
    std::printf("ok %s  %.1f s\n", test.name, seconds());
    return true;
  } catch (const mk::test::Failure& failure) {
    std::printf("FAILED %s  %.1f s\n  %s\n", test.name, seconds(), failure.what());
    return false;
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // of all threads: those that wait look a thousand times a second and not twenty thousand, at 50 us of an emulated
  // processor each
  (void)prctl(PR_SET_TIMERSLACK, 1'000'000ul);
  const std::span<char*> names(arguments + 1, arguments + count);
  const auto is_wanted = [&](const mk::test::Test& test) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) {
      return std::strncmp(test.name, name, std::strlen(name)) == 0;
    });
  };
  int ran = 0, failed = 0;
  for (const auto& some : {mk::test::exchange_tests(), mk::test::independent_tests(), mk::test::fault_tests(),
                           mk::test::pair_tests()}) {
    for (const mk::test::Test& test : some) {
      if (!is_wanted(test)) continue;
      ++ran;
      failed += passes(test) ? 0 : 1;
    }
  }
  return ran == 0 || failed != 0 ? 1 : 0;
}
