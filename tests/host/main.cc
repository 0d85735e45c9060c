// mkproxy_tests [NAME | --without NAME | --list]: one test, all, all but one, or their names. Exit status 1 where one
// fails.
#include <chrono>
#include <cstdio>

#include "check.h"

namespace {

std::vector<mk::test::Test> all_tests() {
  std::vector<mk::test::Test> all;
  for (const auto& some :
       {mk::test::ring_tests(), mk::test::record_tests(), mk::test::window_tests(), mk::test::proxy_tests(),
        mk::test::emulated_tests(), mk::test::cuda_tests(), mk::test::tcp_tests(), mk::test::tcp_fault_tests()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

bool passes(const mk::test::Test& test) {
  const auto started = std::chrono::steady_clock::now();
  try {
    test.run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
    std::printf("ok %s  %.1f s\n", test.name, took.count());
    return true;
  } catch (const mk::test::Failure& failure) {
    std::printf("FAILED %s\n  %s\n", test.name, failure.what());
    return false;
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string first = count > 1 ? arguments[1] : "", second = count > 2 ? arguments[2] : "";
  int ran = 0, failed = 0;
  for (const mk::test::Test& test : all_tests()) {
    if (first == "--list") {
      std::puts(test.name);
      ++ran;
    } else if (first.empty() || first == test.name || (first == "--without" && second != test.name)) {
      ++ran;
      failed += passes(test) ? 0 : 1;
    }
  }
  return ran == 0 || failed != 0 ? 1 : 0;
}
